"""Every expression of the rules and of the dashboard, as Prometheus is asked it, and the series that it reads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from tests.monitoring.conftest import DOCKER, RULES

DASHBOARD = DOCKER / "grafana" / "dashboards" / "trainer.json"

SELECTOR = re.compile(r"\b((?:trainer_|DCGM_|process_|job:|rank:)[\w:]+|up)\b(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


@dataclass(frozen=True)
class Expression:
    """Say where an expression stands.

    Attributes:
        where: the rule's name; or the panel's row and title, and the letter of the query.
        text: with the dashboard's variables replaced.
        legend: of a panel's query.
    """

    kind: Literal["record", "alert", "panel"]
    where: str
    text: str
    legend: str = ""

    @property
    def selectors(self) -> list[tuple[str, dict[str, str]]]:
        """Return the series that it reads: each name with what its labels are compared with."""
        found = SELECTOR.findall(self.text)
        return [(name, {label: value for label, _, value in MATCHER.findall(braces)}) for name, braces in found]

    @property
    def reads(self) -> list[str]:
        """Return the selectors as they are written."""
        return ["".join(groups) for groups in SELECTOR.findall(self.text)]


def rules() -> list[dict[str, Any]]:
    """Return the rules of all groups."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Return the panels of the dashboard that is committed, each with its row's title."""
    found, row = [], ""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            found.append((row, panel))
    return found


def expressions(*, interval: str = "1m") -> list[Expression]:
    """Return all of them.

    Args:
        interval: what stands for the dashboard's $__rate_interval; at least four scrapes.
    """
    found = [
        Expression("alert", rule["alert"], rule["expr"])
        if "alert" in rule
        else Expression("record", rule["record"], rule["expr"])
        for rule in rules()
    ]
    for row, panel in panels():
        for query in panel["targets"]:
            where = f"{row} / {panel['title']} / {query['refId']}"
            found.append(Expression("panel", where, replaced(query["expr"], interval=interval), query["legendFormat"]))
    return found


def replaced(text: str, *, interval: str) -> str:
    """Put values in the place of Grafana's variables: all runs, all instances."""
    values = {"$__rate_interval": interval, "$job_name": ".*", "$job": ".*", "$instance": ".*"}
    for variable, value in values.items():
        text = text.replace(variable, value)
    assert "$" not in text.replace('"$1"', ""), f"a variable is left: {text}"
    return text
