"""First weights from elsewhere: read from a file or fetched by torchvision's name, fitted to the model, and what stays frozen.

Who reads them, and how every rank gets the same, is decided by the callers.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
import urllib.error
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.codes import CheckpointError, DataError, SettingError

# DDP and DataParallel put "module." before every name; torch.compile puts "_orig_mod." there, or further in.
WRAPPER = re.compile(r"^(?:(?:module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")

#: Where training scripts keep the weights among other things.
_NESTED = ("state_dict", "model", "model_state_dict", "model_state", "net", "weights")

FETCH_SECONDS = 20.0  # without an answer


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that they have without DDP, DataParallel and torch.compile, in any order.

    Raises:
        CheckpointError: two names become one.
    """
    stripped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = WRAPPER.sub("", name)
        if plain in stripped:
            raise CheckpointError(f"the weights hold {plain!r} twice, as {name!r} too; keep one of them")
        stripped[plain] = tensor
    return stripped


def read_file(path: Path) -> dict[str, Tensor]:
    """Read weights from a .safetensors file, or from what torch.save wrote, of which nothing but tensors is unpickled.

    The weights may lie in an item "state_dict" or "model" of the latter.

    Raises:
        CheckpointError: it cannot be read, or holds no weights.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"--weights: {path} cannot be read ({error.strerror})") from error
    try:
        if path.suffix == ".safetensors":
            return strip_prefixes(safetensors.torch.load_file(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of tensors that are refused below
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        kind = "a safetensors file" if path.suffix == ".safetensors" else "a file of torch.save with tensors alone"
        raise CheckpointError(f"--weights: {path} is cut, or not {kind} ({_first_words(error)})") from error
    tensors = _tensors(found, path)
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.is_meta:
            raise CheckpointError(
                f"--weights: {path} holds {name!r}, which is no plain tensor; save the weights as such"
            )
    return strip_prefixes(tensors)


def _first_words(error: Exception) -> str:
    if "Weights only load failed" in str(error):
        return "it may hold a whole model: save model.state_dict() instead"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100]}" if lines else type(error).__name__


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    nested = found if isinstance(found, Mapping) else {}
    for item in [found, *(nested[name] for name in _NESTED if name in nested)]:
        if isinstance(item, Mapping) and item and all(isinstance(value, Tensor) for value in item.values()):
            return {str(name): value for name, value in item.items()}
    names = f"; its items are {', '.join(map(str, list(nested)[:6]))}" if nested else ""
    raise CheckpointError(f"--weights: {path} holds no state dict but {type(found).__name__}{names}")


def read_torchvision(name: str, *, model: str) -> dict[str, Tensor]:
    """Return torchvision's weights `name` of `model`, fetched into torch's cache folder where they are not there.

    Raises:
        SettingError: there are no such weights.
        DataError: they cannot be fetched.
    """
    from torchvision import models

    if model not in models.list_models(module=models):
        raise SettingError(
            f"--weights is {name!r}, which is no file, and --model {model} has no torchvision weights; name a file"
        )
    known = models.get_model_weights(model)
    entry = known.__members__.get(name.rpartition(".")[2])
    if entry is None or name not in (entry.name, str(entry), "DEFAULT", f"{known.__name__}.DEFAULT"):
        names = ", ".join(["DEFAULT", *(item.name for item in known)])
        raise SettingError(f"--weights is {name!r}, which is no file and no weights of {model}; allowed: {names}")
    try:
        with _bounded(FETCH_SECONDS), contextlib.redirect_stdout(io.StringIO()):  # torch.hub tells what it fetches
            state: Any = entry.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DataError(
            f"--weights {name}: {entry.url} cannot be fetched into {torch.hub.get_dir()} ({reason}); fetch the file "
            "elsewhere, and name it by --weights"
        ) from error
    return strip_prefixes(state)


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Give every Python socket that is opened inside a time limit: torch.hub sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def find_head(model: nn.Module, *, classes: int) -> str:
    """Return the name of the layer that gives the logits: the last one whose weight has a row per class.

    Raises:
        SettingError: there is none.
    """
    found = ""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear | nn.Conv2d) and weight is not None and len(weight) == classes:
            found = name
    if not found:
        raise SettingError(
            f"the model has no last layer with {classes} outputs; --freeze-backbone and --weights need one"
        )
    return found


def fit_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, classes: int) -> list[str]:
    """Load first weights into `model`; a head that is missing or of another size keeps its own.

    A first convolution for one channel takes the sum of the weights of three.

    Returns:
        What a person should know of it, a line each.

    Raises:
        CheckpointError: anything else does not fit.
    """
    own, head = model.state_dict(), find_head(model, classes=classes)
    given = {name: _fitted(value, own[name]) for name, value in tensors.items() if name in own}
    bad = {name for name, value in given.items() if value.shape != own[name].shape}
    missing = {name for name in own if name not in given and not name.endswith("num_batches_tracked")}
    replaced = {name for name in bad | missing if name.startswith(f"{head}.")}
    if wrong := [name for name in own if name in (bad | missing) - replaced]:
        name = wrong[0]
        what = f"{name!r} is {list(given[name].shape)}" if name in given else f"there is no {name!r}"
        wanted = f"{list(own[name].shape)} is needed"
        raise CheckpointError(
            f"--weights: {what}, {wanted} ({len(wrong)} of {len(own)} do not fit); they are another model's"
        )
    others = sorted(set(tensors) - set(own))
    children = {name for name, _ in model.named_children()}
    if of_ours := [name for name in others if name.partition(".")[0] in children - {head.partition(".")[0]}]:
        raise CheckpointError(
            f"--weights: the model has no {of_ours[0]!r} ({len(of_ours)} of {len(tensors)} have no place); they are another model's"
        )
    model.load_state_dict({name: value for name, value in given.items() if name not in bad}, strict=False)
    notes = []
    if replaced:
        found = given.get(f"{head}.weight")
        there = "has none" if found is None else f"has one for {len(found)} classes"
        notes.append(f"the head {head} is new, for {classes} classes: the file {there}")
    if others:
        notes.append(f"left out of the file, since the model has no such weights: {len(others)} ({others[0]} ...)")
    return notes


def _fitted(value: Tensor, own: Tensor) -> Tensor:
    if value.ndim == own.ndim == 4 and (value.shape[1], own.shape[1]) == (3, 1) and len(value) == len(own):
        return value.sum(dim=1, keepdim=True)
    return value


def freeze_backbone(model: nn.Module, *, classes: int) -> None:
    """Leave the head alone to be trained; frozen BatchNorm layers keep their statistics too.

    Raises:
        SettingError: the model has no head that could be told.
    """
    head = find_head(model, classes=classes)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            module.eval()
        if name != head:
            for weight in module.parameters(recurse=False):
                weight.requires_grad_(False)
