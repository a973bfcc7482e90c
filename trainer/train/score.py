"""Evaluate a checkpoint: the `eval` command's assembly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainer import checkpoint, log
from trainer.codes import CheckpointError
from trainer.config import Config, Scalar, parse, settings
from trainer.data import load
from trainer.evaluate import Score
from trainer.train.prepare import Prepare
from trainer.train.restore import check_names, load_model, read_packed, unpacked
from trainer.train.run import build_state, check_same_data, joined, score_state
from trainer.train.saving import DATA_PATHS, READING
from trainer.train.start import Start


def score(start: Start, path: Path) -> Score:
    """Evaluate the checkpoint at `path`, or the newest of the run there, on the data set that it was trained with.

    Raises:
        CheckpointError: there is none, it is damaged, or the model does not fit it.
        Stopped: a stop signal was obeyed.
    """
    with joined(start) as (_, group):
        loaded = unpacked(group.from_rank_0(lambda: read_packed(path)))
        config = _with_experiment(start, loaded)
        log.info(f"step {loaded.step} of {path}: {config.model} on {config.dataset}")
        dataset = group.together(lambda: load(config, cache_dir=start.cache_dir))
        check_same_data(dataset, group)
        state = group.together(lambda: build_state(config, dataset=dataset, group=group))
        if loaded.state["classes"] != dataset.classes:
            raise CheckpointError(
                f"{path} tells {loaded.state['classes']} classes apart, but --dataset {config.dataset} has {dataset.classes}; check --data-dir",
                shared=True,
            )
        check_names(loaded, dataset, where=str(path))
        load_model(state, loaded)
        state.step = loaded.step
        prepare = Prepare(dataset, group.device, channels_last=config.channels_last)
        return score_state(state, config=config, dataset=dataset, group=group, prepare=prepare, start=start)


def _with_experiment(start: Start, loaded: checkpoint.Loaded) -> Config:
    """Take the experiment's settings from the checkpoint, and where its data were; the rest stays as it was given."""
    saved: dict[str, Scalar] = {}
    for name, value in loaded.state["config"].items():
        if name in settings():
            saved[name] = value if value is None else parse(settings()[name], str(value), origin="checkpoint")
    for name in DATA_PATHS:
        if getattr(start.config, name) is None and loaded.state.get(name):
            saved[name] = Path(loaded.state[name])
    for name in READING:
        if start.sources.get(name, "default") == "default" and name in loaded.state:
            saved[name] = loaded.state[name]
    ignored = [
        settings()[name].flag
        for name, value in saved.items()
        if start.sources.get(name) == "command line" and value != getattr(start.config, name)
    ]
    if ignored:
        log.warning(
            f"ignored: {', '.join(ignored)}; an evaluation takes what belongs to the experiment from the checkpoint"
        )
    saved["sync_batchnorm"] = False  # in evaluation it is plain BatchNorm, and that runs anywhere
    return dataclasses.replace(start.config, **saved)  # type: ignore[arg-type]
