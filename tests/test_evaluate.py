"""The score of a model: every sample once, whatever the number of ranks and of batches; what ends an evaluation early."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.test_group import values
from trainer.codes import DataError, Stopped
from trainer.data import Batch
from trainer.evaluate import Score, evaluate
from trainer.group import Group, alone

CPU = torch.device("cpu")
CLASSES = 7


class Table(nn.Module):
    """Answer sample `i` with row `i` of a table of logits; counts its calls."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows, self.calls = nn.Parameter(rows), 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert not self.training
        self.calls += 1
        return self.rows[ids]


def logits(samples: int, classes: int = CLASSES) -> torch.Tensor:
    return torch.randn(samples, classes, generator=torch.Generator().manual_seed(4))


def labels(samples: int, classes: int = CLASSES) -> torch.Tensor:
    return torch.arange(samples) * 3 % classes


@dataclass
class Given:
    """Batches of one rank: its samples, rank::world, `size` at a time; as many as rank 0 has."""

    samples: int
    size: int
    classes: int = CLASSES
    broken: int | None = None
    taken: int = 0

    def batches(self, rank: int, world: int) -> Iterator[Batch]:
        mine = torch.arange(self.samples)[rank::world]
        truth = labels(self.samples, self.classes)
        for step in range(math.ceil(self.samples / (world * self.size))):
            ids = mine[step * self.size : (step + 1) * self.size]
            self.taken += 1
            error = "picture 5 cannot be read" if step == self.broken else None
            yield Batch(
                step, ids, torch.zeros(len(ids), 1, 1, 1, dtype=torch.uint8), truth[ids], error, 3 if error else 0
            )


def prepare(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.ids, batch.labels


def score(group: Group, given: Given, *, stop: Any = lambda: 0) -> Score:
    model = Table(logits(given.samples, given.classes))
    return evaluate(model, given.batches(group.rank, group.world), group=group, prepare=prepare, stop=stop)


def expected(samples: int, classes: int = CLASSES) -> Score:
    """By hand, from the definitions."""
    rows, truth = logits(samples, classes).double(), labels(samples, classes)
    losses = [float(torch.logsumexp(row, 0) - row[label]) for row, label in zip(rows, truth, strict=True)]
    places = [int((row > row[label]).sum()) for row, label in zip(rows, truth, strict=True)]
    right, right5 = (sum(place < best for place in places) / samples for best in (1, 5))
    return Score(loss=sum(losses) / samples, accuracy=right, top5=right5, samples=samples)


def assert_equal(got: Score, want: Score) -> None:
    assert got.samples == want.samples
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert (got.accuracy, got.top5) == (pytest.approx(want.accuracy), pytest.approx(want.top5))


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_one_process_scores_by_the_definitions(size: int) -> None:
    want = expected(7)
    assert 0 < want.accuracy < want.top5 < 1  # else the test would say little
    assert_equal(score(alone(CPU), Given(7, size)), want)


def _scores(group: Group) -> list[Score]:
    return [score(group, Given(samples, size)) for samples in (7, 1, 2, 12) for size in (1, 2, 5)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_counts_once_with_any_number_of_ranks(world: int) -> None:
    """Also where a rank's last batch is empty, or all that it has."""
    for scores in values(_scores, world=world):
        wanted = [expected(samples) for samples in (7, 1, 2, 12) for _ in range(3)]
        for got, want in zip(scores, wanted, strict=True):
            assert_equal(got, want)


def test_top_5_of_two_classes_counts_both() -> None:
    got = score(alone(CPU), Given(9, 4, classes=2))
    assert_equal(got, expected(9, classes=2))
    assert got.top5 == 1.0


def test_no_samples_are_no_error() -> None:
    assert score(alone(CPU), Given(0, 4)) == Score(loss=0.0, accuracy=0.0, top5=0.0, samples=0)


def test_the_model_trains_again_afterwards_and_has_no_gradients() -> None:
    model = Table(logits(7))
    evaluate(model, Given(7, 2).batches(0, 1), group=alone(CPU), prepare=prepare, stop=lambda: 0)
    assert model.training
    assert model.rows.grad is None


def test_a_loss_that_is_not_finite_is_a_score() -> None:
    """Evaluating a broken model says so; only training ends for it."""
    model = Table(torch.full((3, CLASSES), float("nan")))
    got = evaluate(model, Given(3, 2).batches(0, 1), group=alone(CPU), prepare=prepare, stop=lambda: 0)
    assert math.isnan(got.loss)
    assert got.samples == 3


def _stopped_early(group: Group) -> tuple[int, int]:
    """Stop on the last rank alone after its third batch; return the signal and how many batches were taken."""
    given = Given(1000, 2)
    asked = threading.Event()

    def stop() -> int:
        if given.taken == 3:
            asked.set()
        return 15 if asked.is_set() and group.rank == group.world - 1 else 0

    try:
        score(group, given, stop=stop)
    except Stopped as stopped:
        return stopped.signum, given.taken
    return 0, given.taken


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stop_of_one_rank_ends_the_evaluation_on_all_one_batch_later(world: int) -> None:
    assert values(_stopped_early, world=world) == [(15, 4)] * world


def _broken(group: Group) -> tuple[str, int, int]:
    given = Given(1000, 2, broken=2 if group.rank == group.world - 1 else None)
    try:
        score(group, given)
    except DataError as error:
        return str(error), given.taken, int(error.shared)
    return "", given.taken, 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_data_that_one_rank_cannot_read_end_the_evaluation_on_all_one_batch_later(world: int) -> None:
    others = "a rank could not read its data at step 3; its own line says which"
    *fine, failed = values(_broken, world=world)
    assert fine == [(others, 4, 1)] * (world - 1)
    assert failed == ("picture 5 cannot be read", 4, 1)


def test_the_rank_that_cannot_read_says_what_also_in_the_last_batch() -> None:
    with pytest.raises(DataError, match="^picture 5 cannot be read$"):
        score(alone(CPU), Given(20, 2, broken=9))


def test_every_part_of_the_model_is_left_in_the_mode_it_was_in() -> None:
    """Else a run that was resumed before an evaluation would train another way than the unbroken one."""
    frozen = torch.nn.BatchNorm2d(1).eval()
    model = torch.nn.Sequential(frozen, torch.nn.Dropout(), torch.nn.Flatten(), torch.nn.Linear(16, 3))
    batch = Batch(0, torch.zeros(2), torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64))
    for fails in (False, True):
        batch.error = "unreadable" if fails else None
        try:
            evaluate(model, iter([batch]), group=alone(CPU), prepare=lambda b: (b.images, b.labels), stop=lambda: 0)
        except DataError:
            assert fails
        assert [module.training for module in model.modules()] == [True, False, True, True, True]
