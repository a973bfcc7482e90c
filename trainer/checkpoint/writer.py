"""Save while training goes on: the training thread copies, a thread of its own writes, verifies and removes old ones.

That thread lives as long as the writer: in a process forked at the very moment at which a thread of its parent ends, CPython 3.11
waits for ever (for a lock that the thread held), and loader processes are forked all the time.

What a failed save means for the run, and what is logged, is decided by the caller. In a forked child (a loader's
process) the writing thread does not exist, and no lock of this module can be held there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.checkpoint.files import DISK, Bytes, Files, SaveFailed
from trainer.checkpoint.layout import MODEL, OPTIMIZER, best_step
from trainer.checkpoint.packing import Snapshot, Tensors
from trainer.checkpoint.saving import pack, prune, write
from trainer.codes import CheckpointError

#: How much the writing thread gives way to training where both want one CPU (see nice(1)).
_NICENESS = 10


@dataclass(frozen=True)
class Outcome:
    """How one save ended.

    Attributes:
        path: the checkpoint; it was read back, and its digests hold. None if the save failed.
        error: why it failed, with path and free space.
        warning: why old checkpoints could not be removed; "" if they could.
        seconds: from the end of the copying to the end of all the rest.
    """

    step: int
    seconds: float
    path: Path | None = None
    error: SaveFailed | None = None
    warning: str = ""


class Writer:
    """Write a run's checkpoints, one at a time, and keep the newest `keep` and the best of them.

    Args:
        told: called by the writing thread with how each save ended.

    Attributes:
        skipped: saves that came due while another was under way.
        failed, failed_in_a_row: saves that failed, and how many since the last good one.
        seconds: how long the last good save took.
    """

    def __init__(
        self, folder: Path, *, keep: int, files: Files = DISK, told: Callable[[Outcome], None] = lambda outcome: None
    ) -> None:
        self.skipped = self.failed = self.failed_in_a_row = 0
        self.seconds = 0.0
        self._folder, self._keep, self._files, self._told = folder, keep, files, told
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save", initializer=_give_way)
        self._running: Future[Outcome] | None = None
        self._ended: list[Outcome] = []

    @property
    def is_busy(self) -> bool:
        """Tell whether a save is under way."""
        return self._running is not None and not self._running.done()

    def reserve(self, *, model: Tensors, optimizer: Tensors) -> None:
        """Get the memory for saves of such a state in the background, so that the first one stalls no longer than later ones.

        Raises:
            SettingError: a tensor has a type that a checkpoint cannot hold.
        """
        self._snapshot.reserve({MODEL: model, OPTIMIZER: optimizer}, thread=self._thread)

    def submit(
        self, *, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any], wait: bool = False
    ) -> bool:
        """Copy the state of this moment and begin to write it; see `save` for what the arguments are.

        While another save is under way it is skipped and counted, and False is returned; with `wait` it waits for that
        one first, and is never skipped. `state["best"]["step"]`, if there is one, names the checkpoint that stays however
        old it is.
        """
        if self.is_busy and not wait:
            self.skipped += 1
            return False
        self._collect()
        parts = pack(self._snapshot, step=step, model=model, optimizer=optimizer, state=state)
        self._running = self._thread.submit(self._run, step=step, parts=parts, best=best_step(state))
        return True

    def save(self, *, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any]) -> Outcome:
        """Save now: wait for the save that is under way, then for this one.

        Raises:
            SaveFailed: this one failed.
        """
        self.submit(step=step, model=model, optimizer=optimizer, state=state, wait=True)
        self._collect()
        outcome = self._ended[-1]
        if outcome.error is not None:
            self._ended.pop()  # it is told here
            raise outcome.error
        return outcome

    def poll(self, *, wait: bool = False) -> list[Outcome]:
        """Return how the saves ended that have ended since the last call; with `wait`, also the one under way.

        An exception that is no failure of the file system but a mistake of ours is raised here, or by the next save.
        """
        if wait or not self.is_busy:
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Wait for the save that is under way, and give the memory back; `poll` still tells how it ended."""
        try:
            self._collect()
        finally:
            self._thread.shutdown()
            self._snapshot = Snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self) -> None:
        """Wait for the save that is under way, if there is one, and count how it ended."""
        if self._running is None:
            return
        running, self._running = self._running, None
        outcome = running.result()
        self._ended.append(outcome)
        if outcome.error is not None:
            self.failed += 1
            self.failed_in_a_row += 1
        else:
            self.failed_in_a_row, self.seconds = 0, outcome.seconds

    def _run(self, *, step: int, parts: Mapping[str, Bytes], best: int | None) -> Outcome:
        """Be the writing thread; it touches files and bytes alone, and lets go of the interpreter's lock for the long parts."""
        outcome = self._write(step=step, parts=parts, best=best)
        self._told(outcome)
        return outcome

    def _write(self, *, step: int, parts: Mapping[str, Bytes], best: int | None) -> Outcome:
        started, warning = time.monotonic(), ""
        try:
            path = write(self._folder, step=step, parts=parts, files=self._files)
        except SaveFailed as error:
            return Outcome(step, time.monotonic() - started, error=error)
        try:
            prune(self._folder, keep=self._keep, best=best, verified=path, files=self._files)
        except (SaveFailed, CheckpointError) as error:
            warning = str(error)
        return Outcome(step, time.monotonic() - started, path=path, warning=warning)


def _give_way() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
