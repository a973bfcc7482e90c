"""The series that one process writes, by name: those of its roles; every other one is there too, and does nothing."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from trainer.metrics.files import Cell, Files, Key, nothing
from trainer.metrics.table import SERIES, Kind, Role, Series

_KINDS: tuple[Kind, ...] = ("counter", "gauge", "histogram")


class Distribution:
    """Count values by size, as a histogram does."""

    def __init__(self, bounds: tuple[float, ...], *, total: Cell, counts: list[Cell]) -> None:
        self._bounds, self._total, self._counts = bounds, total, counts

    def observe(self, value: float) -> None:
        """Count one value."""
        self._total.add(value)
        self._counts[bisect.bisect_left(self._bounds, value)].add(1.0)


class Panel:
    """Hold a process's numbers.

    Args:
        files: None: no series is written.
        roles: what the process is.
        rank: its rank in the job, for the label.

    Raises:
        OSError: there is no room for the files.
    """

    def __init__(self, files: Files | None, *, roles: tuple[Role, ...] = (), rank: int = 0) -> None:
        self._files, self._roles, self._rank = files, frozenset(roles), str(rank)
        self._cells: dict[tuple[str, str], Cell] = {}
        self._distributions: dict[tuple[str, str], Distribution] = {}
        for kind in _KINDS:
            series = [one for one in SERIES if one.kind == kind and not one.facts]
            ours = [one for one in series if self._is_ours(one)]
            self._fill(kind, ours, files)
            self._fill(kind, [one for one in series if one not in ours], None)

    def cell(self, name: str, value: str = "") -> Cell:
        """Return the number of a series; `value` is that of its label, if it has one."""
        return self._cells[name, value]

    def distribution(self, name: str, value: str = "") -> Distribution:
        """Return a histogram's numbers."""
        return self._distributions[name, value]

    def choose(self, name: str, chosen: str) -> None:
        """Set the one of a gauge's series whose label is `chosen` to 1 and the others to 0."""
        for (series, value), cell in self._cells.items():
            if series == name:
                cell.set(1.0 if value == chosen else 0.0)

    def state(self, name: str, facts: Mapping[str, str]) -> None:
        """Set a metric that is always 1 and tells by its labels."""
        (series,) = (one for one in SERIES if one.name == name)
        if self._files is not None and self._is_ours(series):
            keys = [_key(series, {**self._own(series), **facts})]
            self._files.cells("gauge", keys=keys)[0].set(1.0)

    def _is_ours(self, series: Series) -> bool:
        return self._files is not None and bool(self._roles.intersection(series.writers))

    def _own(self, series: Series) -> dict[str, str]:
        return {"rank": self._rank} if series.scope == "R" else {}

    def _fill(self, kind: Kind, family: list[Series], files: Files | None) -> None:
        """Make the numbers of all series of one kind, in the process's file or nowhere."""
        wanted = [(series, value) for series in family for value in series.values or ("",)]
        keys = [self._keys(series, value) for series, value in wanted]
        flat = [key for of_one in keys for key in of_one]
        cells = iter(files.cells(kind, keys=flat) if files and flat else [nothing() for _ in flat])
        for (series, value), of_one in zip(wanted, keys, strict=True):
            total, *counts = (next(cells) for _ in of_one)
            if counts:
                self._distributions[series.name, value] = Distribution(series.buckets, total=total, counts=counts)
            else:
                self._cells[series.name, value] = total

    def _keys(self, series: Series, value: str) -> list[Key]:
        labels = self._own(series) | ({series.label: value} if series.label else {})
        if not series.buckets:
            return [_key(series, labels)]
        bounds = [*(str(float(bound)) for bound in series.buckets), "+Inf"]
        counts = [_key(series, labels | {"le": bound}, suffix="_bucket") for bound in bounds]
        return [_key(series, labels, suffix="_sum"), *counts]


def _key(series: Series, labels: Mapping[str, str], *, suffix: str = "") -> Key:
    family = series.name.removesuffix("_total") if series.kind == "counter" else series.name
    return Key(family, series.name + suffix, labels, series.help)
