"""From a State to a checkpoint: what is saved, on rank 0 alone, and what a failed save means for the run."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from trainer import checkpoint, log
from trainer.beat import Pulse
from trainer.config import Config, experiment
from trainer.data import DataSet
from trainer.group import Group
from trainer.metrics import Recorder
from trainer.optim import optimizer_tensors
from trainer.stop import Stop
from trainer.train.folder import plain
from trainer.train.loop import State

#: Where the data were, and how they were read: kept so that an evaluation finds them again, from any folder.
DATA_PATHS = ("data_dir", "train_list", "test_list", "class_names")
READING = ("bad_samples", "max_bad_samples", "max_pixels", "empty_classes")


@dataclass(frozen=True)
class Saving:
    """Save the state of a run, as `fit` asks for it; does nothing on ranks other than 0."""

    state: State
    writer: checkpoint.Writer
    config: Config
    dataset: DataSet
    group: Group
    stop: Stop
    recorder: Recorder = field(default_factory=Recorder.off)

    def reserve(self) -> None:
        """Get the memory for saves in the background, once the optimizer has its state: after the first step."""
        if self.group.rank == 0:
            self.writer.reserve(**self._tensors())

    def __call__(self, *, last: bool) -> None:
        """Save, in the background unless it is the `last` save.

        Raises:
            SaveFailed: the last save failed, or --max-failed-saves in a row.
        """
        began = time.monotonic()
        try:
            if self.group.rank == 0:
                self._save(last=last)
        finally:
            self.recorder.waited_for_save(time.monotonic() - began)

    def _save(self, *, last: bool) -> None:
        state, writer = self.state, self.writer
        parts = {"step": state.step, **self._tensors(), "state": self._record()}
        if last:
            self._warn_if_too_long()
            writer.save(**parts)
            return
        failures = [outcome.error for outcome in writer.poll() if outcome.error is not None]
        if failures and writer.failed_in_a_row >= self.config.max_failed_saves:
            raise failures[-1]
        is_best = state.best is not None and state.best["step"] == state.step
        if not writer.submit(**parts, wait=is_best):
            self.recorder.not_saved(skipped=True)
            log.warning(f"step {state.step} is not saved: the save before is still under way; see --checkpoint-every")

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = self.state.model, self.state.optimizer
        return {"model": model.state_dict(), "optimizer": optimizer_tensors(optimizer, model)}

    def _warn_if_too_long(self) -> None:
        if not self.stop.signum:
            return
        left = self.config.grace - (time.monotonic() - self.stop.since)
        if self.writer.seconds > left:
            log.warning(
                f"the last save took {self.writer.seconds:.1f} s, and {max(0.0, left):.1f} s are left to save before this process may be "
                f"killed (--grace {self.config.grace:g}); give more, also to what stops the run (docker stop -t, Kubernetes' grace period)"
            )

    def _record(self) -> dict[str, Any]:
        state, config, dataset = self.state, self.config, self.dataset
        return {
            "config": {name: plain(value) for name, value in experiment(config).items()},
            **{name: str(path.absolute()) for name in DATA_PATHS if (path := getattr(config, name)) is not None},
            **{name: getattr(config, name) for name in READING},
            "fingerprint": dataset.fingerprint,
            "classes": dataset.classes,
            "shape": list(dataset.input_shape),
            "names": list(dataset.class_names),
            "skipped": state.skipped,
            "score": dataclasses.asdict(state.score) if state.score else None,
            "scored_at": state.scored_at,
            "best": state.best,
        }


def tell_outcome(outcome: checkpoint.Outcome, *, pulse: Pulse, recorder: Recorder | None = None) -> None:
    """Log how a save ended; called by the writing thread."""
    recorder = recorder or Recorder.off()
    if outcome.error is not None:
        recorder.not_saved(skipped=False)
        log.warning(str(outcome.error), step=outcome.step)
        return
    pulse.saved(outcome.step)
    size = sum(path.stat().st_size for path in outcome.path.iterdir()) if outcome.path else 0
    recorder.saved(outcome.step, seconds=outcome.seconds, size=size)
    log.info(f"saved {outcome.path}", step=outcome.step, path=str(outcome.path), seconds=outcome.seconds)
    if outcome.warning:
        log.warning(outcome.warning)  # an old one too many is no reason to end
