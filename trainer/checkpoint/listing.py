"""What a person wants to know of a run's checkpoints: step, time, size, whether valid, which is the best."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainer.checkpoint.layout import FOLDER, MANIFEST, STATE, best_step, find, step_of
from trainer.checkpoint.reading import verify
from trainer.codes import CheckpointError


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    Attributes:
        when: when it was written, in UTC.
        size: bytes of its files.
        fault: why it is not valid; "" if it is.
        best: whether the newest valid checkpoint says that the best evaluation was at its step.
    """

    path: Path
    step: int
    when: datetime
    size: int
    fault: str
    best: bool

    @property
    def is_valid(self) -> bool:
        """Tell whether its digests hold."""
        return not self.fault


def listing(run: Path) -> list[Row]:
    """Return a row for each checkpoint of a run (its folder, or that of its checkpoints), newest first; reads them all.

    Raises:
        CheckpointError: there is none, or they cannot be listed.
    """
    found = find(run / FOLDER) or find(run)
    if not found:
        raise CheckpointError(f"{run} holds no checkpoints; name a run's folder")
    faults = {path: _fault(path) for path in found}
    newest = next((path for path in found if not faults[path]), None)
    best = _best(newest) if newest else None
    return [_row(path, fault=fault, best=best) for path, fault in faults.items()]


def _fault(path: Path) -> str:
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return ""


def _best(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):  # another program's state
        return best_step(json.loads((path / STATE).read_bytes()))
    return None


def _row(path: Path, *, fault: str, best: int | None) -> Row:
    sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
    dated = path / MANIFEST if (path / MANIFEST).exists() else path
    when = datetime.fromtimestamp(dated.stat().st_mtime, tz=UTC)
    step = step_of(path)
    assert step is not None, path
    return Row(path, step, when, sum(sizes), fault, best=step == best)
