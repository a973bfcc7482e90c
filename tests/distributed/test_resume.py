"""A run that was stopped and resumed equals one that was not."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from tests.distributed.conftest import rank_pid

COMMON = ("--log-format", "json", "--log-every", "1", "--limit-test", "100", "--limit-train", "6000")
MODEL = ("--steps", "40", "--global-batch-size", "250", "--dropout", "0.2")


def stop_after(process, step: int, *, rank: int) -> None:
    """Send SIGTERM to one rank's process alone, once `step` steps are done."""
    for line in process.stdout:
        if line.startswith("{") and json.loads(line).get("step", 0) >= step and "learning_rate" in line:
            os.kill(rank_pid(process.pid, rank), signal.SIGTERM)
            return
    raise AssertionError(f"the run ended before step {step}: {process.stderr.read()}")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("ranks", "options"), [(1, ()), (2, ()), (3, ("--deterministic",))], ids=["1", "2", "3-deterministic"]
)
def test_resume_is_bit_exact(ranks, options, optimizer, new_job):
    lr = "0.1" if optimizer == "sgd" else "0.002"
    args = (*COMMON, *MODEL, *options, "--nproc-per-node", str(ranks), "--optimizer", optimizer, "--lr", lr)
    whole = new_job("whole").run(*args)
    assert whole.code == 0, whole.err

    job = new_job("parts")
    process = job.start(*args, "--workers", "0")
    stop_after(process, 5, rank=ranks - 1)
    first = job.outcome(process)
    assert first.code == 143, first.err
    (stopped_at,) = [int(path.name.removeprefix("step-")) for path in (first.run / "checkpoints").iterdir()]
    assert 5 <= stopped_at < 40

    second = job.run(*args, "--workers", "2")
    assert second.code == 0, second.err
    for name, value in whole.tensors(40).items():
        assert torch.equal(second.tensors(40)[name], value), name
    rates = {line["step"]: line["learning_rate"] for line in whole.lines()}
    assert {line["step"]: line["learning_rate"] for line in second.lines()} == {
        step: rate for step, rate in rates.items() if step > stopped_at
    }
    assert second.received == whole.received
    assert second.summary["weights_sha256"] == whole.summary["weights_sha256"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_with_another_number_of_ranks_sees_the_same_samples(ranks, new_job):
    args = (*COMMON, "--steps", "20", "--global-batch-size", "250", "--norm", "group")
    whole = new_job("whole").run(*args, "--nproc-per-node", "2")
    assert whole.code == 0, whole.err

    job = new_job("parts")
    process = job.start(*args, "--nproc-per-node", "2")
    stop_after(process, 3, rank=1)
    assert job.outcome(process).code == 143
    second = job.run(*args, "--nproc-per-node", str(ranks))
    assert second.code == 0, second.err
    assert second.received == whole.received
    assert second.summary["final_loss"] == pytest.approx(whole.summary["final_loss"], rel=1e-4)
