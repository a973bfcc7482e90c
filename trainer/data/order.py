"""Which samples a step sees, and the random draws that go with them: pure functions of (seed, stream position).

Position `i` of the stream is place `i mod n` of epoch `i div n`; step `s` takes the positions `[s*B, (s+1)*B)`, B being the
global batch. No state, no generator of numpy or torch (their streams may change with the version): only integer arithmetic.
Reading samples and drawing pictures live elsewhere.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

#: Up to this many samples an epoch is shuffled by a sort; a Feistel network this small is not uniform enough.
SORTED_UP_TO = 4096
ROUNDS = 6

#: Purposes of the draws, so that no two uses of a seed share one. 0 is free for callers.
SHIFT, GLYPH, RANDOM, FLIP = 1, 2, 3, 4
_ORDER = 2**32

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: U64) -> U64:
    """Map 64-bit numbers one to one onto random-looking ones (the output function of SplitMix64; Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(seed: int, purpose: int, numbers: I64) -> U64:
    """Hash (seed, purpose, number) for each number; for one seed and purpose, different numbers never meet."""
    state = np.zeros(1, np.uint64)
    for part in (np.array([seed], np.uint64), np.array([purpose], np.uint64), numbers.astype(np.uint64)):
        state = _mix(state + _STEP + part)
    return state


def draws(seed: int, *, positions: I64, count: int, purpose: int = 0) -> U64:
    """Draw `count` independent 64-bit numbers for each stream position.

    Returns:
        [len(positions), count], a function of (seed, purpose, position) alone.
    """
    steps = _STEP * np.arange(1, count + 1, dtype=np.uint64)
    return _mix(_hash(seed, purpose, positions)[:, None] + steps)


def order(seed: int, *, n: int, positions: I64) -> I64:
    """Return the sample id, 0 to n-1, at each stream position.

    Every epoch is a permutation of its own. Costs O(len(positions)) time and memory, O(n) where n <= 4096.
    """
    epochs, places = np.divmod(positions, n)
    if n <= SORTED_UP_TO:
        return _by_sort(seed, n=n, epochs=epochs, places=places)
    return _by_feistel(_hash(seed, _ORDER, epochs), n=n, places=places)


def _by_sort(seed: int, *, n: int, epochs: I64, places: I64) -> I64:
    distinct, row = np.unique(epochs, return_inverse=True)
    keys = draws(seed, positions=distinct, count=n, purpose=_ORDER)
    return np.argsort(keys, axis=1, kind="stable")[row, places].astype(np.int64)


def _by_feistel(keys: U64, *, n: int, places: I64) -> I64:
    """Permute 0..n-1 under one key per place: walk along the cycle of a permutation of 0..side^2-1 until back below n.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), method 3, with both halves of one size; side^2 is
    so near n that fewer than 2 places in side take a second turn.
    """
    side = np.uint64(math.isqrt(n - 1) + 1)
    values = _rounds(keys, side=side, values=places.astype(np.uint64))
    while (outside := np.flatnonzero(values >= n)).size:
        values[outside] = _rounds(keys[outside], side=side, values=values[outside])
    return values.astype(np.int64)


def _rounds(keys: U64, *, side: np.uint64, values: U64) -> U64:
    left, right = np.divmod(values, side)
    for _ in range(ROUNDS):
        keys = keys + _STEP
        left, right = right, (left + _mix(keys ^ right) % side) % side
    return left * side + right


def rank_positions(step: int, *, global_batch: int, rank: int, world: int) -> I64:
    """Return the stream positions of one rank in one step: every world-th of the step's, from `rank` on."""
    return np.arange(step * global_batch + rank, (step + 1) * global_batch, world, dtype=np.int64)


def total_steps(epochs: float, *, n: int, global_batch: int) -> int:
    """Return ceil(epochs x n / B), with `epochs` taken as the decimal that a person wrote (0.7 x 10 is 7)."""
    return math.ceil(Fraction(repr(epochs)) * n / global_batch)


def epoch_end(epoch: int, *, n: int, global_batch: int) -> int:
    """Return how many steps it takes until `epoch` epochs are complete: ceil(epoch x n / B)."""
    return -(-epoch * n // global_batch)


def epochs_done(steps: int, *, n: int, global_batch: int) -> int:
    """Return how many epochs are complete after `steps` steps; an evaluation is due where this number has grown."""
    return steps * global_batch // n
