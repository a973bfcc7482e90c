"""Stop signals: to whom they are sent, and what the run was doing: the code, one joint step, nobody left, and the same result after it.

Stops at the start, in the rendezvous and in training are in ../distributed/test_ends.py too, without a resume.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed.conftest import Job, NewJob, Outcome, rank_pid, reach, wait_until
from trainer import checkpoint

STEPS = 24
FIXED = (
    "--dataset", "phases:load", "--model", "phases:build", "--lr", "0.01", "--global-batch-size", "10", "--nproc-per-node", "2",
    "--log-format", "json", "--log-every", "1", "--eval-every", "8", "--checkpoint-every", "5", "--keep", "9",
    "--eval-batch-size", "5", "--steps", str(STEPS), "--max-restarts", "0", "--grace", "16",
)  # fmt: skip

#: Data and a model that take their time in one phase, which a variable names, and say in a file that they are in it.
PHASES = """
import os, pathlib, time
import torch

PHASE = os.environ.get("TRAINER_TEST_PHASE")

def rest(phase, seconds):
    if PHASE == phase:
        pathlib.Path("in-" + phase).touch()
        time.sleep(seconds)

rest("start-up", 0.5)

class Numbers(torch.utils.data.Dataset):
    classes = 3

    def __init__(self, split, count):
        self.split, self.count = split, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.split == "train" and index == 77:
            rest("stuck", 600)
        return torch.full((1, 8, 8), index, dtype=torch.uint8), index % 3

def load(split, config):
    return Numbers(split, 100 if split == "train" else 60)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 3)
        # Makes a checkpoint of 12 MB, whose saving takes a while.
        self.register_buffer("ballast", torch.zeros(3_000_000))

    def forward(self, pictures):
        if not self.training:
            rest("eval", 0.1)
        return self.layer(pictures.flatten(1))

def build(config, *, classes, shape):
    return Model()
"""


def make(job: Job, phase: str = "") -> Job:
    (job.folder / "phases.py").write_text(PHASES)
    job.env |= {"PYTHONPATH": f"{job.env['PYTHONPATH']}:{job.folder}", "TRAINER_TEST_PHASE": phase}
    return job


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, job_env: dict[str, str]) -> Outcome:
    job = make(Job(tmp_path_factory.mktemp("unbroken") / "job", job_env))
    outcome = job.run(*FIXED)
    assert outcome.code == 0, outcome.err
    return outcome


def wait_for(phase: str, job: Job, process: subprocess.Popen[str]) -> None:
    """Wait until the run is in a phase."""
    if phase == "train":
        reach(process, 3)
    elif phase == "save":
        wait_until(lambda: list(job.folder.glob("runs/job/checkpoints/.tmp-save-*")))
    else:
        wait_until(lambda: (job.folder / f"in-{phase}").exists())
    if phase == "stuck":
        # The loader process is ahead of its rank, which waits for it only when it has done the steps before.
        traces, seen = [job.folder / "trace" / f"rank-{rank}.csv" for rank in (0, 1)], [-1, -1]
        while seen != (seen := [last_step(trace) for trace in traces]):
            time.sleep(2)


def send(signum: signal.Signals, whom: str, process: subprocess.Popen[str]) -> None:
    if whom == "group":
        os.killpg(process.pid, signum)
    else:
        os.kill(process.pid if whom == "agent" else rank_pid(process.pid, int(whom[-1])), signum)


WHOM = {
    "rank 0": (signal.SIGTERM, "rank 0", 1),
    "rank 1": (signal.SIGTERM, "rank 1", 1),
    "agent": (signal.SIGINT, "agent", 1),
    "group": (signal.SIGTERM, "group", 1),
    "agent, twice": (signal.SIGTERM, "agent", 2),
}


@pytest.mark.parametrize("phase", ["start-up", "train", "eval", "save", "stuck"])
@pytest.mark.parametrize("name", WHOM)
def test_a_stop_in_any_phase_is_one_joint_step_and_the_run_goes_on_from_it(
    phase: str, name: str, unbroken: Outcome, new_job: NewJob
) -> None:
    job = make(new_job(), phase)
    signum, whom, times = WHOM[name]
    workers = ("--workers", "1" if phase == "stuck" else "0")
    process = job.start(*FIXED, *workers)
    wait_for(phase, job, process)
    for _ in range(times):
        send(signum, whom, process)
    ended = job.outcome(process)
    wait_until(lambda: not job.left(), seconds=5)
    assert ended.code == 128 + signum, ended.err
    check_what_is_saved(phase, job, ended)
    job.env["TRAINER_TEST_PHASE"] = ""
    resumed = job.run(*FIXED, "--workers", "0")
    assert resumed.code == 0, resumed.err
    saved = job.saved_steps()
    assert saved[-1] == STEPS
    assert resumed.summary["weights_sha256"] == unbroken.summary["weights_sha256"]


def check_what_is_saved(phase: str, job: Job, ended: Outcome) -> None:
    """Check that both ranks did the same last step, and that the newest checkpoint is of it."""
    saved, last = job.saved_steps(), [last_step(ended.trace / f"rank-{rank}.csv") for rank in (0, 1)]
    assert not list(ended.run.rglob(".tmp-*"))
    for path in checkpoint.find(ended.run / "checkpoints"):
        checkpoint.verify(path)
    if phase == "start-up":
        assert (saved, last) == ([], [0, 0])
        return
    if phase == "stuck":
        # The step whose data did not come is not saved; the checkpoints before it stay.
        assert "did not come after the stop signal" in ended.err
        assert [step for step in (5, 8, 10) if step < last[0]] == saved
        return
    assert ended.err == ""
    assert last == [saved[-1]] * 2
    if phase == "eval":
        assert saved[-1] == 8


def last_step(trace: Path) -> int:
    """Return how many steps a rank did, by what its model received."""
    lines = trace.read_text().splitlines() if trace.exists() else []
    return 1 + int(lines[-1].split(",")[0]) if lines else 0
