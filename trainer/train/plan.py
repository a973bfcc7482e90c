"""What happens at which step: pure functions of the step, the settings and the size of the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.codes import DataError, SettingError
from trainer.config import Config
from trainer.data import epochs_done, total_steps


@dataclass(frozen=True)
class Plan:
    """Hold the numbers that a run's steps follow.

    Attributes:
        steps: optimizer steps of the whole run.
        samples: size of the training set, n.
        global_batch: samples per step over all ranks, B.
        micro_batches: forward and backward passes per step, the same on every rank.
        smallest: fewest samples that any rank passes through the model at once.
        warmup_steps: steps in which the learning rate rises.
        eval_every, checkpoint_every, log_every: steps between the events; 0 as in the settings' help.
        most_skipped: largest part of the samples that may be bad.
    """

    steps: int
    samples: int
    global_batch: int
    micro_batches: int
    smallest: int
    warmup_steps: int
    eval_every: int
    checkpoint_every: int
    log_every: int
    most_skipped: float = 0.0

    @property
    def epochs(self) -> float:
        """Return how often the run uses the training set."""
        return self.steps * self.global_batch / self.samples

    def evaluates_after(self, step: int) -> bool:
        """Tell whether an evaluation follows step number `step` (counted from 1): each epoch's end, or every N steps."""
        if step == self.steps:
            return True
        if self.eval_every:
            return step % self.eval_every == 0
        size = {"n": self.samples, "global_batch": self.global_batch}
        return epochs_done(step, **size) > epochs_done(step - 1, **size)

    def saves_after(self, step: int) -> bool:
        """Tell whether a checkpoint follows step number `step`."""
        return step == self.steps or (self.checkpoint_every > 0 and step % self.checkpoint_every == 0)

    def check_skipped(self, skipped: int, *, step: int) -> None:
        """Check how many samples were bad in the run's first `step` steps. Raises DataError."""
        check_skipped(skipped, of=max(self.samples, step * self.global_batch), most=self.most_skipped, what="training")

    def logs_after(self, step: int) -> bool:
        """Tell whether a log line follows step number `step`."""
        return step == self.steps or step % self.log_every == 0


def make_plan(config: Config, *, samples: int, world: int) -> Plan:
    """Work out a run's plan for a training set of `samples` and `world` ranks.

    Raises:
        SettingError: the global batch is smaller than the number of ranks.
    """
    batch = config.global_batch_size
    if batch < world:
        raise SettingError(
            f"--global-batch-size is {batch}, but there are {world} ranks, and each needs a sample; raise it to {world} or more"
        )
    steps = config.steps or total_steps(config.epochs, n=samples, global_batch=batch)
    most = math.ceil(batch / world)
    micro = math.ceil(most / config.device_batch_size) if config.device_batch_size else 1
    fewest = batch // world
    return Plan(
        steps=steps,
        samples=samples,
        global_batch=batch,
        micro_batches=micro,
        smallest=max(1, fewest // micro),
        warmup_steps=round(config.warmup * steps),
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
        most_skipped=config.max_bad_samples,
    )


def check_skipped(skipped: int, *, of: int, most: float, what: str) -> None:
    """Check how many samples were bad, on all ranks alike. Raises DataError: more than the part `most`."""
    if skipped > most * of:
        raise DataError(
            f"{skipped} of {of} {what} samples cannot be read, and --max-bad-samples is {most:g}; mend the files, or raise it",
            shared=True,
        )
