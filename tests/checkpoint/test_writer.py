"""Saving in the background: what is written, what is skipped, how failures are told, and what a fork does to it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.checkpoint import Files, Outcome, SaveFailed, Writer, find, parse, read
from trainer.checkpoint.packing import Snapshot
from trainer.codes import SettingError


class Gate(Files):
    """Let a write go on only once the gate is open."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        self.reached.set()
        assert self.open.wait(60)
        super().write(path, data)


class Failing(Files):
    """Raise `error`, while there is one, at the effect of its name."""

    def __init__(self, error: Exception | None, *, effect: str = "write") -> None:
        self.error, self.effect = error, effect

    def write(self, path: Path, data: bytes | memoryview) -> None:
        if self.error and self.effect == "write":
            raise self.error
        super().write(path, data)

    def rmtree(self, path: Path) -> None:
        if self.error and self.effect == "rmtree":
            raise self.error
        super().rmtree(path)


FULL = OSError(28, "No space left on device")


def _state(value: float, best: int | None = None) -> dict[str, Any]:
    told = None if best is None else {"step": best, "accuracy": 0.5, "loss": 1.0}
    return {
        "model": {"weight": torch.full((3, 2), value), "count": torch.tensor(int(value))},
        "optimizer": {"momentum_buffer/weight": torch.full((3, 2), -value)},
        "state": {"best": told},
    }


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def test_state_of_the_moment_is_written_while_training_goes_on(tmp_path: Path, gate: Gate) -> None:
    told: list[Outcome] = []
    with Writer(tmp_path, keep=3, files=gate, told=told.append) as writer:
        moving = _state(7.0)
        assert writer.submit(step=7, **moving)
        assert gate.reached.wait(60)
        for tensors in (moving["model"], moving["optimizer"]):
            for tensor in tensors.values():
                tensor.add_(1)
        moving["state"]["best"] = {"step": 99}
        assert writer.is_busy
        assert writer.poll() == []
        gate.open.set()
        (outcome,) = writer.poll(wait=True)
    assert (outcome.step, outcome.path, outcome.error, outcome.warning) == (7, tmp_path / "step-00000007", None, "")
    assert outcome.seconds == writer.seconds > 0
    assert told == [outcome]
    loaded = parse(read(tmp_path / "step-00000007"))
    assert torch.equal(loaded.model["weight"], torch.full((3, 2), 7.0))
    assert torch.equal(loaded.optimizer["momentum_buffer/weight"], torch.full((3, 2), -7.0))
    assert (loaded.model["count"].item(), loaded.state) == (7, {"best": None})


def test_save_that_comes_due_during_another_is_skipped_and_counted(tmp_path: Path, gate: Gate) -> None:
    with Writer(tmp_path, keep=3, files=gate) as writer:
        assert writer.submit(step=1, **_state(1.0))
        assert not writer.submit(step=2, **_state(2.0))
        assert not writer.submit(step=3, **_state(3.0))
        gate.open.set()
        writer.poll(wait=True)
        assert writer.submit(step=4, **_state(4.0))
    assert (writer.skipped, writer.failed) == (2, 0)
    assert [outcome.step for outcome in writer.poll()] == [4]
    assert _names(tmp_path) == ["step-00000001", "step-00000004"]


def test_best_and_last_save_wait_instead_of_being_skipped(tmp_path: Path, gate: Gate) -> None:
    with Writer(tmp_path, keep=3, files=gate) as writer:
        assert writer.submit(step=1, **_state(1.0))
        timer = threading.Timer(0.05, gate.open.set)
        timer.start()
        assert writer.submit(step=2, wait=True, **_state(2.0))
        outcome = writer.save(step=3, **_state(3.0))
        timer.join()
    assert outcome.path == tmp_path / "step-00000003"
    assert [told.step for told in writer.poll()] == [1, 2, 3]
    assert writer.skipped == 0
    assert [parse(read(path)).model["count"].item() for path in find(tmp_path)] == [3, 2, 1]


def test_newest_and_the_best_stay(tmp_path: Path) -> None:
    with Writer(tmp_path, keep=2) as writer:
        for step in range(1, 7):
            writer.save(step=step, **_state(step, best=2 if step > 1 else None))
    assert _names(tmp_path) == [f"step-0000000{step}" for step in (2, 5, 6)]


def test_failures_are_told_and_counted_and_a_good_save_ends_the_row(tmp_path: Path) -> None:
    files = Failing(FULL)
    with Writer(tmp_path, keep=3, files=files) as writer:
        for step in (1, 2):
            assert writer.submit(step=step, wait=True, **_state(step))
        first, second = writer.poll(wait=True)
        assert (writer.failed, writer.failed_in_a_row, writer.seconds) == (2, 2, 0.0)
        for outcome in (first, second):
            assert isinstance(outcome.error, SaveFailed)
            assert outcome.path is None
            where = f"step-0000000{outcome.step}: No space left on device; "
            assert where in str(outcome.error)
            assert " MB are free there" in str(outcome.error)
        with pytest.raises(SaveFailed, match="step-00000003: No space"):
            writer.save(step=3, **_state(3.0))
        assert writer.poll() == []
        files.error = None
        assert writer.save(step=4, **_state(4.0)).error is None
        assert (writer.failed, writer.failed_in_a_row) == (3, 0)
    assert _names(tmp_path) == ["step-00000004"]


def test_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    with Writer(tmp_path, keep=1, files=Failing(OSError(30, "Read-only file system"), effect="rmtree")) as writer:
        writer.save(step=1, **_state(1.0))
        outcome = writer.save(step=2, **_state(2.0))
    assert outcome.error is None
    assert outcome.warning == f"cannot remove old checkpoints in {tmp_path}: Read-only file system"
    assert (writer.failed, find(tmp_path)) == (0, [tmp_path / "step-00000002"])


def test_mistake_in_the_thread_is_raised_where_training_sees_it(tmp_path: Path) -> None:
    mistake = ZeroDivisionError("a mistake")
    files = Failing(mistake)
    writer = Writer(tmp_path, keep=3, files=files)
    writer.submit(step=1, **_state(1.0))
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        writer.poll(wait=True)
    assert writer.poll() == []
    files.error = None
    writer.save(step=2, **_state(2.0))
    assert _names(tmp_path) == ["step-00000002"]
    files.error = mistake
    writer.submit(step=3, **_state(3.0))
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        writer.close()


def test_no_thread_ends_between_two_saves(tmp_path: Path) -> None:
    """A loader process that is forked while one does would wait for ever: see the writer's own words."""
    with Writer(tmp_path, keep=1) as writer:
        writer.reserve(model=_state(0.0)["model"], optimizer={})
        writer.save(step=1, **_state(1.0))
        before = threading.enumerate()
        writer.save(step=2, **_state(2.0))
        assert threading.enumerate() == before
        assert sum(thread.name.startswith("save") for thread in before) == 1
    assert not any(thread.name.startswith("save") for thread in threading.enumerate())


def test_save_that_is_under_way_is_not_lost_when_training_ends_in_an_error(tmp_path: Path, gate: Gate) -> None:
    def train() -> None:
        with Writer(tmp_path, keep=3, files=gate) as writer:
            writer.submit(step=1, **_state(1.0))
            threading.Timer(0.05, gate.open.set).start()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train()
    assert _names(tmp_path) == ["step-00000001"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_while_a_save_is_under_way_harms_neither_side(tmp_path: Path, gate: Gate) -> None:
    def child() -> None:  # as much as a loader's process could ever want
        with Writer(tmp_path / "child", keep=1) as own:
            own.save(step=1, **_state(5.0))

    with Writer(tmp_path / "parent", keep=3, files=gate) as writer:
        writer.submit(step=1, **_state(1.0))
        assert gate.reached.wait(60)
        processes = [multiprocessing.get_context("fork").Process(target=child) for _ in range(2)]
        processes[0].start()
        processes[0].join(60)
        gate.open.set()
        processes[1].start()  # at some moment of the writing
        processes[1].join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    for side, value in (("parent", 1), ("child", 5)):
        assert parse(read(tmp_path / side / "step-00000001")).model["count"].item() == value


# The memory that is kept.


def _address(data: memoryview) -> int:
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def test_memory_is_used_again_until_the_tensors_are_others() -> None:
    snapshot, tensors = Snapshot(), {"a": torch.zeros(100, 3)}
    first = snapshot.take({"file": tensors})["file"]
    second = snapshot.take({"file": {"a": torch.ones(100, 3)}})["file"]
    assert _address(first) == _address(second)
    assert bytes(first) == bytes(second)
    assert bytes(second[-4:]) == torch.ones(1).numpy().tobytes()
    others: list[dict[str, Tensor]] = [
        {"b": torch.zeros(100, 3)},
        {"a": torch.zeros(3, 100)},
        {"a": torch.zeros(100, 3, dtype=torch.int32)},
        {},
    ]
    for other in others:
        assert b"data_offsets" in bytes(snapshot.take({"file": other})["file"]) or not other
        again = snapshot.take({"file": tensors})["file"]
        assert bytes(again) == bytes(Snapshot().take({"file": tensors})["file"])


def test_reserved_memory_is_the_memory_that_is_used(tmp_path: Path) -> None:
    with Writer(tmp_path, keep=3) as writer:
        writer.reserve(model=_state(0.0)["model"], optimizer={})  # another optimizer than the one that comes
        writer.save(step=1, **_state(3.0))
    assert parse(read(tmp_path / "step-00000001")).model["count"].item() == 3
    snapshot, tensors = Snapshot(), {"a": torch.arange(5.0)}
    with ThreadPoolExecutor(1) as thread:
        snapshot.reserve({"file": tensors}, thread=thread)
    assert bytes(snapshot.take({"file": tensors})["file"]) == bytes(Snapshot().take({"file": tensors})["file"])


def test_type_that_cannot_be_saved_is_told_when_memory_is_reserved(tmp_path: Path) -> None:
    with Writer(tmp_path, keep=3) as writer, pytest.raises(SettingError, match="'z' is torch.complex128"):
        writer.reserve(model={"z": torch.zeros(1, dtype=torch.complex128)}, optimizer={})
