"""Saving in the background: what is written is the state of the moment, one save at a time, and failures are told and counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer import checkpoint
from trainer.checkpoint import Files, Outcome, SaveFailed, Writer


class Slow(Files):
    """A disk whose first write waits until it is let go, or that is full."""

    def __init__(self) -> None:
        self.go, self.is_full = threading.Event(), False
        self.go.set()

    def write(self, path: Path, data: object) -> None:
        assert self.go.wait(60)
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().write(path, data)  # type: ignore[arg-type]


@pytest.fixture
def disk() -> Iterator[Slow]:
    disk = Slow()
    yield disk
    disk.go.set()


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), value)}


def submit(writer: Writer, step: int, model: dict[str, torch.Tensor], **more: object) -> bool:
    return writer.submit(step=step, model=model, optimizer={"m/weight": model["weight"] * 2}, state={}, **more)  # type: ignore[arg-type]


def test_state_of_the_moment_is_written_although_training_goes_on(disk: Slow, tmp_path: Path) -> None:
    model = state(1.0)
    with Writer(tmp_path, keep=3, files=disk) as writer:
        disk.go.clear()
        assert submit(writer, 1, model)
        model["weight"].fill_(-1.0)
        disk.go.set()
        (outcome,) = writer.poll(wait=True)
    assert outcome.error is None
    saved = checkpoint.parse(checkpoint.read(tmp_path / "step-00000001"))
    assert saved.model["weight"].unique().tolist() == [1.0]
    assert saved.optimizer["m/weight"].unique().tolist() == [2.0]


def test_save_that_comes_due_meanwhile_is_skipped_and_counted_and_the_last_waits(disk: Slow, tmp_path: Path) -> None:
    told: list[Outcome] = []
    with Writer(tmp_path, keep=9, files=disk, told=told.append) as writer:
        disk.go.clear()
        assert submit(writer, 1, state(1))
        assert not submit(writer, 2, state(2))
        assert writer.skipped == 1
        threading.Timer(0.2, disk.go.set).start()
        outcome = writer.save(step=3, model=state(3), optimizer={}, state={})
    assert outcome.path == tmp_path / "step-00000003"
    assert [one.step for one in told] == [1, 3]
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000003", "step-00000001"]


def test_failures_are_counted_in_a_row_and_a_good_save_ends_the_row(disk: Slow, tmp_path: Path) -> None:
    with Writer(tmp_path, keep=9, files=disk) as writer:
        disk.is_full = True
        for step in (1, 2):
            submit(writer, step, state(step), wait=True)
            (outcome,) = writer.poll(wait=True)
            assert "No space left on device" in str(outcome.error)
        assert (writer.failed, writer.failed_in_a_row) == (2, 2)
        with pytest.raises(SaveFailed, match=r"MB are free"):
            writer.save(step=3, model=state(3), optimizer={}, state={})
        disk.is_full = False
        writer.save(step=4, model=state(4), optimizer={}, state={})
        assert (writer.failed, writer.failed_in_a_row) == (3, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_newest_and_the_best_stay(tmp_path: Path) -> None:
    with Writer(tmp_path, keep=2) as writer:
        for step in range(1, 7):
            best = {"best": {"step": 2, "accuracy": 0.5, "loss": 1.0}}
            writer.save(step=step, model=state(step), optimizer={}, state=best)
    assert [checkpoint.step_of(path) for path in checkpoint.find(tmp_path)] == [6, 5, 2]
