"""From a State to a checkpoint and back; rank 0 reads and verifies, every rank parses the same bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trainer import checkpoint, log
from trainer.beat import Pulse
from trainer.codes import CheckpointError, SettingError
from trainer.config import Config, experiment
from trainer.data import DataSet
from trainer.evaluate import Score
from trainer.group import Group
from trainer.optim import load_optimizer_tensors, optimizer_tensors
from trainer.train.folder import CHECKPOINTS, check_same, plain
from trainer.train.loop import State

_HEAD_BYTES = 8

#: Where the data were, and how they were read: kept so that an evaluation finds them again, from any folder.
DATA_PATHS = ("data_dir", "train_list", "test_list", "class_names")
READING = ("bad_samples", "max_bad_samples", "max_pixels", "empty_classes")


def save_state(
    state: State, writer: checkpoint.Writer, *, config: Config, dataset: DataSet, group: Group, last: bool
) -> None:
    """Save the state on rank 0, in the background unless it is the `last` save; returns at once elsewhere.

    Raises:
        SaveFailed: the last save failed, or --max-failed-saves in a row.
    """
    if group.rank != 0:
        return
    parts: dict[str, Any] = {
        "step": state.step,
        "model": state.model.state_dict(),
        "optimizer": optimizer_tensors(state.optimizer, state.model),
        "state": _record(state, config=config, dataset=dataset),
    }
    if last:
        writer.save(**parts)
        return
    failures = [outcome.error for outcome in writer.poll() if outcome.error is not None]
    if failures and writer.failed_in_a_row >= config.max_failed_saves:
        raise failures[-1]
    is_best = state.best is not None and state.best["step"] == state.step
    if not writer.submit(**parts, wait=is_best):
        log.warning(f"step {state.step} is not saved: the save before is still under way; see --checkpoint-every")


def _record(state: State, *, config: Config, dataset: DataSet) -> dict[str, Any]:
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


def tell_outcome(outcome: checkpoint.Outcome, *, pulse: Pulse) -> None:
    """Log how a save ended; called by the writing thread."""
    if outcome.error is not None:
        log.warning(str(outcome.error), step=outcome.step)
        return
    pulse.saved(outcome.step)
    log.info(f"saved {outcome.path}", step=outcome.step, path=str(outcome.path), seconds=outcome.seconds)
    if outcome.warning:
        log.warning(outcome.warning)  # an old one too many is no reason to end


def restore_state(state: State, folder: Path, *, config: Config, dataset: DataSet, group: Group) -> None:
    """Load the checkpoint that --resume asks for into `state`, on every rank; keep `state` where there is none.

    Raises:
        CheckpointError: none of the checkpoints there can be used.
        SettingError: the checkpoint was made with another experiment's settings or other data.
    """
    files = _unpack(group.from_rank_0(lambda: _pack(_read(folder, config))))
    if not files:
        return
    loaded = checkpoint.parse(files)
    where = f"the checkpoint of step {loaded.step}"
    check_same(config, loaded.state["config"], where=where)
    if loaded.state["fingerprint"] != dataset.fingerprint:
        raise SettingError(
            f"the data of --dataset {config.dataset} are not those that {where} was made with; check --data-dir",
            shared=True,
        )
    load_model(state, loaded)
    load_optimizer_tensors(state.optimizer, model=state.model, tensors=loaded.optimizer)
    state.step = loaded.step
    state.score = Score(**loaded.state["score"]) if loaded.state["score"] else None
    state.scored_at = loaded.state["scored_at"]
    state.skipped, state.best = loaded.state.get("skipped", 0), loaded.state.get("best")
    log.info(f"resumed at step {state.step}", step=state.step)


def check_names(loaded: checkpoint.Loaded, dataset: DataSet, *, where: str) -> None:
    """Check that the data set's classes are those of the checkpoint. Raises CheckpointError naming the first other one."""
    saved = loaded.state.get("names") or []
    for label, (there, here) in enumerate(zip(saved, dataset.class_names, strict=False)):
        if there != here:
            raise CheckpointError(
                f"class {label} is {here!r} in --data-dir, but {there!r} in {where}; evaluate on the same classes",
                shared=True,
            )


def load_model(state: State, loaded: checkpoint.Loaded) -> None:
    """Load a checkpoint's weights. Raises CheckpointError where they are not this model's."""
    try:
        state.model.load_state_dict(loaded.model)
    except RuntimeError as error:
        line = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"the checkpoint of step {loaded.step} does not fit the model: {line}", shared=True
        ) from error


def _read(folder: Path, config: Config) -> dict[str, bytes]:
    if config.resume not in ("auto", "never"):
        # The run's own checkpoints win: a restarted job must go on, not go back to where it was forked.
        if not checkpoint.find(folder / CHECKPOINTS):
            return checkpoint.read(checkpoint.resolve(Path(config.resume)))
        log.info(f"going on from this run's own checkpoints, not from --resume {config.resume}")
    path, files, passed_over = checkpoint.read_newest(folder / CHECKPOINTS)
    for line in passed_over:
        log.warning(line)
    if path:
        log.info(f"reading {path}")
    return files


def read_packed(path: Path) -> bytes:
    """Read and verify one checkpoint (or a run's newest) into bytes for `unpacked`. Raises CheckpointError."""
    return _pack(checkpoint.read(checkpoint.resolve(path)))


def unpacked(payload: bytes) -> checkpoint.Loaded:
    """Parse what `read_packed` returned."""
    return checkpoint.parse(_unpack(payload))


def _pack(files: dict[str, bytes]) -> bytes:
    head = json.dumps({name: len(content) for name, content in files.items()}).encode()
    return b"".join([len(head).to_bytes(_HEAD_BYTES, "big"), head, *files.values()])


def _unpack(payload: bytes) -> dict[str, bytes]:
    start = _HEAD_BYTES + int.from_bytes(payload[:_HEAD_BYTES], "big")
    sizes: dict[str, Any] = json.loads(payload[_HEAD_BYTES:start])
    files = {}
    for name, size in sizes.items():
        files[name] = payload[start : start + size]
        start += size
    return files
