"""Every expression of rules and dashboard is asked of a real Prometheus: none is wrong, and all that can have data have it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.monitoring import source
from tests.monitoring.conftest import Prometheus
from tests.monitoring.expressions import Expression, expressions

#: At least four scrapes, as Grafana has it.
INTERVAL = "6s"
EXPRESSIONS = expressions(interval=INTERVAL)

_DCGM = "DCGM's exporter needs a GPU"
_MEMORY = "only a GPU's memory is told"
#: What has no data on a CPU, and why.
WITHOUT_DATA = {
    "GPUIdleWhileTraining": _DCGM,
    "GPUHardwareError": _DCGM,
    "Ranks / Device memory / A": _MEMORY,
    "Ranks / Device memory / B": _MEMORY,
    "GPU (DCGM) / Active / A": _DCGM,
    "GPU (DCGM) / Memory / A": _DCGM,
    "GPU (DCGM) / Power / A": _DCGM,
    "GPU (DCGM) / Temperature / A": _DCGM,
    "GPU (DCGM) / Last XID / A": _DCGM,
}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a run for long enough to have all rates, and the rules made of them."""
    with source.nodes() as targets:
        server = Prometheus.start(tmp_path_factory.mktemp("prometheus"), targets=targets)
        try:
            server.wait_for("count(count_over_time(trainer_steps_total[1m]) >= 4) == 4")
            server.wait_for("job:trainer_goodput:ratio_rate1h")
            yield server
        finally:
            server.close()


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda expression: expression.where)
def test_expression_is_right_and_has_data(prometheus: Prometheus, expression: Expression):
    found = prometheus.query(expression.text)
    if expression.kind == "alert":  # it has none as long as all is well, but what it reads has
        assert [one["metric"] for one in found] == []
        parts = [bool(prometheus.query(f"last_over_time({selector}[5m])")) for selector in expression.reads]
        has_data = bool(parts) and all(parts)
    else:
        has_data = bool(found)
    assert has_data is (expression.where not in WITHOUT_DATA)


def test_list_of_what_has_no_data_names_expressions_that_are_there():
    assert WITHOUT_DATA.keys() - {expression.where for expression in EXPRESSIONS} == set()


def test_lines_of_a_panel_can_be_told_apart(prometheus: Prometheus):
    """A legend that leaves out a label by which two lines differ would show two lines of one name."""
    for expression in EXPRESSIONS:
        if expression.kind == "panel" and expression.where not in WITHOUT_DATA and not _is_table(expression):
            found = prometheus.query(expression.text)
            names = [_named(expression.legend, one["metric"]) for one in found]
            assert len(names) == len(set(names)), f"{expression.where}: {names}"


def test_no_alert_of_a_run_that_is_well_fires(prometheus: Prometheus):
    assert prometheus.query("ALERTS") == []


def test_wrong_expression_is_an_error_here(prometheus: Prometheus):
    with pytest.raises(AssertionError, match="many-to-many|duplicate series"):
        prometheus.query("trainer_phase + on () trainer_steps_total")


def _is_table(expression: Expression) -> bool:
    return any(name.endswith("_info") for name, _ in expression.selectors)


def _named(legend: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace("{{" + name + "}}", value)
    return legend
