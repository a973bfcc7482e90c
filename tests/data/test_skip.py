"""A sample that cannot be read: the next good one takes its place in training, whoever reads it; in evaluation it is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from trainer import data, log
from trainer.data import loader
from trainer.data.order import draws, order, rank_positions
from trainer.data.sets import I64, U8, U64, BadSample

SHAPE = (1, 2, 2)
STEPS, BATCH, COUNT = 9, 7, 23


class Files:
    """Samples of which some cannot be read; a picture holds its number and its random draw."""

    def __init__(self, bad: set[int], count: int = COUNT) -> None:
        self.bad, self.count = bad, count

    def __len__(self) -> int:
        return self.count

    def fetch(self, ids: I64, *, seeds: U64 | None = None) -> tuple[U8, I64]:
        images = np.zeros((len(ids), *SHAPE), np.uint8)
        for row, number in enumerate(ids.tolist()):
            if number in self.bad:
                raise BadSample(f"file {number} is cut")
            images[row, 0, 0] = number, 0 if seeds is None else seeds[row] % 256
        return images, ids % 5


def make(bad: set[int], **changes: Any) -> data.DataSet:
    files = Files(bad, **changes)
    return data.DataSet("own", files, files, 5, SHAPE, (0.5,), (0.25,), shift=0, fingerprint="", in_memory=False)


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    log.setup("text")
    loader._warn_once.cache_clear()
    yield
    loader._warn_once.cache_clear()


def received(bad: set[int], *, world: int, workers: int, **changes: Any) -> list[tuple[int, ...]]:
    """What the model would receive: (step, sample, picture, label) in the order of the stream, and how many were skipped."""
    rows, skipped = [], 0
    for rank in range(world):
        options = {"seed": 3, "global_batch": BATCH, "rank": rank, "world": world, "start": 0, "steps": STEPS}
        with data.train_batches(make(bad, **changes), **options, workers=workers, pin=False, skip_bad=True) as batches:
            for batch in batches:
                assert batch.error is None
                skipped += batch.skipped
                positions = rank_positions(batch.step, global_batch=BATCH, rank=rank, world=world).tolist()
                pictures = [image.flatten().tolist() for image in batch.images]
                rows += zip(positions, batch.ids.tolist(), map(tuple, pictures), batch.labels.tolist(), strict=True)
    return [*sorted(rows), (skipped,)]


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (2, 2), (3, 0), (3, 2)])
def test_ranks_and_workers_do_not_change_what_stands_in(world: int, workers: int) -> None:
    bad = {4, 5, 22}
    reference = received(bad, world=1, workers=0)
    assert received(bad, world=world, workers=workers) == reference
    positions = np.arange(STEPS * BATCH)
    wanted = order(3, n=COUNT, positions=positions)
    stand_in = {4: 18, 5: 19, 22: 13}  # 14 further on: 23 x 0.618
    seeds = draws(3, positions=positions, count=1)[:, 0] % 256
    for (position, number, picture, label), first in zip(reference[:-1], wanted.tolist(), strict=True):
        assert number == stand_in.get(first, first)
        assert label == number % 5
        assert picture == (number, seeds[position], 0, 0)  # the draws are those of the place
    assert reference[-1] == (sum(number in bad for number in wanted.tolist()),)


def test_good_samples_are_the_same_with_and_without_skipping() -> None:
    options = {
        "seed": 3,
        "global_batch": BATCH,
        "rank": 0,
        "world": 1,
        "start": 0,
        "steps": STEPS,
        "workers": 0,
        "pin": False,
    }
    with (
        data.train_batches(make(set()), **options) as plain,
        data.train_batches(make(set()), **options, skip_bad=True) as skipping,
    ):
        for left, right in zip(plain, skipping, strict=True):
            assert left.ids.equal(right.ids)
            assert left.images.equal(right.images)
            assert left.labels.equal(right.labels)
            assert (right.skipped, right.faults) == (0, ())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_leaves_bad_ones_out_and_counts_each_other_once(world: int, workers: int) -> None:
    bad, seen, skipped, lengths = {0, 3, 6, 7, 22}, [], 0, set()
    for rank in range(world):
        options = {"batch_size": 4, "rank": rank, "world": world, "workers": workers, "pin": False, "skip_bad": True}
        with data.test_batches(make(bad), **options) as batches:
            made = list(batches)
        lengths.add(len(made))
        skipped += sum(batch.skipped for batch in made)
        seen += [number for batch in made for number in batch.ids.tolist()]
        assert all(len(batch.ids) == len(batch.labels) == len(batch.images) for batch in made)
    assert sorted(seen) == sorted(set(range(COUNT)) - bad)
    assert skipped == len(bad)
    assert len(lengths) == 1


def test_without_skipping_the_batch_names_the_file() -> None:
    options = {
        "seed": 3,
        "global_batch": COUNT,
        "rank": 0,
        "world": 1,
        "start": 0,
        "steps": 1,
        "workers": 0,
        "pin": False,
    }
    with data.train_batches(make({4}), **options) as batches:
        assert next(iter(batches)).error == "file 4 is cut; mend or remove it, or add --bad-samples skip"


@pytest.mark.parametrize(("count", "tries"), [(9, 9), (500, 100)])
def test_nothing_good_in_reach_fails_the_batch(count: int, tries: int) -> None:
    options = {"seed": 3, "global_batch": 2, "rank": 0, "world": 1, "start": 0, "steps": 1, "workers": 0, "pin": False}
    with data.train_batches(make(set(range(count)), count=count), **options, skip_bad=True) as batches:
        error = next(iter(batches)).error
    assert error is not None
    assert f"{tries} samples in a row cannot be read: too many to skip; the last: file " in error


def test_each_bad_file_is_named_once_and_not_more_than_twenty(capsys: pytest.CaptureFixture[str]) -> None:
    received({1, 2}, world=1, workers=0)
    assert sorted(line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()) == [
        "warning file 1 is cut; passed over",
        "warning file 2 is cut; passed over",
    ]
    loader._warn_once.cache_clear()
    received(set(range(50)), world=1, workers=0, count=60)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == loader.MOST_TOLD + 1
    assert lines[-1].endswith("more samples cannot be read; they are counted, but not named")
