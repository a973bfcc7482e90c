"""The dashboard: what is committed is what the Python file makes, every panel says what it shows, and nothing is left out."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.monitoring.conftest import DOCKER
from tests.monitoring.expressions import DASHBOARD, expressions, panels
from tests.monitoring.test_rules import CATALOGUE, OF_TARGETS
from trainer.metrics.table import SERIES

PANELS = [pytest.param(panel, id=f"{row} / {panel['title']}") for row, panel in panels()]
ROWS = ["Overview", "Learning", "Step time", "Ranks", "Data", "Checkpoints", "Goodput", "GPU (DCGM)", "Lifecycle"]
#: A dashboard in a ConfigMap must stay below what Kubernetes takes.
BYTES = 200_000


def test_committed_dashboard_is_the_one_that_the_code_makes():
    made = subprocess.run(
        [sys.executable, DOCKER / "grafana" / "dashboard.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == json.loads(DASHBOARD.read_text()), "run `make dashboard`"
    assert len(made.stdout) < BYTES


def test_rows_and_variables():
    dashboard = json.loads(DASHBOARD.read_text())
    assert [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"] == ROWS
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "job_name", "instance"]
    assert {variables[name]["allValue"] for name in ("job", "job_name", "instance")} == {".*"}


@pytest.mark.parametrize("panel", PANELS)
def test_panel_says_what_it_shows(panel):
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert all(query["legendFormat"] for query in panel["targets"])
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    found = json.loads(DASHBOARD.read_text())["panels"]
    ids = [panel["id"] for panel in found]
    places = [panel["gridPos"] for panel in found]
    taken = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(ids)) == len(ids)
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) == 23


def test_legends_name_labels_that_are_there():
    for expression in expressions():
        labels = OF_TARGETS | {"le"}
        for name, _ in expression.selectors:
            series = CATALOGUE.get(name) or CATALOGUE.get(name.rpartition("_")[0])
            labels |= set(series.labels) if series else set()
        assert set(re.findall(r"\{\{(\w+)\}\}", expression.legend)) <= labels, expression.where


def test_every_series_of_the_catalogue_is_shown():
    shown = {name for expression in expressions() if expression.kind == "panel" for name, _ in expression.selectors}
    names = {series.name for series in SERIES}
    assert names - {re.sub("_(bucket|sum|count)$", "", name) for name in shown} == set()
