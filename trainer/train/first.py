"""The weights that a run begins with, where --weights names some: rank 0 reads them, every rank loads the same bytes."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from trainer import checkpoint, log
from trainer.config import Config
from trainer.data import DataSet
from trainer.group import Group
from trainer.models import find_head, fit_weights, read_file, read_torchvision
from trainer.train.loop import State


def load_first_weights(state: State, *, config: Config, dataset: DataSet, group: Group) -> None:
    """Load what --weights names into the model, unless the run goes on from a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is another model's.
        DataError: it cannot be fetched.
        SettingError: there are no such weights.
    """
    if config.weights is None or state.step:
        if config.freeze_backbone and not state.step:
            log.info("--freeze-backbone without --weights: what is frozen is random")
        return
    name, model = config.weights, config.model
    classes = dataset.classes

    def read() -> bytes:
        tensors, names = read_weights(name, model=model)
        if (
            names and dataset.class_names and names != dataset.class_names
        ):  # what its head tells apart is something else
            head = find_head(state.model, classes=classes)
            tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{head}.")}
        return _pack(tensors, known=state.model.state_dict().keys())

    packed = group.from_rank_0(read)
    notes = group.together(lambda: fit_weights(state.model, safetensors.torch.load(packed), classes=classes))
    log.info(f"first weights: {name}{''.join(f'; {line}' for line in notes)}")


def read_weights(name: str, *, model: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read the weights that --weights names: a folder or a file, else torchvision's; and the names of its classes, if told.

    Raises as `load_first_weights`.
    """
    path = Path(name)
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises
        loaded = checkpoint.parse(checkpoint.read(checkpoint.resolve(path)))
        return loaded.model, tuple(loaded.state.get("names") or ())
    if os.path.isfile(path) or path.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt") or len(path.parts) > 1:  # noqa: PTH113
        return read_file(path), ()
    return read_torchvision(name, model=model), ()


def _pack(tensors: dict[str, Tensor], *, known: Collection[str]) -> bytes:
    # Clones: safetensors takes neither another memory order nor two names for one memory. Of what has no place in the model the
    # name is enough.
    order = torch.contiguous_format
    kept = {name: value if name in known else torch.empty(0) for name, value in tensors.items()}
    return safetensors.torch.save({name: value.clone(memory_format=order) for name, value in kept.items()})
