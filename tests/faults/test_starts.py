"""Controllers that never count: the same command again and again, by somebody who does not know when to give up."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from tests.distributed.conftest import Job, Outcome

FIXED = (
    "--log-format", "json", "--log-every", "1", "--workers", "0", "--limit-train", "64", "--limit-test", "20",
    "--global-batch-size", "8", "--steps", "40", "--eval-every", "1000", "--checkpoint-every", "10",
    "--model", "dies:build", "--lr", "0.01",
)  # fmt: skip

#: A model that sends its rank a signal at a step of each start, both named by variables.
DIES = """
import os, pathlib, signal, time
import torch

class Dies(torch.nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(inputs, classes), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == int(os.environ["TRAINER_TEST_AT"]) and self.training:
            for _ in range(600):  # a save goes on beside the steps
                if self.calls < 10 or pathlib.Path("runs/job/checkpoints/step-00000010").exists():
                    break
                time.sleep(0.05)
            os.kill(os.getpid(), getattr(signal, os.environ["TRAINER_TEST_SIGNAL"]))
        return self.layer(x.flatten(1))

def build(config, *, classes, shape):
    return Dies(shape[0] * shape[1] * shape[2], classes)
"""


@pytest.fixture
def dying(job: Job) -> Job:
    (job.folder / "dies.py").write_text(DIES)
    return job


def start(job: Job, *args: str, at: int, by: str = "SIGKILL") -> Outcome:
    """Start the run; at its step `at`, counted from this start, its rank gets a signal."""
    job.env |= {"TRAINER_TEST_AT": str(at), "TRAINER_TEST_SIGNAL": by}
    return job.run(*FIXED, "--max-restarts", "0", *args)


def starts(job: Job, count: int, *, at: int) -> list[int]:
    """Start the run so often and return the exit codes."""
    return [start(job, at=at).code for _ in range(count)]


def why_it_gave_up(ended: Outcome) -> str:
    """Return the line with which a start gave up, before its first step."""
    assert (ended.code, ended.lines()) == (5, [])
    (line,) = [json.loads(line)["message"] for line in ended.err.splitlines()]
    return line


def test_the_sixth_start_without_a_checkpoint_gives_up(dying: Job) -> None:
    assert starts(dying, 5, at=3) == [137] * 5
    line = why_it_gave_up(start(dying, at=3))
    assert re.match(r"5 starts of runs/job have ended at step 0 without a new checkpoint, .*--max-starts", line)
    assert starts(dying, 1, at=3) == [5]  # and so does each after it


def test_five_preemptions_before_the_first_checkpoint_do_not_count(dying: Job) -> None:
    for _ in range(5):
        assert start(dying, at=3, by="SIGTERM").code == 143
        # What a stop saves would be progress; here it is lost, as with a pod's own disk.
        shutil.rmtree(dying.folder / "runs" / "job" / "checkpoints")
    assert starts(dying, 5, at=3) == [137] * 5
    assert starts(dying, 1, at=3) == [5]


def test_a_newer_checkpoint_begins_the_count_anew(dying: Job) -> None:
    assert starts(dying, 4, at=3) == [137] * 4
    assert starts(dying, 1, at=15) == [137]  # after the checkpoint of step 10
    assert dying.saved_steps() == [10]
    assert starts(dying, 5, at=3) == [137] * 5
    assert "ended at step 10 without a new checkpoint" in why_it_gave_up(start(dying, at=3))
    assert start(dying, "--max-starts", "6", at=1000).code == 0


def test_the_agents_own_restarts_count(dying: Job) -> None:
    dying.env |= {"TRAINER_TEST_AT": "3", "TRAINER_TEST_SIGNAL": "SIGKILL"}
    ended = dying.run(*FIXED, "--max-restarts", "9")
    assert ended.code == 5
    restarts = [json.loads(line)["message"] for line in ended.err.splitlines() if "restart " in line]
    assert [line.split(":")[0] for line in restarts] == [f"restart {number} of 9" for number in range(1, 6)]
