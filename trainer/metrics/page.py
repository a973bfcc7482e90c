"""The table of docs/metrics.md, made from the catalogue; what stands above it is written by hand."""

from __future__ import annotations

from trainer.metrics.table import SERIES, Series

#: Above it a page is kept as it is; below it everything is written anew.
MARK = "<!-- The table below is written by `make docs` from trainer/metrics/table.py. -->\n"

_HEAD = "| name | type | labels | scope | changes | what it is |\n| --- | --- | --- | --- | --- | --- |\n"
_PROCESS = "| `process_*` | gauge, counter |  | N | scrape | CPU seconds, memory, start and open files of the process that serves them. |\n"


def renewed(page: str) -> str:
    """Return docs/metrics.md with the table of today. Raises ValueError: the mark is not there."""
    head, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"the page lacks the line {MARK!r}, after which the table comes")
    return f"{head}{MARK}\n{_HEAD}{''.join(map(_row, SERIES))}{_PROCESS}"


def _row(series: Series) -> str:
    labels = [f"`{name}`" for name in series.labels if name != series.label]
    labels += [f"`{series.label}`: {', '.join(series.values)}"] if series.label else []
    kind: str = series.kind
    if series.buckets:
        kind += f" up to {', '.join(f'{bound:g}' for bound in series.buckets)}"
    return f"| `{series.name}` | {kind} | {'; '.join(labels)} | {series.scope} | {series.when} | {series.help} |\n"
