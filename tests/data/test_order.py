"""The order is a permutation per epoch, the same everywhere; ranks share it out; draws and shifts hang on the position alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from trainer import data
from trainer.data.augment import shift_pictures
from trainer.data.order import SHIFT

# Stored once. The stream of a seed must not change from version to version.
GOLDEN_ORDER = {
    1: "8568d6b117678d53",
    7: "34f353f3dbf4abe2",
    4096: "7a6b813dc2dc92dd",
    4097: "d6b18d75b17898a5",
    60000: "61ec9da0632bf89e",
}
GOLDEN_FIRST = [49061, 14326, 14955, 25979, 31588, 29025]
GOLDEN_DRAWS = "7b4ea4a3eac1c0f8"
GOLDEN_SHIFTED = "8b3b12b565ff1542"


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()[:16]


def epoch(number: int, *, n: int, seed: int = 0) -> np.ndarray:
    return data.order(seed, n=n, positions=np.arange(number * n, (number + 1) * n))


@pytest.mark.parametrize("n", [1, 2, 3, 10, 4095, 4096, 4097, 4225, 4226, 60_000, 65_537])
def test_each_epoch_uses_each_sample_once(n: int) -> None:
    for number in (0, 1, 1000):
        assert np.array_equal(np.sort(epoch(number, n=n)), np.arange(n))


@pytest.mark.parametrize("n", [4096, 4097])
def test_order_differs_per_epoch_and_per_seed_and_repeats(n: int) -> None:
    first = epoch(0, n=n)
    assert np.array_equal(first, epoch(0, n=n))
    for other in (epoch(1, n=n), epoch(0, n=n, seed=1), epoch(0, n=n, seed=2**63 - 1), np.arange(n)):
        assert np.mean(first == other) < 0.005  # chance: 1 in n


@pytest.mark.parametrize("n", [1, 3, 4096, 4097, 60_000])
def test_order_does_not_depend_on_how_the_positions_are_asked_for(n: int) -> None:
    whole = data.order(3, n=n, positions=np.arange(2 * n + 100))
    asked = np.array([2 * n + 99, 0, n, n - 1, n // 2])
    assert np.array_equal(data.order(3, n=n, positions=asked), whole[asked])


@pytest.mark.parametrize("n", [3, 4])
def test_small_orders_are_uniform(n: int) -> None:
    """Each of the n! permutations comes as often as chance has it, within 5 standard deviations."""
    epochs = 6000
    rows = data.order(0, n=n, positions=np.arange(epochs * n)).reshape(epochs, n)
    _, counts = np.unique(rows, axis=0, return_counts=True)
    expected = epochs / (6 if n == 3 else 24)
    assert len(counts) == round(epochs / expected)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_large_order_is_uniform() -> None:
    """Over 50 epochs every block of places draws on every block of samples alike: chi-squared with 19 x 19 degrees of freedom."""
    n, blocks, epochs = 5000, 20, 50
    counts = np.zeros((blocks, blocks))
    for number in range(epochs):
        np.add.at(counts, (np.arange(n) * blocks // n, epoch(number, n=n) * blocks // n), 1)
    expected = epochs * n / blocks**2
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert 361 - 5 * 27 < chi_squared < 361 + 5 * 27


def test_large_order_has_no_neighbours_left() -> None:
    steps = np.diff(epoch(0, n=60_000))
    assert np.mean(np.abs(steps) == 1) < 0.0005  # chance: 2 in n
    assert abs(np.corrcoef(epoch(0, n=60_000), np.arange(60_000))[0, 1]) < 0.02


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [1, 6, 100, 101, 102, 5000])
def test_ranks_are_disjoint_and_cover_the_stream(n: int, world: int) -> None:
    batch, steps = 101, 5
    used = []
    for step in range(steps):
        parts = [data.rank_positions(step, global_batch=batch, rank=rank, world=world) for rank in range(world)]
        assert {len(part) for part in parts} <= {batch // world, -(-batch // world)}
        used.append(np.sort(np.concatenate(parts)))
    assert np.array_equal(np.concatenate(used), np.arange(steps * batch))
    ids = data.order(0, n=n, positions=np.concatenate(used))
    complete = data.epochs_done(steps, n=n, global_batch=batch)
    for number in range(complete):
        assert np.array_equal(np.sort(ids[number * n : (number + 1) * n]), np.arange(n))


@pytest.mark.parametrize(
    ("epochs", "n", "batch", "steps"),
    [
        (4.0, 60_000, 256, 938),
        (1.0, 1, 256, 1),
        (0.7, 10, 1, 7),
        (0.1, 10, 1, 1),
        (1e-5, 10, 5, 1),
        (3.0, 7, 7, 3),
        (2.5, 7, 2, 9),
    ],
)
def test_steps_are_the_epochs_rounded_up(epochs: float, n: int, batch: int, steps: int) -> None:
    assert data.total_steps(epochs, n=n, global_batch=batch) == steps


@pytest.mark.parametrize(("n", "batch"), [(60_000, 256), (7, 2), (7, 7), (1, 3), (6, 7)])
def test_epochs_end_where_the_count_of_complete_ones_grows(n: int, batch: int) -> None:
    for number in range(1, 6):
        end = data.epoch_end(number, n=n, global_batch=batch)
        assert data.epochs_done(end, n=n, global_batch=batch) >= number
        assert data.epochs_done(end - 1, n=n, global_batch=batch) < number


def test_no_two_positions_share_draws() -> None:
    values = data.draws(5, positions=np.arange(20_000), count=8)
    assert len(np.unique(values)) == values.size
    others = [
        data.draws(6, positions=np.arange(20_000), count=8),
        data.draws(5, positions=np.arange(20_000), count=8, purpose=1),
    ]
    assert not np.intersect1d(values, np.concatenate(others)).size


def test_draws_hang_on_seed_and_position_alone() -> None:
    values = data.draws(5, positions=np.arange(100), count=3)
    assert np.array_equal(data.draws(5, positions=np.array([70, 3]), count=3), values[[70, 3]])
    assert np.array_equal(data.draws(5, positions=np.arange(100), count=1), values[:, :1])


def test_draws_are_even_in_every_byte() -> None:
    octets = data.draws(0, positions=np.arange(4000), count=4).view(np.uint8).reshape(-1, 8)
    for column in octets.T:
        counts = np.bincount(column, minlength=256)
        assert np.abs(counts - 62.5).max() < 6 * np.sqrt(62.5)


def test_golden_values() -> None:
    stream = np.arange(100_000)
    assert {n: digest(data.order(0, n=n, positions=stream)) for n in (1, 7, 4096, 4097, 60_000)} == GOLDEN_ORDER
    assert data.order(0, n=60_000, positions=np.arange(6)).tolist() == GOLDEN_FIRST
    assert digest(data.draws(2**63 - 1, positions=stream, count=3, purpose=9)) == GOLDEN_DRAWS
    pictures = np.arange(64 * 3 * 9 * 8, dtype=np.int64).reshape(64, 3, 9, 8) % 251
    shifted = shift_pictures(pictures.astype(np.uint8), seed=0, positions=np.arange(1000, 1064), shift=2)
    assert digest(shifted) == GOLDEN_SHIFTED


def test_shift_moves_by_the_position_s_draw_and_fills_with_zeros() -> None:
    shift, positions = 3, np.arange(400)
    pictures = np.random.default_rng(0).integers(1, 256, (400, 2, 6, 5), dtype=np.uint8)
    shifted = shift_pictures(pictures, seed=1, positions=positions, shift=shift)
    moves = set()
    for picture, got, draw in zip(
        pictures, shifted, data.draws(1, positions=positions, count=1, purpose=SHIFT)[:, 0], strict=True
    ):
        down, right = (int(part) - shift for part in divmod(int(draw) % 49, 7))
        wanted = np.zeros_like(picture)
        for row in range(6):
            for column in range(5):
                if 0 <= row + down < 6 and 0 <= column + right < 5:
                    wanted[:, row, column] = picture[:, row + down, column + right]
        assert np.array_equal(got, wanted)
        moves.add((down, right))
    assert len(moves) == 49


def test_no_shift_leaves_pictures_alone() -> None:
    pictures = np.ones((2, 1, 4, 4), np.uint8)
    assert np.array_equal(shift_pictures(pictures, seed=0, positions=np.arange(2), shift=0), pictures)
