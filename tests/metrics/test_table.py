"""The catalogue: names as Prometheus wants them, and a page that is in step with it."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from trainer.metrics import renewed
from trainer.metrics.table import SERIES

PAGE = ROOT / "docs/metrics.md"


def test_every_name_is_there_once():
    names = [series.name for series in SERIES]
    assert len(names) == len(set(names)) == 45


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_series_is_declared_by_the_rules(series):
    assert series.name.startswith("trainer_")
    assert series.name.endswith("_total") == (series.kind == "counter")
    assert series.name.endswith("_info") == bool(series.facts)
    assert bool(series.buckets) == (series.kind == "histogram")
    assert bool(series.label) == bool(series.values)
    assert list(series.buckets) == sorted(series.buckets)
    assert series.help.endswith(".")
    assert series.scope == "N" or not series.by, "the scope says who writes it"


def test_page_is_in_step_with_the_table():
    assert renewed(PAGE.read_text()) == PAGE.read_text(), "run `make docs`"


def test_page_without_the_mark_is_not_written_over():
    with pytest.raises(ValueError, match="lacks the line"):
        renewed("# Metrics\n")
