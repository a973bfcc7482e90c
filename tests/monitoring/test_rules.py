"""The rules and Prometheus' configuration: promtool's own checks, a case that fires and one that does not for every alert."""

from __future__ import annotations

import pytest
import yaml

from tests.monitoring.conftest import DOCKER, RULES
from tests.monitoring.expressions import Expression, expressions, rules
from trainer.metrics.table import SERIES, Series

FOLDER = DOCKER / "prometheus"
CASES = sorted(FOLDER.glob("tests/*.yml"))
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
CATALOGUE = {series.name: series for series in SERIES}
#: Labels that the trainer does not give: Prometheus' own, and those of a PodMonitor.
OF_TARGETS = {"job", "namespace", "job_name", "pod", "instance"}


def test_rules_are_valid(promtool):
    result = promtool("check", "rules", RULES)
    assert result.returncode == 0, result.stdout


def test_configuration_is_valid_and_takes_the_rules(promtool):
    result = promtool("check", "config", FOLDER / "prometheus.yml")
    assert result.returncode == 0, result.stdout
    assert "1 rule files found" in result.stdout


@pytest.mark.parametrize("file", CASES, ids=lambda path: path.stem)
def test_cases_hold(promtool, file):
    result = promtool("test", "rules", file)
    assert result.returncode == 0, result.stdout


def test_every_alert_has_a_case_that_fires_and_one_that_does_not():
    fires, silent = set(), set()
    for file in CASES:
        for case in yaml.safe_load(file.read_text())["tests"]:
            names = " ".join(one["series"] for one in case["input_series"])
            for test in case.get("alert_rule_test", []):
                alert = test["alertname"]
                (fires if test["exp_alerts"] else silent).add(alert)
                assert any(name in names for name in _read(alert)), (
                    f"{case['name']}: it has nothing that the alert reads"
                )
    assert fires == silent == ALERTS.keys()


def _read(alert: str) -> set[str]:
    """Return the series that an alert reads, those that its recorded ones are made of included."""
    made = {one.where: {name for name, _ in one.selectors} for one in expressions()}
    return {source for name in made[alert] for source in made.get(name, {name})}


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_how_bad_it_is_what_it_means_and_what_to_do(alert):
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert rule["annotations"]["description"].count(". ") >= 1, "what it means, and what to do"


@pytest.mark.parametrize("expression", expressions(), ids=lambda expression: expression.where)
def test_series_and_labels_are_those_of_the_catalogue(expression: Expression):
    assert expression.selectors
    for name, matchers in expression.selectors:
        if name.startswith("trainer_"):
            series = _series(name)
            for label, value in matchers.items():
                _check(series, label=label, value=value)


def _series(name: str) -> Series:
    found = CATALOGUE.get(name) or CATALOGUE.get(name.rpartition("_")[0])
    assert found, f"{name} is not in the catalogue"
    assert (name == found.name) is (found.kind != "histogram"), name
    return found


def _check(series: Series, *, label: str, value: str) -> None:
    if label not in OF_TARGETS:
        assert label in series.labels, f"{series.name} has no label {label}"
    if label == series.label:
        assert set(value.split("|")) <= set(series.values), f"{series.name}: {value}"
