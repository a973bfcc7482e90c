"""Build the model: the small built-in cnn, torchvision's classification models by name, or a function of the user's.

First weights from elsewhere live in `weights.py`, what BatchNorm asks for in `batchnorm.py`; wrapping in DDP, devices and
checkpoints elsewhere. torchvision is imported for its own models alone: it costs a second.
"""

from __future__ import annotations

import difflib
import importlib
import math
import traceback
from typing import Any

import torch
from torch import Tensor, nn

from trainer.codes import SettingError
from trainer.config import Config
from trainer.models.weights import WRAPPER

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
    wrapped = next((name for name in model.state_dict() if WRAPPER.search(name)), None)
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
