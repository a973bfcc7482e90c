"""What a data set is to the rest of the trainer, and the one that lies in memory.

Which data sets there are lives in `table.py`; how batches are made of them in `loader.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.codes import DataError

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


class BadSample(DataError):
    """Say that one sample cannot be read; --bad-samples says whether that ends the run."""


class Source(Protocol):
    """Hand out the samples of one split by their ids, 0 to len-1."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def fetch(self, ids: I64, *, seeds: U64 | None = None) -> tuple[U8, I64]:
        """Read samples into new arrays.

        Args:
            ids: [k].
            seeds: [k], for sources that draw random numbers of their own; without it they draw the same at each call.

        Returns:
            Pictures [k, channels, height, width] and labels [k].

        Raises:
            BadSample: a sample cannot be read; the line names it.
            DataError: it was read, but is not what it must be.
        """
        ...


@dataclass(frozen=True)
class DataSet:
    """Hold a data set and what training needs to know about it.

    Attributes:
        name: as given by --dataset.
        classes: number of classes; labels are 0 to classes-1.
        shape: channels, height, width of every picture.
        mean, std: per channel, in 0..1 units, for the normalisation on the device.
        shift: largest augmentation shift in pixels; 0 is none.
        flip: whether half of the training pictures are mirrored.
        fingerprint: sha256 in hex, another one where the content is another (before --limit-train and --limit-test).
        in_memory: whether a sample costs no more than a copy, so that loader processes would only be in the way.
        class_names: by label, where the data tell them.
        facts: what was found, a line each.
        notes: what is odd about the data, a line each.
        resize: side that pictures are scaled to on the device, where it is not their own.
    """

    name: str
    train: Source
    test: Source
    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int
    fingerprint: str
    in_memory: bool
    class_names: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    resize: int | None = None
    flip: bool = False

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Return channels, height, width of what the model gets."""
        return self.shape if self.resize is None else (self.shape[0], self.resize, self.resize)


@dataclass(frozen=True)
class ArraySource:
    """Serve samples from arrays: images [n, channels, height, width], labels [n]."""

    images: U8
    labels: I64

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def fetch(self, ids: I64, *, seeds: U64 | None = None) -> tuple[U8, I64]:
        """Copy the rows `ids`."""
        return self.images[ids], self.labels[ids]


@dataclass(frozen=True)
class First:
    """Serve the first `count` samples of a source, over and over where it has fewer."""

    source: Source
    count: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def fetch(self, ids: I64, *, seeds: U64 | None = None) -> tuple[U8, I64]:
        """Read the samples `ids`, modulo the source's length."""
        return self.source.fetch(ids % len(self.source), seeds=seeds)


@dataclass(frozen=True)
class Spread:
    """Serve `count` samples of a source, at equal distances: some of each class where they lie in the order of classes."""

    source: Source
    count: int

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def fetch(self, ids: I64, *, seeds: U64 | None = None) -> tuple[U8, I64]:
        """Read the samples `ids`."""
        return self.source.fetch(ids * len(self.source) // self.count, seeds=seeds)


def digest(array: U8 | I64) -> str:
    """Return the sha256 of an array's type, shape and content (55 MB in 0.03 s, in 0.2 s without CPU support)."""
    state = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def fingerprint(parts: Sequence[str]) -> str:
    """Return the sha256 of some texts, digests mostly."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def statistics(images: U8) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and standard deviation per channel, in 0..1 units, on at most 2,000 evenly spaced pictures."""
    sample = images[:: max(1, len(images) // 2000)][:2000].astype(np.float64) / 255
    mean = [round(float(value), 4) for value in sample.mean(axis=(0, 2, 3))]
    std = [round(max(float(value), 1 / 255), 4) for value in sample.std(axis=(0, 2, 3))]
    return tuple(mean), tuple(std)
