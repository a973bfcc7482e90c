"""What is in the batch of a step: the samples, their augmentation, or why they cannot be used.

A batch is a function of the data set and the step's number, so it does not matter which process makes it. Who makes it lives in
`loader.py`, the order in `order.py`, the reading in the sources.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.codes import DATA, DataError
from trainer.data.augment import flip_pictures, shift_pictures
from trainer.data.order import draws, order, rank_positions
from trainer.data.sets import I64, U8, U64, BadSample, DataSet, Source


@dataclass
class Batch:
    """Hold one rank's samples of one step.

    Attributes:
        step: number of the step, from 0; in an evaluation, of the batch.
        ids: int64 [n], the samples' numbers in their split.
        images: uint8 [n, channels, height, width], augmented, not normalised.
        labels: int64 [n].
        faults: a line for each sample that could not be read and was replaced or left out.
        skipped: how many places of the step that were.
        error: why there are no data to use, or None. With an error, images and labels are zeros of the right size, so that
            the rank can take part in what its peers do in this step.
        code: the exit code that goes with the error, else 0.
    """

    step: int
    ids: torch.Tensor
    images: torch.Tensor
    labels: torch.Tensor
    error: str | None = None
    code: int = 0
    faults: tuple[str, ...] = ()
    skipped: int = 0

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory, from which a GPU copies without waiting."""
        return dataclasses.replace(
            self, ids=self.ids.pin_memory(), images=self.images.pin_memory(), labels=self.labels.pin_memory()
        )


@dataclass(frozen=True)
class Arrays:
    """A batch that goes through a pipe: as arrays, since torch sends tensors through shared memory."""

    step: int
    ids: I64
    images: U8
    labels: I64
    error: str | None = None
    code: int = 0
    faults: tuple[str, ...] = ()
    skipped: int = 0

    def tensors(self) -> Batch:
        """Return the same batch as tensors, without a copy."""
        ids, images, labels = (torch.from_numpy(array) for array in (self.ids, self.images, self.labels))
        return Batch(self.step, ids, images, labels, self.error, self.code, self.faults, self.skipped)


class Steps(Dataset[Any]):
    """Map a step to its batch; runs in the training process and in loader processes alike."""

    def __init__(
        self, source: Source, *, shape: tuple[int, int, int], size: int, world: int, skip_bad: bool = False
    ) -> None:
        self.source, self.shape, self.skip_bad = source, shape, skip_bad
        self.size, self.world = size, world  # most samples in a batch, number of ranks
        self.piped = False

    def ids(self, step: int) -> I64:
        """Return the ids of the step's samples."""
        raise NotImplementedError

    def read(self, step: int, ids: I64) -> Arrays:
        """Return the step's batch, or raise DataError."""
        raise NotImplementedError

    def _at_once(self, step: int, ids: I64, seeds: U64 | None) -> Arrays:
        return Arrays(step, ids, *self.source.fetch(ids, seeds=seeds))

    def failed(self, step: int, error: str, *, code: int = DATA) -> Arrays:
        """Return what stands for a batch that is not to be had, for a reason with this exit code."""
        ids = self.ids(step)
        return Arrays(step, ids, np.zeros((len(ids), *self.shape), np.uint8), np.zeros(len(ids), np.int64), error, code)

    def arrays(self, step: int) -> Arrays:
        """Return the batch of a step, with its error where its data cannot be used."""
        ids = self.ids(step)
        try:
            return self.read(step, ids)
        except BadSample as error:
            return self.failed(step, f"{error}; mend or remove it, or add --bad-samples skip")
        except DataError as error:
            return self.failed(step, str(error))

    def __getitem__(self, step: int) -> Batch | Arrays:
        """Return the batch of a step, in the form in which it leaves a loader process."""
        arrays = self.arrays(step)
        return arrays if self.piped else arrays.tensors()


class TrainSteps(Steps):
    """Make one rank's part of each training step."""

    def __init__(
        self, dataset: DataSet, *, seed: int, global_batch: int, rank: int, world: int, skip_bad: bool = False
    ) -> None:
        size = -(-global_batch // world)
        super().__init__(dataset.train, shape=dataset.shape, size=size, world=world, skip_bad=skip_bad)
        self.seed, self.shift, self.flip = seed, dataset.shift, dataset.flip
        self.in_memory = dataset.in_memory
        self.positions = partial(rank_positions, global_batch=global_batch, rank=rank, world=world)

    def ids(self, step: int) -> I64:
        """Return the ids of the rank's stream positions."""
        return order(self.seed, n=len(self.source), positions=self.positions(step))

    def read(self, step: int, ids: I64) -> Arrays:
        """Read and augment; with `skip_bad` a sample that cannot be read is replaced by the next good one."""
        positions = self.positions(step)
        seeds = None if self.in_memory else draws(self.seed, positions=positions, count=1)[:, 0]
        whole = not self.skip_bad
        batch = self._at_once(step, ids, seeds) if whole else _read_good(self, step, seeds=seeds, replace=True)
        images = shift_pictures(batch.images, seed=self.seed, positions=positions, shift=self.shift)
        if self.flip:
            images = flip_pictures(images, seed=self.seed, positions=positions)
        return dataclasses.replace(batch, images=images)


class EvalSteps(Steps):
    """Make one rank's part of each batch of an evaluation."""

    def __init__(self, dataset: DataSet, *, batch_size: int, rank: int, world: int, skip_bad: bool = False) -> None:
        super().__init__(dataset.test, shape=dataset.shape, size=batch_size, world=world, skip_bad=skip_bad)
        self.rank = rank

    def __len__(self) -> int:
        """Return the number of batches: that of rank 0, which has the most samples."""
        return -(-len(self.source) // (self.world * self.size))

    def ids(self, step: int) -> I64:
        """Return every world-th id from the rank's on; none where the others have one sample more."""
        first, stop = (self.rank + number * self.size * self.world for number in (step, step + 1))
        return np.arange(first, min(stop, len(self.source)), self.world, dtype=np.int64)

    def read(self, step: int, ids: I64) -> Arrays:
        """Read; with `skip_bad` a sample that cannot be read is left out, since another in its place would count twice."""
        if self.skip_bad:
            return _read_good(self, step, seeds=None, replace=False)
        return self._at_once(step, ids, None)


#: So many bad samples one after the other are no bad luck.
MOST_TRIES = 100
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it are spread evenly


def _read_good(steps: Steps, step: int, *, seeds: U64 | None, replace: bool) -> Arrays:
    """Read a step's samples one by one; a bad one's place is taken by another, or by none.

    What stands in for a sample is a function of its number and of the data alone, so that every rank and worker would take the
    same; it gets the random draws of the place that it takes. Candidates are far apart, since what fails together lies together.
    """
    size = len(steps.source)
    stride = next(number for number in range(int(size * GOLDEN) or 1, 2 * size) if math.gcd(number, size) == 1)
    ids = steps.ids(step)
    images, labels = np.empty((len(ids), *steps.shape), np.uint8), np.empty(len(ids), np.int64)
    found: list[int] = []
    faults: list[str] = []
    skipped = 0
    for row, first in enumerate(ids.tolist()):
        seed = None if seeds is None else seeds[row : row + 1]
        numbers = [(first + further * stride) % size for further in range(min(MOST_TRIES, size) if replace else 1)]
        sample = _first_good(steps.source, numbers, seed=seed, faults=faults)
        skipped += sample is None or sample[0] != first
        if sample is not None:
            images[len(found)], labels[len(found)] = sample[1][0], sample[2][0]
            found.append(sample[0])
        elif replace:
            raise DataError(f"{len(numbers)} samples in a row cannot be read: too many to skip; the last: {faults[-1]}")
    good = len(found)
    return Arrays(step, np.array(found, np.int64), images[:good], labels[:good], faults=tuple(faults), skipped=skipped)


def _first_good(
    source: Source, numbers: list[int], *, seed: U64 | None, faults: list[str]
) -> tuple[int, U8, I64] | None:
    for number in numbers:
        try:
            return number, *source.fetch(np.array([number], np.int64), seeds=seed)
        except BadSample as error:
            faults.append(str(error))
    return None
