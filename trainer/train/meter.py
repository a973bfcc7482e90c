"""Where a rank's time goes, and what is told of it: the log line per interval and the numbers of the final table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal

import torch

from trainer import log
from trainer.beat import Phase, Pulse
from trainer.group import Group
from trainer.metrics import Recorder
from trainer.progress import Live, duration
from trainer.train.plan import Plan
from trainer.train.split import Waiting

KINDS = ("data", "compute", "agree", "evaluate", "save")
#: What interrupts training, as the watchers call it, and as the metrics do.
_PAUSES: dict[str, tuple[Phase, Literal["eval", "checkpoint"]]] = {
    "evaluate": (Phase.EVALUATION, "eval"),
    "save": (Phase.SAVING, "checkpoint"),
}


class Meter:
    """Add up seconds, steps and losses of one rank."""

    def __init__(
        self, plan: Plan, group: Group, *, start: int, live: Live, pulse: Pulse, recorder: Recorder, waiting: Waiting
    ) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.first_step_unix_seconds: float | None = None
        self.steps = 0
        self.loss = float("nan")
        self._plan, self._group, self._live, self._pulse = plan, group, live, pulse
        self._recorder, self._waiting, self._told = recorder, waiting, dict(self.seconds)
        self._began = time.monotonic()
        self._loss_sum = torch.zeros((), device=group.device)
        self._last: torch.Tensor | None = None
        self._interval_step, self._interval_began = start, self._began
        self._paused = 0.0

    @contextlib.contextmanager
    def time(self, kind: str) -> Iterator[None]:
        """Count the time spent inside as `kind`, and tell what is about to begin where it may take longer than a step."""
        if kind in _PAUSES:
            beat, phase = _PAUSES[kind]
            self._pulse.beat(beat)
            self._recorder.phase(phase)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[kind] += time.monotonic() - began
            if kind in _PAUSES:
                self._recorder.phase("train")

    @property
    def total_seconds(self) -> float:
        """Return the seconds since the first step was about to begin."""
        return time.monotonic() - self._began

    @property
    def samples(self) -> int:
        """Return how many training samples all ranks have used since this start."""
        return self.steps * self._plan.global_batch

    def throughput(self) -> float:
        """Return training samples per second over all ranks, evaluation and saving left out."""
        busy = self.seconds["data"] + self.seconds["compute"]
        return self.samples / busy if busy else 0.0

    def step(self, loss: torch.Tensor, *, step: int, samples: int) -> None:
        """Take note of one step: its loss, which stays on the device, and how many samples were this rank's."""
        self.steps += 1
        self._pulse.step(step)
        self._loss_sum += loss
        self._last = loss
        if self.first_step_unix_seconds is None:
            self.first_step_unix_seconds = time.time()
        self._live.update(step=step, steps=self._plan.steps)
        self._record(step, samples=samples)

    def _record(self, step: int, *, samples: int) -> None:
        data, compute, agree = (self.seconds[kind] - self._told[kind] for kind in ("data", "compute", "agree"))
        self._told |= {kind: self.seconds[kind] for kind in ("data", "compute", "agree")}
        waited = compute * self._waiting.part(compute)
        self._recorder.step(step, samples=samples, data_wait=data, compute=compute - waited, comm_wait=waited + agree)

    def log(self, *, step: int, learning_rate: float) -> None:
        """Log the interval that ends here; the one sync with the device, and a mean over all ranks."""
        assert self._last is not None
        count = max(1, step - self._interval_step)
        interval = self._group.mean(torch.stack([self._loss_sum / count, self._last]))
        mean, self.loss = interval.tolist()
        pauses = self.seconds["evaluate"] + self.seconds["save"]
        seconds = max(1e-9, time.monotonic() - self._interval_began - (pauses - self._paused))
        rate = count * self._plan.global_batch / seconds
        left = (self._plan.steps - step) * seconds / count
        self._live.update(step=step, steps=self._plan.steps, loss=mean, rate=rate, left_seconds=left)
        if not self._live.shown:
            line = f"step {step}/{self._plan.steps} loss {mean:.4f} lr {learning_rate:.4g} {rate:.0f} samples/s left {duration(left)}"
            log.info(
                line, step=step, loss=mean, learning_rate=learning_rate, samples_per_second=rate, left_seconds=left
            )
        self._recorder.interval(loss=mean, learning_rate=learning_rate, remaining_seconds=left)
        self._tell_memory()
        self._loss_sum.zero_()
        self._interval_step, self._interval_began, self._paused = step, time.monotonic(), pauses

    def _tell_memory(self) -> None:
        device = self._group.device
        if device.type == "cuda":
            peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._recorder.memory(allocated=peaks[0], reserved=peaks[1])
