"""Build the model: the small built-in cnn, torchvision's classification models by name, or a function of the user's.

Also what must be known about a model before training: weight names without wrappers, and BatchNorm. Wrapping in DDP,
devices and checkpoints live elsewhere. torchvision is imported for its own models alone: it costs a second.
"""

from __future__ import annotations

import difflib
import importlib
import math
import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.codes import CheckpointError, SettingError
from trainer.config import Config

Shape = tuple[int, int, int]

# These two return extra outputs when they train, and warn, unless they are told otherwise.
_ONE_OUTPUT = {"aux_logits": False, "init_weights": True}
_TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {"googlenet": _ONE_OUTPUT, "inception_v3": _ONE_OUTPUT}


class Cnn(nn.Module):
    """Classify small pictures: three strided convolutions and a linear head, about 100,000 weights.

    Takes floats of shape (samples, channels, height, width), 8 x 8 pixels or more, and returns logits of shape
    (samples, classes). The first convolution halves the picture at once, which is what makes it quick on a CPU; the
    head sees a 2 x 2 summary of the picture, whatever its size.
    """

    def __init__(self, *, channels: int, classes: int, norm: str = "batch", dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(channels, 32, kernel=5, norm=norm),
            *_block(32, 64, kernel=3, norm=norm),
            *_block(64, 128, kernel=3, norm=norm),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(128 * 2 * 2, classes)
        # Whatever --channels-last says: on a CPU a step then takes a quarter less time.
        self.to(memory_format=torch.channels_last)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.dropout(self.features(pictures)))
        return logits


def _block(inputs: int, outputs: int, *, kernel: int, norm: str) -> list[nn.Module]:
    """Return a convolution that halves height and width, its norm, and a ReLU."""
    normal = nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(8, outputs)
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
    return [convolution, normal, nn.ReLU(inplace=True)]


def build_model(config: Config, *, classes: int, shape: Shape) -> nn.Module:
    """Build the model of `config` on the CPU, for pictures of `shape` (channels, height, width).

    The weights are a function of `config.seed`, so every rank builds the same; the caller's random state is as before.

    Raises:
        SettingError: --model names nothing that can be built.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        if config.model == "cnn":
            return Cnn(channels=shape[0], classes=classes, norm=config.norm, dropout=config.dropout)
        if ":" in config.model:
            return _call(config, classes=classes, shape=shape)
        return _torchvision(config.model, classes=classes, channels=shape[0])


def _torchvision(name: str, *, classes: int, channels: int) -> nn.Module:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise SettingError(f"--model is {name!r}; {_nearest(name, ['cnn', *known])}")
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **_TORCHVISION_OPTIONS.get(name, {}))
    fit_first_convolution(model, channels)
    return model


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    mean = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{mean}allowed: cnn, a torchvision classification model such as resnet18, or package.module:function"


def _call(config: Config, *, classes: int, shape: Shape) -> nn.Module:
    """Call the user's function."""
    module, _, function = config.model.partition(":")
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"--model is {config.model!r}, which cannot be imported: {error}") from error
    except Exception as error:
        raise SettingError(f"--model is {config.model!r}, whose module fails: {_where(error)}") from error
    try:
        model = build(config, classes=classes, shape=shape)
    except Exception as error:
        raise SettingError(f"--model is {config.model!r}, whose function fails: {_where(error)}") from error
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"--model {config.model!r} returned {type(model).__name__}; it must return a torch.nn.Module"
        )
    wrapped = next((name for name in model.state_dict() if _WRAPPER.search(name)), None)
    if wrapped:
        raise SettingError(
            f"--model {config.model!r} returned a model with a weight named {wrapped!r}; return it without DDP or "
            "torch.compile around it, or rename that part: these names are taken for wrappers"
        )
    other = next((name for name, value in model.state_dict().items() if not isinstance(value, Tensor)), None)
    if other:
        raise SettingError(
            f"--model {config.model!r} keeps {other!r} in its state dict, which is no tensor: it cannot be saved"
        )
    return model


def _where(error: Exception) -> str:
    """Return an error's type, text, and the place in the user's code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {text}{place}"


def fit_first_convolution(model: nn.Module, channels: int) -> None:
    """Make the first convolution, in the order of modules, take `channels` input channels, if it does not.

    Its new weights are drawn with the old ones' spread, scaled so that its outputs keep their size. Its groups stay if
    they divide the channels.
    """
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    if first.in_channels == channels:
        return
    first.in_channels, first.groups = channels, math.gcd(first.groups, channels)
    old = first.weight.detach()
    new = old.new_empty(first.out_channels, channels // first.groups, *old.shape[2:]).normal_()
    first.weight = nn.Parameter(new * old.std() * math.sqrt(old.shape[1] / new.shape[1]))


# DDP and DataParallel put "module." before every name; torch.compile puts "_orig_mod." there, or further in.
_WRAPPER = re.compile(r"^(?:(?:module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that they have without DDP, DataParallel and torch.compile, in any order.

    Raises:
        CheckpointError: two names become one.
    """
    stripped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = _WRAPPER.sub("", name)
        if plain in stripped:
            raise CheckpointError(f"the weights hold {plain!r} twice, as {name!r} too; keep one of them")
        stripped[plain] = tensor
    return stripped


def has_batchnorm(model: nn.Module) -> bool:
    """Say whether a layer of `model` takes statistics over the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def check_batchnorm(
    model: nn.Module, *, smallest: int, ranks: int, global_batch_size: int, device_batch_size: int | None
) -> None:
    """Refuse to train BatchNorm on single samples.

    `smallest` is the number of samples of the smallest micro-batch of any rank. One sample has no spread where a
    layer's picture is 1 x 1 (torch raises then, in the middle of a run), and hardly a meaningful one elsewhere.
    SyncBatchNorm takes its statistics over all ranks.

    Raises:
        SettingError: it has one sample; says which settings lead to it.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    synced = all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    if not layers or smallest * (ranks if synced else 1) > 1:
        return
    device = "unset" if device_batch_size is None else device_batch_size
    raise SettingError(
        f"the model has BatchNorm, which needs 2 samples at a time, but the smallest micro-batch of a rank has "
        f"{smallest}: --global-batch-size is {global_batch_size}, ranks are {ranks}, --device-batch-size is {device}; "
        f"raise --global-batch-size to {2 * ranks} or more and --device-batch-size to 4 or more, or use a model "
        "without BatchNorm (--norm group)"
    )


def sync_batchnorm(model: nn.Module, *, device: torch.device) -> nn.Module:
    """Return `model` with every BatchNorm taking its statistics over all ranks; costs a collective per layer.

    Raises:
        SettingError: the device is no GPU.
    """
    if device.type != "cuda":
        raise SettingError(f"--sync-batchnorm needs GPUs, but the device is {device.type}; drop it or use --norm group")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted
