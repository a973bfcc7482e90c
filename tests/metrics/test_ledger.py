"""Time is charged to exactly one account: the accounts add up to what has passed, over steps, pauses and restarts."""

from __future__ import annotations

from collections import Counter

import pytest

from trainer.metrics.ledger import Goodput, Ledger


@pytest.mark.parametrize(
    ("parts", "shares"),
    [
        ({}, {"rest": 4.0}),
        ({"a": 1.0}, {"a": 1.0, "rest": 3.0}),
        ({"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 3.0, "rest": 0.0}),
        ({"a": 4.0, "b": 12.0}, {"a": 1.0, "b": 3.0, "rest": 0.0}),
        ({"a": 0.0}, {"a": 0.0, "rest": 4.0}),
    ],
)
def test_parts_and_rest_add_up_to_the_time_that_has_passed(parts, shares):
    assert Ledger(now=10.0).charge("rest", now=14.0, parts=parts) == pytest.approx(shares)


def test_clock_that_stands_still_or_goes_back_charges_nothing():
    ledger = Ledger(now=10.0)
    assert ledger.charge("rest", now=9.0, parts={"a": 5.0}) == {"a": 0.0, "rest": 0.0}
    assert ledger.charge("rest", now=10.5) == {"rest": 0.5}


def run_of(goodput: Goodput, events: list[tuple]) -> Counter[str]:
    """Play events (method, its arguments); return the seconds of each state, without those of 0."""
    seconds: Counter[str] = Counter(down=goodput.down)
    for name, first, arguments in events:
        seconds.update(getattr(goodput, name)(first, **arguments))
    return Counter({state: total for state, total in seconds.items() if total})


FIRST_START = [
    ("charge", "startup", {"now": 103.0}),
    ("charge", "restore", {"now": 104.0}),
    ("step", 1, {"now": 110.0, "data_wait": 1.0}),
    ("step", 2, {"now": 112.0, "data_wait": 0.5}),
    ("pause", "eval", {"now": 116.0, "seconds": 3.0}),
    ("step", 3, {"now": 118.0, "data_wait": 0.0}),
    ("pause", "checkpoint", {"now": 119.0, "seconds": 1.0}),
]


def test_first_start_ends_with_its_first_step():
    seconds = run_of(Goodput(since=100.0), FIRST_START)
    assert seconds == {
        "startup": 9.0,
        "restore": 1.0,
        "productive": 1.5 + 1.0 + 2.0,
        "data_wait": 0.5,
        "eval": 3.0,
        "checkpoint": 1.0,
    }
    assert seconds.total() == 19.0


def test_restart_tells_what_was_down_and_what_was_done_before():
    again = Goodput(since=130.0, until=119.0, highest=3)
    seconds = run_of(
        again,
        [
            ("charge", "restore", {"now": 132.0}),
            ("step", 2, {"now": 134.0, "data_wait": 1.0}),
            ("step", 3, {"now": 136.0, "data_wait": 1.0}),
            ("pause", "eval", {"now": 137.0, "seconds": 0.75}),
            ("step", 4, {"now": 139.0, "data_wait": 0.5}),
        ],
    )
    assert seconds == {
        "down": 11.0,
        "restore": 2.0,
        "startup": 2.0,
        "replay": 2.25,
        "eval": 0.75,
        "productive": 1.5,
        "data_wait": 0.5,
    }
    assert seconds.total() == 139.0 - 119.0
    assert again.highest == 4
