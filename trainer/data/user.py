"""Take in a data set of the user's own: `package.module:function`, called as function(split, config) for "train" and "test".

It returns either arrays, `(images, labels)`: uint8 [n, height, width] or [n, channels, height, width] with 1 to 4 channels, and
whole numbers from 0 [n]; the classes are those of the training labels. Or it returns a map-style torch Dataset with items
`(uint8 [channels, height, width], label)` and an attribute `classes` (their names or number), and if it likes `mean` and `std`
(per channel, in 0..1 units) and `fingerprint` (a text that changes with the content). Its own random numbers, from torch, numpy
or random, are seeded before each sample, so they are a function of (seed, stream position) too.
"""

from __future__ import annotations

import importlib
import math
import operator
import random
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.codes import DataError, SettingError, TrainerError
from trainer.config import Config
from trainer.data.order import draws
from trainer.data.sets import I64, U8, U64, ArraySource, BadSample, DataSet, digest, fingerprint, statistics

MOST_CHANNELS = 4
SPLITS = ("train", "test")
MOST_CLASSES = 10**6


def load_user(config: Config) -> DataSet:
    """Call the user's function for both splits and check what it returns.

    Raises:
        SettingError: there is no such function.
        DataError: it failed, or returned something else than what is said above.
    """
    name = config.dataset
    function = _function(name)
    train, test = (_call(function, split, config) for split in SPLITS)
    try:
        if isinstance(train, tuple) and isinstance(test, tuple):
            return _from_arrays(name, train, test)
        return _from_datasets(name, train, test)
    except TrainerError:
        raise
    except Exception as error:  # its length, its attributes: all of it is the user's code
        raise DataError(f"data set {name} cannot be used: {_line(error)}") from error


def _function(name: str) -> Callable[[str, Config], Any]:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise SettingError(f"--dataset {name} cannot be imported: {_line(error)}") from error
    if not callable(function):
        raise SettingError(f"--dataset {name} is no function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[str, Config], Any], split: str, config: Config) -> Any:
    try:
        return function(split, config)
    except TrainerError:
        raise
    except Exception as error:
        raise DataError(f"data set {config.dataset}: its function failed for {split!r}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _from_arrays(name: str, train: tuple[Any, ...], test: tuple[Any, ...]) -> DataSet:
    sources = {}
    classes = None
    for split, arrays in zip(SPLITS, (train, test), strict=True):
        where = f"data set {name}, {split}"
        images, labels = _checked(arrays, where)
        classes = classes or (int(labels.max()) + 1 if labels.size else 1)
        if classes > MOST_CLASSES:
            raise DataError(
                f"{where}: the label of sample {labels.argmax()} is {labels.max()}; allowed: below {MOST_CLASSES}"
            )
        bad = np.flatnonzero((labels < 0) | (labels >= classes))
        if bad.size:
            raise DataError(f"{where}: the label of sample {bad[0]} is {labels[bad[0]]}; allowed: 0 to {classes - 1}")
        sources[split] = ArraySource(images, labels.astype(np.int64))
    shape = sources["train"].images.shape[1:]
    if sources["test"].images.shape[1:] != shape:
        raise DataError(
            f"data set {name}: test pictures are {sources['test'].images.shape[1:]}, training pictures {shape}"
        )
    mean, std = (
        statistics(sources["train"].images) if len(sources["train"]) else ((0.5,) * shape[0], (0.25,) * shape[0])
    )
    digests = [digest(array) for source in sources.values() for array in (source.images, source.labels)]
    return DataSet(
        name, sources["train"], sources["test"], classes or 1, (shape[0], shape[1], shape[2]), mean, std,
        shift=0, fingerprint=fingerprint(digests), in_memory=True,
    )  # fmt: skip


def _checked(arrays: tuple[Any, ...], where: str) -> tuple[U8, np.ndarray[Any, Any]]:
    if len(arrays) != 2:
        raise DataError(f"{where}: the function returned {len(arrays)} things; expected (images, labels)")
    images, labels = (np.asarray(array) for array in arrays)
    if images.ndim == 3:
        images = images[:, None]
    if (
        images.dtype != np.uint8
        or images.ndim != 4
        or not 1 <= images.shape[1] <= MOST_CHANNELS
        or 0 in images.shape[2:]
    ):
        raise DataError(
            f"{where}: images are {images.dtype} {list(images.shape)}; "
            f"expected uint8 [n, height, width] or [n, channels, height, width] with 1 to {MOST_CHANNELS} channels"
        )
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise DataError(
            f"{where}: labels are {labels.dtype} {list(labels.shape)}; expected whole numbers [{len(images)}]"
        )
    return images, labels


@dataclass(frozen=True)
class ItemSource:
    """Serve samples from a map-style Dataset, item by item."""

    items: Any
    where: str
    count: int
    classes: int
    shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def fetch(self, ids: I64, *, seeds: U64 | None = None) -> tuple[U8, I64]:
        """Read the items `ids`; see `Source`."""
        if seeds is None:
            seeds = draws(0, positions=ids, count=1)[:, 0]
        images = np.empty((len(ids), *(self.shape or ())), np.uint8)
        labels = np.empty(len(ids), np.int64)
        for row, (index, seed) in enumerate(zip(ids.tolist(), seeds.tolist(), strict=True)):
            images[row], labels[row] = self.item(index, seed=seed)
        return images, labels

    def item(self, index: int, *, seed: int) -> tuple[U8, int]:
        """Read one item as picture and label, with the generators that it may use seeded."""
        torch.default_generator.manual_seed(seed >> 1)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            picture, label = self.items[index]
            image, number = np.asarray(picture), operator.index(label)
        except Exception as error:
            raise BadSample(f"{self.where}: sample {index} cannot be read: {_line(error)}") from error
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape != (self.shape or image.shape):
            wanted = list(self.shape) if self.shape else "[channels, height, width]"
            raise DataError(
                f"{self.where}: the picture of sample {index} is {image.dtype} {list(image.shape)}; expected uint8 {wanted}"
            )
        if not 0 <= number < self.classes:
            raise DataError(f"{self.where}: the label of sample {index} is {number}; allowed: 0 to {self.classes - 1}")
        return image, number


def _from_datasets(name: str, train: Any, test: Any) -> DataSet:
    sources = {}
    shape: tuple[int, ...] | None = None
    for split, items in zip(SPLITS, (train, test), strict=True):
        where = f"data set {name}, {split}"
        source = ItemSource(items, where, count=_length(items, where), classes=_classes(items, where))
        if shape is None and len(source):
            shape = source.item(0, seed=0)[0].shape
        sources[split] = ItemSource(items, where, source.count, source.classes, shape or (1, 1, 1))
    if sources["train"].classes != sources["test"].classes:
        raise DataError(
            f"data set {name}: {sources['train'].classes} classes to train, {sources['test'].classes} to test"
        )
    channels, height, width = shape or (1, 1, 1)
    parts = [
        f"{len(source)} {source.classes} {getattr(source.items, 'fingerprint', '')}" for source in sources.values()
    ]
    return DataSet(
        name, sources["train"], sources["test"], sources["train"].classes, (channels, height, width),
        _per_channel(train, "mean", 0.5, name, channels), _per_channel(train, "std", 0.25, name, channels),
        shift=0, fingerprint=fingerprint(parts), in_memory=False,
    )  # fmt: skip


def _length(items: Any, where: str) -> int:
    if not isinstance(items, Sized) or not hasattr(items, "__getitem__"):
        raise DataError(
            f"{where}: the function returned {type(items).__name__}; expected (images, labels) for both splits, "
            "or for both a Dataset with __len__ and __getitem__"
        )
    return len(items)


def _classes(items: Any, where: str) -> int:
    classes = getattr(items, "classes", None)
    count = classes if isinstance(classes, int) else len(classes) if isinstance(classes, Sized) else 0
    if count < 1:
        raise DataError(
            f"{where}: its attribute `classes` is {classes!r}; expected the classes' names, or their number"
        )
    return count


def _per_channel(items: Any, attribute: str, default: float, name: str, channels: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in getattr(items, attribute, (default,) * channels))
    finite = all(map(math.isfinite, values))
    if len(values) != channels or not finite or (attribute == "std" and min(values) <= 0):
        raise DataError(f"data set {name}: `{attribute}` is {values}; expected {channels} numbers, and above 0 for std")
    return values
