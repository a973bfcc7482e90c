"""Batches do not hang on the number of loader processes, bad data ends in the batch, and no process outlives its loader."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from multiprocessing import active_children, current_process
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import data, log
from trainer.codes import DataError
from trainer.data import loader
from trainer.data.augment import shift_pictures
from trainer.data.user import ItemSource

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (1, 6, 5)


class Items:
    """A user's Dataset: picture i is full of i, and one pixel is random; `at` samples do `what`."""

    def __init__(self, count: int, *, what: str = "", at: int = -1) -> None:
        self.count, self.what, self.at = count, what, at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.at:
            self.misbehave()
        picture = torch.full(SHAPE, index % 256, dtype=torch.uint8)
        picture[0, 0, :3] = torch.tensor([random.randrange(256), np.random.randint(256), int(torch.randint(256, ()))])
        return picture, index % 3

    def misbehave(self) -> None:
        if self.what == "raise":
            raise OSError("the disk is gone\nsecond line")
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            time.sleep(3600)


def make_dataset(
    n: int = 23, *, tests: int = 7, own: bool = False, shift: int = 2, what: str = "", at: int = -1
) -> data.DataSet:
    def source(split: str, count: int) -> Any:
        if own:
            return ItemSource(Items(count, what=what, at=at), f"data set own, {split}", count, 3, SHAPE)
        images = np.random.default_rng(0).integers(1, 256, (count, *SHAPE), dtype=np.uint8)
        return data.ArraySource(images, np.arange(count) % 3)

    train, test = source("train", n), source("test", tests)
    return data.DataSet("own", train, test, 3, SHAPE, (0.5,), (0.25,), shift=shift, fingerprint="", in_memory=not own)


def train(dataset: data.DataSet, **changes: Any) -> AbstractContextManager[Iterator[data.Batch]]:
    plain = {"seed": 0, "global_batch": 8, "rank": 0, "world": 1, "start": 0, "steps": 6, "workers": 0, "pin": False}
    return data.train_batches(dataset, **plain | changes)


def read(dataset: data.DataSet, **changes: Any) -> list[data.Batch]:
    with train(dataset, **changes) as batches:
        return list(batches)


def evaluate(dataset: data.DataSet, **changes: Any) -> list[data.Batch]:
    plain = {"batch_size": 2, "rank": 0, "world": 1, "workers": 0, "pin": False}
    with data.test_batches(dataset, **plain | changes) as batches:
        return list(batches)


def assert_equal(batches: list[data.Batch], others: list[data.Batch]) -> None:
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert (batch.step, batch.error) == (other.step, other.error)
        for field in ("ids", "images", "labels"):
            one, two = getattr(batch, field), getattr(other, field)
            assert one.dtype == two.dtype
            assert torch.equal(one, two)


# --- what is in a batch


@pytest.mark.parametrize("own", [False, True], ids=["arrays", "items"])
@pytest.mark.parametrize("world", [1, 3])
def test_number_of_workers_changes_nothing(own: bool, world: int) -> None:
    dataset = make_dataset(own=own)
    for rank in range(world):
        here = read(dataset, rank=rank, world=world)
        assert [batch.step for batch in here] == list(range(6))
        for workers in (1, 2):
            assert_equal(read(dataset, rank=rank, world=world, workers=workers), here)
    assert_equal(evaluate(dataset, workers=2), evaluate(dataset))


@pytest.mark.parametrize("workers", [0, 2])
def test_start_goes_on_where_another_run_stopped(workers: int) -> None:
    dataset = make_dataset(own=True)
    assert_equal(read(dataset, start=4, workers=workers), read(dataset)[4:])
    assert read(dataset, start=6, workers=workers) == []


def test_batch_is_ordered_gathered_and_shifted() -> None:
    dataset = make_dataset()
    batch = read(dataset, rank=1, world=3, seed=5)[4]
    positions = np.array([33, 36, 39])
    ids = data.order(5, n=23, positions=positions)
    images, labels = dataset.train.fetch(ids)
    assert batch.ids.tolist() == ids.tolist()
    assert batch.labels.tolist() == labels.tolist()
    assert np.array_equal(batch.images.numpy(), shift_pictures(images, seed=5, positions=positions, shift=2))
    assert (batch.ids.dtype, batch.images.dtype, batch.labels.dtype) == (torch.int64, torch.uint8, torch.int64)


def test_ranks_together_make_the_batches_of_one_rank() -> None:
    """Also across epochs: 6 batches of 8 use 23 samples twice."""
    dataset, world = make_dataset(), 3
    whole, parts = read(dataset), [read(dataset, rank=rank, world=world) for rank in range(world)]
    for step, batch in enumerate(whole):
        for rank in range(world):
            assert torch.equal(parts[rank][step].ids, batch.ids[rank::world])
            assert torch.equal(parts[rank][step].images, batch.images[rank::world])
    ids = torch.cat([batch.ids for batch in whole])
    assert sorted(ids[:23].tolist()) == sorted(ids[23:46].tolist()) == list(range(23))
    assert ids[:23].tolist() != ids[23:46].tolist()


@pytest.mark.parametrize("n", [1, 2, 7, 9])
def test_every_batch_is_full_on_every_rank(n: int) -> None:
    """One sample, one less than ranks, one less and one more than the global batch."""
    for rank, size in ((0, 3), (1, 3), (2, 2)):
        assert [len(batch.labels) for batch in read(make_dataset(n), rank=rank, world=3)] == [size] * 6


def test_own_random_numbers_differ_between_visits_of_a_sample() -> None:
    pixels = {
        tuple(batch.images[0, 0, 0, :3].tolist())
        for batch in read(make_dataset(1, own=True, shift=0), global_batch=1, steps=8)
    }
    assert len(pixels) == 8
    assert_equal(evaluate(make_dataset(own=True)), evaluate(make_dataset(own=True)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_test_sample_is_used_once(world: int, workers: int) -> None:
    for tests, batch_size in ((7, 2), (7, 3), (1, 2), (6, 1)):
        dataset = make_dataset(tests=tests)
        parts = [
            evaluate(dataset, batch_size=batch_size, rank=rank, world=world, workers=workers) for rank in range(world)
        ]
        assert len({len(part) for part in parts}) == 1
        ids = sorted(torch.cat([batch.ids for part in parts for batch in part]).tolist())
        assert ids == list(range(tests))
        for rank, part in enumerate(parts):
            assert torch.cat([batch.ids for batch in part]).tolist() == list(range(rank, tests, world))
            assert all(batch.images.shape == (len(batch.ids), *SHAPE) for batch in part)
            assert all(len(batch.ids) <= batch_size for batch in part)


def test_testing_is_not_augmented() -> None:
    dataset = make_dataset()
    images = torch.cat([batch.images for batch in evaluate(dataset)])
    assert np.array_equal(images.numpy(), dataset.test.fetch(np.arange(7))[0])


def test_no_test_samples_are_no_batches() -> None:
    assert evaluate(make_dataset(tests=0), workers=2) == []


def test_global_random_numbers_stay_the_model_s() -> None:
    state = torch.random.get_rng_state()
    read(make_dataset())
    read(make_dataset(own=True), workers=2)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_auto_workers_follow_the_data_and_the_cpus() -> None:
    arrays, items = make_dataset(), make_dataset(own=True)
    assert data.auto_workers(arrays, requested=None, cpus=16, local_ranks=1) == 0
    assert data.auto_workers(arrays, requested=3, cpus=1, local_ranks=1) == 3
    for cpus, ranks, workers in ((1, 1, 1), (1, 4, 1), (7, 2, 3), (64, 1, 8)):
        assert data.auto_workers(items, requested=None, cpus=cpus, local_ranks=ranks) == workers
    assert data.auto_workers(items, requested=0, cpus=64, local_ranks=1) == 0


# --- bad data


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_sample_ends_in_its_batch_with_zeros(workers: int) -> None:
    dataset = make_dataset(own=True, what="raise", at=4)
    batches = read(dataset, workers=workers)
    bad = [batch for batch in batches if 4 in batch.ids]
    assert 2 <= len(bad) < 6
    for batch in batches:
        wanted = (
            "data set own, train: sample 4 cannot be read: OSError: the disk is gone; mend or"
            if 4 in batch.ids
            else None
        )
        assert (batch.error or "").startswith(wanted or "-") == (wanted is not None)
        assert batch.images.shape == (8, *SHAPE)
        assert bool(batch.images.any()) == (wanted is None)
    assert [batch.error is not None for batch in evaluate(dataset, workers=workers)] == [False, False, True, False]


def test_bad_shape_from_a_source_of_arrays_is_our_own_mistake() -> None:
    source = data.ArraySource(np.zeros((2, *SHAPE), np.uint8), np.zeros(2, np.int64))
    with pytest.raises(IndexError):
        source.fetch(np.array([2]))


def test_lost_worker_becomes_an_error_of_this_and_all_later_batches() -> None:
    batches = read(make_dataset(own=True, what="kill", at=4), workers=2)
    assert [batch.step for batch in batches] == list(range(6))
    first = next(step for step, batch in enumerate(batches) if batch.error)
    assert all(batch.error == batches[first].error for batch in batches[first:])
    assert "a loader process failed at step" in str(batches[first].error)
    assert "exited unexpectedly" in str(batches[first].error)
    assert "\n" not in str(batches[first].error)
    assert {batch.code for batch in batches[first:]} == {1}  # a new start may help
    assert all(batch.images.shape == (8, *SHAPE) for batch in batches)
    assert not active_children()


# --- processes and signals


def test_workers_end_with_the_context() -> None:
    with train(make_dataset(own=True), workers=2, steps=1000) as batches:
        next(batches)
        assert len(active_children()) == 2
    assert not active_children()
    after = next(batches)
    assert (after.step, after.error) == (1, "the loader is closed")


def test_workers_end_when_the_training_raises() -> None:
    def fail() -> None:
        with train(make_dataset(own=True), workers=2, steps=1000) as batches:
            next(batches)
            raise DataError("on all ranks")

    with pytest.raises(DataError, match="on all ranks"):
        fail()
    assert not active_children()


def test_stuck_worker_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "JOIN_SECONDS", 0.3)
    first = int(data.order(0, n=23, positions=np.array([8]))[0])  # of step 1
    with train(make_dataset(own=True, what="hang", at=first), workers=2, steps=100) as batches:
        assert next(batches).step == 0
        processes = active_children()
        time.sleep(0.2)
    assert [process.exitcode for process in processes if process.exitcode] == [-signal.SIGKILL]
    assert not active_children()


def test_a_batch_that_does_not_come_is_waited_for_until_there_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(loader, "LOOK_SECONDS", 0.1)
    asked: list[int] = []

    def stopped() -> int:
        asked.append(0)
        return signal.SIGTERM if len(asked) == 5 else 0

    first = int(data.order(0, n=23, positions=np.array([8]))[0])  # of step 1
    with train(make_dataset(own=True, what="hang", at=first), workers=1, steps=100, stopped=stopped) as batches:
        good, late, later = next(batches), next(batches), next(batches)
    assert (good.error, good.code) == (None, 0)
    assert (late.step, late.code, later.code) == (1, 143, 143)
    assert "did not come after the stop signal" in str(late.error)
    assert late.images.shape == (8, *SHAPE)
    assert len(asked) == 5


def test_a_process_that_never_starts_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(loader, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(loader, "START_SECONDS", 1.0)
    parent = os.getpid()

    class Fork:
        def hang_every_second(self) -> None:
            if os.getpid() != parent and current_process().name.endswith(("2", "4", "6", "8", "0")):
                time.sleep(3600)

    fork = Fork()  # forgotten with this name
    register_after_fork(fork, Fork.hang_every_second)
    with train(make_dataset(own=True), workers=2, steps=100) as batches:
        ends = [batch for batch, _ in zip(batches, range(3), strict=False) if batch.error]
    assert {(batch.error, batch.code) for batch in ends} == {
        ("a loader process has not started in 1 s; --workers 0 loads without them", 1)
    }
    assert not active_children()


def test_workers_outlive_stop_signals_to_the_whole_group() -> None:
    """The trainer alone decides when to end; a signal that also reached its workers would take the next batches away."""
    code = """
        received = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: received.append(int(number)))
        with test.train(test.make_dataset(own=True), workers=2, steps=200) as batches:
            os.killpg(0, signal.SIGTERM)
            next(batches)
            os.killpg(0, signal.SIGINT)
            errors = [batch.error for batch in batches]
        print(len(errors), set(errors), received)
    """
    assert run_script(code) == f"199 {{None}} [{signal.SIGTERM:d}, {signal.SIGINT:d}]\n"


def test_lost_worker_raises_nothing_in_the_middle_of_other_work() -> None:
    code = """
        with test.train(test.make_dataset(own=True, what="kill", at=4), workers=2) as batches:
            while len(active_children()) == 2:
                pass
            print(signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL)
    """
    assert run_script(code) == "True\n"


def test_workers_die_with_a_killed_trainer() -> None:
    code = """
        with test.train(test.make_dataset(own=True, what="hang", at=4), workers=2, steps=200) as batches:
            print(*[process.pid for process in active_children()], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    pids = [int(pid) for pid in run_script(code, returncode=-signal.SIGKILL).split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_script(code: str, *, returncode: int = 0) -> str:
    """Run code in a process and session of its own, with this module as `test`, and return what it printed."""
    lines = "\n".join(line.removeprefix("        ") for line in code.splitlines())
    head = (
        "import importlib.util, os, signal\nfrom multiprocessing import active_children\n"
        f"spec = importlib.util.spec_from_file_location('test_loader', {__file__!r})\n"
        "test = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(test)\n"
    )
    command = [sys.executable, "-W", "error", "-c", head + lines]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
                         capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert (run.returncode, run.stderr) == (returncode, "")
    return run.stdout


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- shared memory


def test_too_little_shared_memory_is_warned_of_and_gone_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    dataset = make_dataset(own=True)
    huge = dataclasses.replace(dataset, shape=(1, 10**6, 10**6))
    work = loader.TrainSteps(huge, seed=0, global_batch=8, rank=0, world=2)
    assert not loader._fits_shared_memory(work, 2)
    assert "MB free" in caplog.text
    assert "--shm-size" in caplog.text
    monkeypatch.setattr(loader, "SHARED_MEMORY", Path("/nonexistent"))
    assert_equal(read(dataset, workers=2), read(dataset))
