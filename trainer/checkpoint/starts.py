"""Count the starts of a run that made no progress, so that no controller restarts it for ever.

The count is a small file in the run's folder. Which starts are taken off it again is decided by the caller.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer import log
from trainer.checkpoint.files import replace_json
from trainer.codes import NoProgress

STARTS = "starts.json"


def count_start(folder: Path, *, step: int, most: int) -> int:
    """Count one more start, from checkpoint step `step` (0: none), and return how many there were since that moved on.

    Where the count cannot be kept, that is a warning, and the run goes on.

    Raises:
        NoProgress: `most` starts have ended without a newer checkpoint; this one is not counted.
    """
    path = folder / STARTS
    before = _read(path)
    starts = before["starts"] if step <= before["step"] else 0
    if starts >= most:
        raise NoProgress(
            f"{starts} starts of {folder} have ended at step {step} without a new checkpoint, and --max-starts is {most}; "
            f"see why in their logs, then remove {path} or raise --max-starts"
        )
    _write(path, {"step": step, "starts": starts + 1})
    return int(starts + 1)


def take_back(folder: Path) -> None:
    """Take this start off the count: it was stopped by a signal, which is not its fault."""
    path = folder / STARTS
    before = _read(path)
    if before["starts"]:
        _write(path, before | {"starts": before["starts"] - 1})


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        return {"step": int(found["step"]), "starts": int(found["starts"])}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning(f"{path} cannot be read ({error}): starts without progress are counted anew")
    return {"step": 0, "starts": 0}


def _write(path: Path, value: dict[str, Any]) -> None:
    try:
        replace_json(path, value)
    except OSError as error:
        log.warning(f"{path} cannot be written ({error.strerror}): starts without progress are not counted")
