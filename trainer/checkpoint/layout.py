"""The names in a run's folder of checkpoints, and which of them are checkpoints. No file is read here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.codes import CheckpointError

VERSION = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
PARTS = (MODEL, OPTIMIZER, STATE)
FOLDER = "checkpoints"

#: The end of a checkpoint's name that was being replaced by one of the same step: good if its successor never came.
ASIDE = ".old"
_NAME = re.compile(r"step-([0-9]{1,18})(\.old)?")


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step that a folder's name says; None if it is no checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def find(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first by step number; other names are passed over. Reads no file.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    try:
        paths = [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}; check its rights") from error
    numbered = [(step, path.suffix != ASIDE, path) for path in paths if (step := step_of(path)) is not None]
    return [path for *_, path in sorted(numbered, reverse=True)]


def best_step(state: Mapping[str, Any]) -> int | None:
    """Return the step of the best evaluation that a checkpoint's state tells of, under "best"; None if there was none."""
    best = state.get("best")
    return int(best["step"]) if isinstance(best, dict) else None
