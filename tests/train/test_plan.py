"""What happens at which step."""

from __future__ import annotations

import math

import pytest

from trainer.codes import SettingError
from trainer.config import build
from trainer.train.plan import make_plan


def plan(*, samples=1000, world=1, **settings):
    return make_plan(build(settings), samples=samples, world=world)


def test_an_epoch_ends_at_the_step_that_uses_its_last_sample():
    found = plan(samples=100, epochs=3.0, global_batch_size=29)
    assert found.steps == math.ceil(300 / 29) == 11
    assert [step for step in range(1, 12) if found.evaluates_after(step)] == [4, 7, 11]


def test_an_epoch_smaller_than_a_batch_is_evaluated_once_per_step():
    found = plan(samples=5, steps=4, global_batch_size=12)
    assert [step for step in range(1, 5) if found.evaluates_after(step)] == [1, 2, 3, 4]


def test_eval_every_replaces_the_epochs_and_the_last_step_is_always_evaluated():
    found = plan(samples=100, steps=11, global_batch_size=50, eval_every=4)
    assert [step for step in range(1, 12) if found.evaluates_after(step)] == [4, 8, 11]


def test_checkpoints_and_log_lines_follow_their_intervals_and_the_end():
    found = plan(steps=10, checkpoint_every=4, log_every=3)
    assert [step for step in range(1, 11) if found.saves_after(step)] == [4, 8, 10]
    assert [step for step in range(1, 11) if found.logs_after(step)] == [3, 6, 9, 10]
    assert [step for step in range(1, 11) if plan(steps=10, checkpoint_every=0).saves_after(step)] == [10]


def test_steps_are_taken_before_epochs_and_warmup_is_a_part_of_them():
    found = plan(samples=1000, steps=40, epochs=100.0, warmup=0.1)
    assert (found.steps, found.warmup_steps) == (40, 4)
    assert found.epochs == pytest.approx(40 * 256 / 1000)


@pytest.mark.parametrize(
    ("batch", "world", "device_batch", "micro", "smallest"),
    [
        (256, 1, None, 1, 256),
        (256, 2, 64, 2, 64),
        (29, 2, 4, 4, 3),  # 15 and 14 samples in 4 parts: 3 is the least
        (29, 3, 10, 1, 9),
        (7, 3, 1, 3, 1),  # 3, 2 and 2 samples, one at a time
    ],
)
def test_every_rank_has_the_same_number_of_micro_batches(batch, world, device_batch, micro, smallest):
    found = plan(world=world, global_batch_size=batch, device_batch_size=device_batch)
    assert (found.micro_batches, found.smallest) == (micro, smallest)


def test_a_global_batch_smaller_than_the_ranks_is_refused_with_both_numbers():
    with pytest.raises(SettingError, match=r"--global-batch-size is 3, but there are 4 ranks"):
        plan(world=4, global_batch_size=3)
