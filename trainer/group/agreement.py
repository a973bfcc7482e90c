"""The agreement that rides beside every step: stop, not finite, no batch, and samples skipped so far.

It goes over gloo, also beside NCCL, is asked in one step and read in the next, so the training path waits for nobody (asking
costs about 5 us). Deciding what to do with an answer is the loop's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trainer import log
from trainer.codes import STOP_CODES, Diverged, end_for
from trainer.group.live import Group


@dataclass(frozen=True)
class Verdict:
    """Say what the ranks have agreed on so far.

    Attributes:
        step: the last step that was answered, counted from 1; the first bad one once there is one.
        stop: the highest stop signal that any rank received, or 0.
        diverged: whether any rank's loss was not finite.
        failed: the code with which all ranks end because one has no batch, or 0; the highest.
        skipped: how many samples all ranks have skipped so far.
    """

    step: int = 0
    stop: int = 0
    diverged: bool = False
    failed: int = 0
    skipped: int = 0

    def raise_if_bad(self, own_error: str | None = None, *, rank: int = 0) -> None:
        """Raise what ends all ranks; `own_error` is why this rank has no batch, if it has none.

        Raises:
            DataError: a rank could not read its data.
            TrainerError: a rank's loader process ended.
            Stopped: a rank's data did not come, and it was asked to stop.
            Diverged: the loss is not finite.
        """
        if self.failed:
            if own_error and (rank != 0 or self.failed in STOP_CODES):
                log.error(own_error)  # of a shared error rank 0 speaks alone, and it does not know this
            line = own_error or f"a rank could not read its data at step {self.step}; its own line says which"
            raise end_for(self.failed, line)
        if self.diverged:
            line = f"the loss is not finite at step {self.step}; lower --lr, lengthen --warmup, or set --clip-norm"
            raise Diverged(line, shared=True)


@dataclass
class _Question:
    step: int
    vector: torch.Tensor
    work: dist.Work | None = None


@dataclass
class Agreement:
    """Ask all ranks once per step, and read the answers one step later or, before a save, at once.

    `counting`: whether the ranks tell how many samples they skipped: a place for each in the vector, of which the maximum
    is taken, so that the sum is that of the same step on every rank.
    """

    group: Group
    counting: bool = False
    _asked: list[_Question] = field(default_factory=list)
    _verdict: Verdict = field(default_factory=Verdict)
    _on_device: list[tuple[torch.Tensor, torch.cuda.Event]] = field(default_factory=list)

    def ask(self, *, step: int, stop: int, finite: torch.Tensor, failed: int = 0, skipped: int = 0) -> None:
        """Start the agreement of one step; every rank takes part, none waits.

        `failed` is the exit code of what kept this rank's batch away, or 0.

        `finite` is a boolean tensor on the device. From a GPU it is copied without waiting and rides in the first
        question that is asked after it has arrived.
        """
        diverged = not bool(finite) if finite.device.type == "cpu" else self._arrived(finite)
        vector = self._vector(stop, int(diverged), failed, skipped=skipped)
        self._asked.append(_Question(step, vector, self._reduce(vector)))

    def _vector(self, *flags: int, skipped: int = 0) -> torch.Tensor:
        counts = [0] * (self.group.world if self.counting else 0)
        if counts:
            counts[self.group.rank] = skipped
        return torch.tensor([*flags, *counts], dtype=torch.int32)

    def _reduce(self, vector: torch.Tensor) -> dist.Work | None:
        if not self.group.distributed:
            return None
        with self.group.waiting():
            return dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=self.group.control, async_op=True)

    def _arrived(self, finite: torch.Tensor) -> bool:
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(finite, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._on_device.append((host, event))
        return self._collect(wait=False)

    def _collect(self, *, wait: bool) -> bool:
        diverged = False
        while self._on_device and (wait or self._on_device[0][1].query()):
            host, event = self._on_device.pop(0)
            event.synchronize()
            diverged = diverged or not bool(host)
        return diverged

    def previous(self) -> Verdict:
        """Return all that is known up to the last question but one: it has had a whole step to arrive. Raises PeerLost."""
        while len(self._asked) > 1:
            self._take(self._asked.pop(0))
        return self._verdict

    def settled(self) -> Verdict:
        """Return all up to the last question, waiting for it; on a GPU also for the device. Raises PeerLost."""
        while self._asked:
            last = self._asked.pop(0)
            self._take(last)
            if not self._asked and self.group.device.type == "cuda":
                # The last losses may have been on their way when the ranks were asked: one more round, on all ranks alike.
                vector = self._vector(0, int(self._collect(wait=True)), 0)
                self._take(_Question(last.step, vector, self._reduce(vector)))
        return self._verdict

    def _take(self, question: _Question) -> None:
        if question.work is not None:
            with self.group.waiting():
                question.work.wait()
        stop, diverged, failed, *counts = question.vector.tolist()
        known = self._verdict
        bad = known.diverged or known.failed
        self._verdict = Verdict(
            step=known.step if bad else question.step,
            stop=max(known.stop, stop),
            diverged=known.diverged or bool(diverged),
            failed=max(known.failed, failed),
            skipped=max(known.skipped, sum(counts)),
        )
