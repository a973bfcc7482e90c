"""One run with two, then one, then three ranks: order and augmentation are the unbroken run's, and so is the loss, but for rounding."""

from __future__ import annotations

import os
import signal

import pytest

from tests.distributed.conftest import NewJob, rank_pid, reach

STEPS = 45
FIXED = (
    "--log-format", "json", "--log-every", "1", "--limit-train", "6000", "--limit-test", "100", "--norm", "group",
    "--global-batch-size", "250", "--checkpoint-every", "0", "--eval-every", "1000000", "--steps", str(STEPS),
)  # fmt: skip


def test_a_run_goes_on_with_other_numbers_of_ranks(new_job: NewJob) -> None:
    whole = new_job("whole").run(*FIXED, "--nproc-per-node", "2")
    assert whole.code == 0, whole.err
    job = new_job("parts")
    for ranks, stop_after in ((2, 10), (1, 25)):
        process = job.start(*FIXED, "--nproc-per-node", str(ranks))
        reach(process, stop_after)
        os.kill(rank_pid(process.pid, ranks - 1), signal.SIGTERM)
        ended = job.outcome(process)
        assert ended.code == 143, ended.err
        assert stop_after <= job.saved_steps()[-1] < STEPS
    last = job.run(*FIXED, "--nproc-per-node", "3")
    assert last.code == 0, last.err
    assert last.summary["topology"]["ranks"] == 3
    assert last.received == whole.received
    assert last.summary["final_loss"] == pytest.approx(whole.summary["final_loss"], rel=1e-4)
    assert last.summary["evaluation"]["loss"] == pytest.approx(whole.summary["evaluation"]["loss"], rel=1e-4)
