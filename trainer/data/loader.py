"""Hand out one rank's batches in step order, made in the training process itself or in loader processes.

A loader process makes whole steps, so the number of processes changes neither order nor content. Bad data never raises here: the
batch says so, and the rank stays with its peers until all of them end together. What is in a batch lives in `steps.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer import codes, log
from trainer.data.sets import DataSet
from trainer.data.steps import Arrays, Batch, EvalSteps, Steps, TrainSteps
from trainer.parent import die_with

MOST_WORKERS = 8
PREFETCH = 2  # batches that each worker has ready
LOOK_SECONDS = 1.0  # between two looks, while a batch does not come: do the processes live, is it time to stop
JOIN_SECONDS = 2.0
START_SECONDS = 10.0  # a loader process starts in milliseconds, or, see _QUIET_SECONDS, never
_QUIET_SECONDS = 0.01
SHARED_MEMORY = Path("/dev/shm")
RANKS_PER_NODE = 8  # so many ranks are taken to share it, at most
SHIELDED = (signal.SIGTERM, signal.SIGINT)


def auto_workers(dataset: DataSet, *, requested: int | None, cpus: int, local_ranks: int) -> int:
    """Return how many loader processes each rank has: as asked, else 0 for data in memory and up to 8 of the CPUs' share."""
    if requested is not None:
        return requested
    return 0 if dataset.in_memory else max(1, min(MOST_WORKERS, cpus // local_ranks))


@contextlib.contextmanager
def train_batches(
    dataset: DataSet,
    *,
    seed: int,
    global_batch: int,
    rank: int,
    world: int,
    start: int,
    steps: int,
    workers: int,
    pin: bool,
    skip_bad: bool = False,
    stopped: Callable[[], int] = lambda: 0,
) -> Iterator[Iterator[Batch]]:
    """Give this rank's batches of the steps `start` to `steps` - 1, in order.

    Args:
        workers: loader processes; 0 loads in this process. They end with the context.
        pin: put batches into page-locked memory.
        skip_bad: replace a sample that cannot be read by the next good one, and say so in the batch.
        stopped: asked while a loader process lets this one wait; a signal's number ends the wait, and the batch says so.
    """
    work = TrainSteps(dataset, seed=seed, global_batch=global_batch, rank=rank, world=world, skip_bad=skip_bad)
    with _batches(work, range(start, steps), workers=workers, pin=pin, stopped=stopped) as batches:
        yield batches


@contextlib.contextmanager
def test_batches(
    dataset: DataSet,
    *,
    batch_size: int,
    rank: int,
    world: int,
    workers: int,
    pin: bool,
    skip_bad: bool = False,  # noqa: PT028 - no test
    stopped: Callable[[], int] = lambda: 0,  # noqa: PT028
) -> Iterator[Iterator[Batch]]:
    """Give this rank's test samples, rank::world, in order; every rank gets the same number of batches.

    The last ones may have fewer than `batch_size` samples, or none. Nothing is augmented. With `skip_bad` a sample that
    cannot be read is left out.
    """
    work = EvalSteps(dataset, batch_size=batch_size, rank=rank, world=world, skip_bad=skip_bad)
    with _batches(work, range(len(work)), workers=workers, pin=pin, stopped=stopped) as batches:
        yield batches


@contextlib.contextmanager
def _batches(
    work: Steps, steps: range, *, workers: int, pin: bool, stopped: Callable[[], int]
) -> Iterator[Iterator[Batch]]:
    if not workers or not steps:
        made = (work.arrays(step).tensors() for step in steps)
        yield map(_tell_faults, (batch.pin_memory() for batch in made) if pin else made)
        return
    loader = _Loader(work, steps, workers=workers, pin=pin, stopped=stopped)
    try:
        yield map(_tell_faults, loader)
    finally:
        loader.close()


class _Loader(Iterator[Batch]):
    """Iterate over the batches that loader processes make, and outlive the processes."""

    def __init__(self, work: Steps, steps: range, *, workers: int, pin: bool, stopped: Callable[[], int]) -> None:
        self._work, self._steps, self._pin, self._stopped = work, iter(steps), pin, stopped
        self._end: tuple[str, int] | None = None
        work.piped = not _fits_shared_memory(work, workers)
        others = active_children()
        self._started = mmap.mmap(-1, max(1, workers))  # shared with the processes: each sets its byte
        self._forked_at = time.monotonic()
        # CPython before 3.11.8 and 3.12.1 waits for ever in a process forked while another thread makes or drops its state, as gloo's
        # do when they let go of a collective that has just ended: they have done so by then.
        time.sleep(_QUIET_SECONDS)
        with _shielded():
            loader = DataLoader(
                work,
                batch_size=None,
                sampler=steps,
                num_workers=min(workers, len(steps)),
                prefetch_factor=PREFETCH,
                collate_fn=_unchanged,
                pin_memory=pin,
                timeout=LOOK_SECONDS,
                multiprocessing_context="fork",  # a data set of the user's need not be picklable, and arrays are shared
                worker_init_fn=functools.partial(_start_worker, parent=os.getpid(), started=self._started),
                generator=torch.Generator(),  # else it draws from the global one, whose state belongs to the model
            )
            self._iterator: Iterator[Batch | Arrays] | None = iter(loader)
        self._processes = [process for process in active_children() if process not in others]

    def __next__(self) -> Batch:
        step = next(self._steps)
        while self._end is None:
            assert self._iterator is not None
            try:
                return self._as_batch(next(self._iterator))
            except Exception as error:  # noqa: BLE001  whatever ended a loader process
                self._end = self._why_no_batch(error, step=step)
        line, code = self._end
        return self._as_batch(self._work.failed(step, line, code=code))

    def _why_no_batch(self, error: Exception, *, step: int) -> tuple[str, int] | None:
        """Return a line and an exit code, or None where the batch is only late: then waiting goes on."""
        if not str(error).startswith("DataLoader timed out"):  # torch's own words; a process's error begins otherwise
            line = f"a loader process failed at step {step + 1}: {_line(error)}; --workers 0 loads without them"
            return line, codes.UNEXPECTED
        if b"\0" in self._started[: len(self._processes)] and time.monotonic() > self._forked_at + START_SECONDS:
            line = f"a loader process has not started in {START_SECONDS:.0f} s; --workers 0 loads without them"
            return line, codes.UNEXPECTED
        if signum := self._stopped():
            return (
                f"the data of step {step + 1} did not come after the stop signal: this step is not saved",
                128 + signum,
            )
        return None

    def _as_batch(self, item: Batch | Arrays) -> Batch:
        if isinstance(item, Batch):
            return item
        batch = item.tensors()
        return batch.pin_memory() if self._pin else batch

    def close(self) -> None:
        """End the loader processes: ask, wait for 2 s, kill.

        A process that is stuck in the reading of a sample ignores SIGTERM, and the interpreter's exit would wait for it.
        """
        killer = threading.Timer(JOIN_SECONDS, _kill, [self._processes])
        killer.start()
        self._end = self._end or ("the loader is closed", codes.UNEXPECTED)
        self._iterator = None  # with its last reference torch asks the processes to end and joins them
        for process in self._processes:
            process.join()
        killer.cancel()
        killer.join()  # no thread ends while the next loader is forked: see checkpoint/writer.py


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _unchanged(item: Any) -> Any:
    return item


def _line(error: Exception) -> str:
    """Return an error's last line: torch puts the worker's traceback before it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Start processes that no stop signal reaches before they can ignore it, and keep torch's SIGCHLD handler out.

    That handler raises in whatever the main thread does when a loader process dies, a collective for instance. Without it the
    loss is found where the batch is waited for, after at most 5 s.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more than CPUs: as asked
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker(worker: int, *, parent: int, started: mmap.mmap) -> None:
    """Let a loader process ignore stop signals, which are for the trainer, and die with the trainer (Linux)."""
    started[worker] = 1
    signal.set_wakeup_fd(-1)  # it is the trainer's
    for number in SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED)
    die_with(parent)


def _fits_shared_memory(work: Steps, workers: int) -> bool:
    """Tell whether the batches under way fit into shared memory; a loader process that finds it full hangs or dies."""
    ranks = min(work.world, RANKS_PER_NODE)
    wanted = ranks * workers * PREFETCH * (work.size * (math.prod(work.shape) + 16) + 4096)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free < wanted:
        _warn_once(
            f"{SHARED_MEMORY} has {free / 2**20:.0f} MB free, and the batches of {ranks * workers} loader processes want "
            f"{wanted / 2**20:.0f} MB; they go through pipes, which is slower. Give it more (docker --shm-size, a memory volume), "
            "or fewer --workers"
        )
    return free >= wanted


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)  # each evaluation opens a loader of its own


MOST_TOLD = 20


def _tell_faults(batch: Batch) -> Batch:
    """Name each sample that could not be read once, and not more than 20 of them."""
    told = _warn_once.cache_info().currsize
    for line in batch.faults[: max(0, MOST_TOLD - told)]:
        _warn_once(f"{line}; passed over")
    if batch.faults and told >= MOST_TOLD:
        _warn_once("more samples cannot be read; they are counted, but not named")
    return batch
