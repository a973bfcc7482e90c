"""What a person is told of a run's checkpoints."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from trainer.checkpoint import Row, listing, save
from trainer.codes import CheckpointError


def _save(run: Path, step: int, best: int | None) -> Path:
    told = None if best is None else {"step": best, "accuracy": 0.5, "loss": 1.0}
    model = {"weight": torch.zeros(step)}
    path = save(run / "checkpoints", step=step, model=model, optimizer={}, state={"best": told})
    os.utime(path / "manifest.json", (1e9 + step, 1e9 + step))
    return path


def test_rows_tell_step_time_size_fault_and_best_newest_first(tmp_path: Path) -> None:
    for step, best in ((100, None), (9, 9), (500, 100), (1000, 1000)):
        _save(tmp_path, step, best)
    broken = tmp_path / "checkpoints" / "step-00001000"
    (broken / "model.safetensors").unlink()
    rows = listing(tmp_path)
    assert rows == listing(tmp_path / "checkpoints")
    assert [(row.step, row.is_valid, row.best) for row in rows] == [
        (1000, False, False),
        (500, True, False),
        (100, True, True),  # as the newest valid one says
        (9, True, False),
    ]
    assert (
        rows[0].fault
        == f"{broken / 'model.safetensors'} is missing; use another checkpoint, or restore this one from a copy"
    )
    assert rows[1].when == datetime(2001, 9, 9, 1, 55, 0, tzinfo=UTC)
    for row in rows:
        assert row.size == sum(file.stat().st_size for file in row.path.iterdir())
    assert rows[1].size - rows[2].size >= 4 * 400
    assert isinstance(rows[0], Row)


def test_checkpoints_without_a_manifest_or_a_readable_state_are_listed_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    save(tmp_path / "checkpoints", step=3, model={}, optimizer={}, state={"best": [1]})
    assert [(row.step, row.size > 0, row.best) for row in listing(tmp_path)] == [(7, False, False), (3, True, False)]


def test_run_without_checkpoints_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=f"{path} holds no checkpoints; name a run's folder"):
            listing(path)
