"""From a checkpoint to a State: rank 0 reads and verifies, every rank parses the same bytes. The way there is in `saving.py`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from trainer import checkpoint, log
from trainer.codes import CheckpointError, SettingError
from trainer.config import Config
from trainer.data import DataSet
from trainer.evaluate import Score
from trainer.group import Group
from trainer.metrics import Recorder
from trainer.optim import load_optimizer_tensors
from trainer.train.folder import CHECKPOINTS, check_same
from trainer.train.loop import State

_HEAD_BYTES = 8


def restore_state(
    state: State,
    folder: Path,
    *,
    config: Config,
    dataset: DataSet,
    group: Group,
    recorder: Recorder | None = None,
) -> None:
    """Load the checkpoint that --resume asks for into `state`, on every rank; keep `state` where there is none.

    Raises:
        CheckpointError: none of the checkpoints there can be used.
        SettingError: the checkpoint was made with another experiment's settings or other data.
    """
    recorder = recorder or Recorder.off()
    files = _unpack(group.from_rank_0(lambda: _pack(_read(folder, config))))
    if not files:
        recorder.restored(None)
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
    recorder.restored(state.step, saved_at=time.time())
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
