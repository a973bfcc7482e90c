"""What a rank tells of itself, event by event; which series an event changes is settled here.

Every rank reports every event, and its recorder writes what is that rank's to tell. Numbers are plain ones: nothing here waits for a
device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from trainer.metrics.files import Files
from trainer.metrics.reporter import Reporter, event
from trainer.metrics.table import Bottleneck, DataFault, Rejection, Role, Stage
from trainer.metrics.times import Times

_NAN = float("nan")
#: What has no value before the first log interval, evaluation or save; the series are there from the first step on.
_UNKNOWN_AT_FIRST = (
    "trainer_loss",
    "trainer_learning_rate",
    "trainer_estimated_remaining_seconds",
    "trainer_eval_loss",
    "trainer_eval_accuracy_ratio",
    "trainer_best_eval_accuracy_ratio",
    "trainer_checkpoint_size_bytes",
    "trainer_checkpoint_interval_seconds",
)


class Recorder(Reporter):
    """Write a rank's series; make one with `open` or `off`."""

    def __init__(
        self,
        files: Files | None,
        *,
        roles: tuple[Role, ...] = (),
        rank: int = 0,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(files, roles=roles, rank=rank)
        self._clock, now = clock, clock()
        self._times = Times(self._panel, since=now if since is None else since, now=now)
        self._steps, self._began, self._checkpoint_every = 0, now, 0
        self._done, self._of_steps, self._epochs_per_step = 0, 1, 0.0
        self._steps_total = self._panel.cell("trainer_steps_total")
        self._samples_total = self._panel.cell("trainer_samples_total")
        self._durations = self._panel.distribution("trainer_step_duration_seconds")
        self._stepped_at = self._panel.cell("trainer_last_step_timestamp_seconds")
        self._step, self._epoch = self._panel.cell("trainer_step"), self._panel.cell("trainer_epoch")

    @classmethod
    def open(cls, folder: Path, *, rank: int, local_rank: int, since: float | None = None) -> Self:
        """Open a rank's files in the node's folder, as its last start left them; before torch is imported, which is a stage.

        Args:
            since: when this start of the rank began, by the monotonic clock; None: now.
        """
        first: tuple[Role, ...] = ("first",) if local_rank == 0 else ()
        leader: tuple[Role, ...] = ("leader",) if rank == 0 else ()
        roles = ("rank", *first, *leader)
        return cls._try(folder, name=f"rank{rank}", make=lambda files: cls(files, roles=roles, rank=rank, since=since))

    @event
    def build(self, *, version: str, torch: str, cuda: str, nccl: str, python: str) -> None:
        """Tell the versions; "" for what is not there."""
        facts = {"version": version, "torch": torch, "cuda": cuda, "nccl": nccl, "python": python}
        self._panel.state("trainer_build_info", facts)

    @event
    def run(self, *, run: str, model: str, dataset: str, strategy: str, backend: str, precision: str) -> None:
        """Tell what is trained, and how."""
        how = {"strategy": strategy, "backend": backend, "precision": precision}
        self._panel.state("trainer_run_info", {"run": run, "model": model, "dataset": dataset, **how})

    @event
    def device(self, *, device: str, uuid: str, model: str) -> None:
        """Tell what this rank computes on, as in cuda:0, its UUID, and what it is called; "" for what a CPU has not."""
        self._panel.state("trainer_device_info", {"device": device, "uuid": uuid, "model": model})

    @event
    def world(self, *, size: int, expected: int, global_batch_size: int) -> None:
        """Tell how many ranks have met, and how many samples they take in a step."""
        self._set(trainer_world_size=size, trainer_expected_world_size=expected)
        self._set(trainer_global_batch_size=global_batch_size)

    @event
    def stage(self, stage: Stage) -> None:
        """Tell that a stage of the start ends here; it began where the last one ended. One that comes in parts adds up."""
        self._times.stage(stage, now=self._clock())

    @event
    def restored(self, step: int | None, *, saved_at: float = 0.0, rejected: Iterable[Rejection] = ()) -> None:
        """Tell that the stage "restore" ends here: this start goes on from the checkpoint of `step`, or from none (None).

        Args:
            saved_at: when that checkpoint was saved, in seconds since 1970.
            rejected: what was wrong with those that were passed over.
        """
        self._times.stage("restore", now=self._clock())
        self._panel.cell("trainer_restores_total", "none" if step is None else "ok").add(1.0)
        for reason in rejected:
            self._panel.cell("trainer_checkpoint_rejected_total", reason).add(1.0)
        self._set(trainer_checkpoint_last_success_step=step or 0)
        self._set(trainer_checkpoint_last_success_timestamp_seconds=time.time() if step is None else saved_at)

    @event
    def begin(
        self, step: int, *, target_steps: int, epochs_per_step: float, checkpoint_every: int, clips: bool = False
    ) -> None:
        """Tell that `step` of `target_steps` are done, and that the first step of this start comes next.

        Args:
            epochs_per_step: global batch / samples of the training set.
            checkpoint_every: steps between regular saves; 0: there are none.
            clips: whether `interval` will tell a gradient norm.
        """
        self._began = self._clock()
        self._times.begin(now=self._began)
        self._of_steps, self._epochs_per_step, self._checkpoint_every = target_steps, epochs_per_step, checkpoint_every
        self._tell_step(step)
        self._set(trainer_target_steps=target_steps, trainer_progress_ratio=step / target_steps)
        self._stepped_at.set(time.time())
        for name in (*_UNKNOWN_AT_FIRST, *(["trainer_gradient_norm"] if clips else [])):
            if not self._panel.cell(name).mark:  # else it is known from the last start
                self._set(**{name: _NAN})
        self._panel.choose("trainer_bottleneck", "")

    @event
    def step(self, step: int, *, samples: int, data_wait: float, compute: float, comm_wait: float = 0.0) -> None:
        """Tell that a step is done, as the last thing of it; `step` are done in the run.

        Args:
            samples: how many of its samples were this rank's.
            data_wait, compute, comm_wait: seconds of this one step; the split may be an estimate.
        """
        parts = {"data_wait": data_wait, "compute": compute, "comm_wait": comm_wait}
        self._durations.observe(self._times.step(step, now=self._clock(), parts=parts))
        self._steps_total.add(1.0)
        self._samples_total.add(samples)
        self._stepped_at.set(time.time())
        self._tell_step(step)
        self._steps += 1

    @event
    def interval(
        self,
        *,
        loss: float,
        learning_rate: float,
        remaining_seconds: float,
        gradient_norm: float | None = None,
        bottleneck: Bottleneck | None = None,
    ) -> None:
        """Tell what was found out at the end of a log interval."""
        self._set(trainer_loss=loss, trainer_learning_rate=learning_rate)
        self._set(trainer_estimated_remaining_seconds=remaining_seconds)
        self._set(trainer_progress_ratio=self._done / self._of_steps)
        if not math.isfinite(loss):
            self._panel.cell("trainer_nonfinite_losses_total").add(1.0)
        if gradient_norm is not None:
            self._set(trainer_gradient_norm=gradient_norm)
        if bottleneck is not None:
            self._panel.choose("trainer_bottleneck", bottleneck)
        if self._checkpoint_every and self._steps:
            pace = (self._clock() - self._began) / self._steps
            self._set(trainer_checkpoint_interval_seconds=self._checkpoint_every * pace)

    @event
    def memory(self, *, allocated: int, reserved: int) -> None:
        """Tell the most device memory, in bytes, since the last time; on GPUs alone."""
        self._set(trainer_device_memory_allocated_bytes=allocated, trainer_device_memory_reserved_bytes=reserved)

    @event
    def evaluated(self, seconds: float, *, loss: float, accuracy: float, best: float) -> None:
        """Tell the end of an evaluation that took `seconds`; accuracies are 0 to 1."""
        self._times.pause("eval", now=self._clock(), seconds=seconds)
        self._set(trainer_eval_loss=loss, trainer_eval_accuracy_ratio=accuracy)
        self._set(trainer_best_eval_accuracy_ratio=best)

    @event
    def data_errors(self, kind: DataFault, *, count: int = 1) -> None:
        """Tell of training samples that this rank could not read."""
        self._panel.cell("trainer_data_errors_total", kind).add(count)

    @event
    def waited_for_save(self, seconds: float, *, snapshot: float | None = None) -> None:
        """Tell that training has waited `seconds` for a save, on any rank, and on rank 0 how long the copy took."""
        self._times.pause("checkpoint", now=self._clock(), seconds=seconds)
        self._panel.cell("trainer_checkpoint_blocked_seconds_total").add(seconds)
        if snapshot is not None:
            self._panel.distribution("trainer_checkpoint_duration_seconds", "snapshot").observe(snapshot)

    @event
    def saved(self, step: int, *, seconds: float, size: int) -> None:
        """Tell that the checkpoint of `step`, of `size` bytes, is safe, and how long that took after the copy."""
        self._panel.cell("trainer_checkpoint_saves_total", "ok").add(1.0)
        self._panel.distribution("trainer_checkpoint_duration_seconds", "write").observe(seconds)
        self._set(trainer_checkpoint_size_bytes=size, trainer_checkpoint_last_success_step=step)
        self._set(trainer_checkpoint_last_success_timestamp_seconds=time.time())

    @event
    def not_saved(self, *, skipped: bool) -> None:
        """Tell that a save failed, or was skipped because another was under way."""
        self._panel.cell("trainer_checkpoint_saves_total", "skipped" if skipped else "error").add(1.0)

    def close(self) -> None:
        """Charge the time since the last event, and write no more; what was written stays."""
        self._settle()
        super().close()

    @event
    def _settle(self) -> None:
        self._times.settle(now=self._clock())

    def _tell_step(self, step: int) -> None:
        self._done = step
        self._step.set(step)
        self._epoch.set(step * self._epochs_per_step)
