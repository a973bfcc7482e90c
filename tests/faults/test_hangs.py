"""Hangs of whole jobs: one rank waits, holds the interpreter or is stopped; what the job shows and how it ends. And what is no hang.

Which ranks an agent takes for hung is in ../agent/test_hangs.py, with small children in place of ranks; nodes are in test_peers.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence

import pytest

from tests.distributed.conftest import Job, rank_pid, reach, wait_until

HANG_SECONDS, COLLECTIVE_SECONDS = 3, 8
#: How long after its limit everything is over, at the latest.
LATER_SECONDS = 15
FIXED = (
    "--dataset", "slow:load", "--model", "slow:build", "--lr", "0.01", "--global-batch-size", "4", "--log-format", "json",
    "--log-every", "1", "--eval-every", "1000000", "--max-restarts", "0",
)  # fmt: skip
ENDLESS = (*FIXED, "--steps", "1000000", "--checkpoint-every", "0")
TWO = ("--nproc-per-node", "2")
LIMIT = ("--hang-timeout", str(HANG_SECONDS))
NO_WORKERS, ONE_WORKER = ("--workers", "0"), ("--workers", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer")

#: A model and data that do on one rank what a variable names, and leave word when they begin with it. Until the tenth step
#: a run has a limit that nobody can make small.
SLOW = """
import ctypes, os, pathlib, time
import torch

HOW = os.environ.get("TRAINER_TEST_HOW", "")

def sleeps_for_ever():
    pathlib.Path("begun").touch()
    time.sleep(600)

def holds_the_lock():
    pathlib.Path("begun").touch()
    mutex, native = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_lock(mutex)  # waits for itself, and no Python thread runs meanwhile

def sleeps_at_the_first_start():
    if not pathlib.Path("begun").exists():
        sleeps_for_ever()

def of(rank, how):
    return HOW == how and os.environ.get("RANK") == str(rank)

class Numbers(torch.utils.data.Dataset):
    classes = 3
    def __init__(self, count):
        self.count, self.read = count, 0
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        self.read += 1
        if self.read == 40 and of(1, "in a loader process"):
            sleeps_for_ever()
        return torch.full((1, 4, 4), index, dtype=torch.uint8), index % 3

def load(split, config):
    return Numbers(64 if split == "train" else 4)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(16, 3), 0
    def forward(self, pictures):
        self.calls += self.training
        time.sleep(0.03)
        if not self.training:
            time.sleep(7 if HOW == "slow" else 0)
        elif HOW == "slow":
            time.sleep(0.5 * max(0, self.calls - 11))
        elif HOW == "pauses":
            time.sleep(5 if self.calls == 14 else 0)
        elif self.calls == 13:
            time.sleep(1.5)  # so that whoever looks every second has seen that the first steps are over
        elif self.calls == 14:
            for rank, function in enumerate((sleeps_for_ever, holds_the_lock)):
                if of(rank, function.__name__):
                    function()
            if of(1, "at the first start"):
                sleeps_at_the_first_start()
        return self.layer(pictures.flatten(1))

def build(config, *, classes, shape):
    return Model()
"""


def make(job: Job, how: str = "") -> Job:
    (job.folder / "slow.py").write_text(SLOW)
    job.env |= {"PYTHONPATH": f"{job.env['PYTHONPATH']}:{job.folder}", "TRAINER_TEST_HOW": how}
    return job


def messages(err: str) -> list[str]:
    """Return the messages of the JSON lines; stacks are between them."""
    return [json.loads(line)["message"] for line in err.splitlines() if line.startswith("{")]


def since_hung(job: Job) -> float:
    """Return for how many seconds the model or the data have been stuck."""
    return time.time() - (job.folder / "begun").stat().st_mtime


def check_end(err: str, *, culprit: int, shows: str) -> None:
    """Check that a node's agent named the rank that hangs, and that each of two ranks showed its own stack, in order."""
    lines = messages(err)
    assert any(
        re.match(rf"rank {culprit} is hung: no sign of life for \d+ s in training, after step ", line) for line in lines
    )
    before, first, second = re.split(r".*stacks of rank \d, process \d+:.*\n", err)
    assert "File " not in before
    stacks = (first, second)
    assert all(re.search(r"loop.py\", line \d+ in fit", stack) for stack in stacks), err
    assert re.search(shows, stacks[culprit]), err
    assert not re.search(r"slow.py\", line \d+ in (sleeps|holds)", stacks[1 - culprit])


HANGS: dict[str, tuple[int, str, Sequence[str]]] = {
    "sleeps_for_ever": (0, "in sleeps_for_ever", NO_WORKERS),
    "holds_the_lock": (1, "in holds_the_lock", NO_WORKERS),
    "in a loader process": (1, r"loader.py\", line \d+ in __next__", ONE_WORKER),
}


@pytest.mark.parametrize("how", HANGS)
def test_a_rank_that_is_stuck_ends_the_job_with_the_stacks_of_all(how: str, job: Job) -> None:
    culprit, shows, options = HANGS[how]
    ended = make(job, how).run(*ENDLESS, *TWO, *LIMIT, *options)
    assert since_hung(job) < HANG_SECONDS + LATER_SECONDS
    assert ended.code == 170
    check_end(ended.err, culprit=culprit, shows=shows)
    assert not job.left()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_stopped_is_continued_to_show_its_stack(culprit: int, job: Job) -> None:
    process = make(job).start(*ENDLESS, *TWO, *LIMIT, *NO_WORKERS)
    reach(process, 14)
    os.kill(rank_pid(process.pid, culprit), signal.SIGSTOP)
    since = time.monotonic()
    ended = job.outcome(process)
    assert time.monotonic() - since < HANG_SECONDS + LATER_SECONDS
    assert ended.code == 170
    check_end(ended.err, culprit=culprit, shows="in fit")
    stopped = [line for line in messages(ended.err) if line.endswith("; it is stopped, by a signal")]
    assert [line[:6] for line in stopped] == [f"rank {culprit}"]
    assert not job.left()


@pytest.mark.parametrize("culprit", [0, 3])
def test_a_stopped_rank_ends_two_nodes_when_its_peers_have_waited_for_it(
    culprit: int, job: Job, free_port: int
) -> None:
    """Over several nodes the limit of a collective comes first. Rank 0 holds the ranks' store."""
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port), *TWO)
    options = (*ENDLESS, *NO_WORKERS, "--collective-seconds", str(COLLECTIVE_SECONDS), *where)
    nodes = [make(job).start(*options, "--node-rank", str(node)) for node in (0, 1)]
    reach(nodes[0], 3)
    os.kill(rank_pid(nodes[culprit // 2].pid, culprit), signal.SIGSTOP)
    since = time.monotonic()
    ends = [job.outcome(node) for node in nodes]
    assert time.monotonic() - since < COLLECTIVE_SECONDS + LATER_SECONDS
    assert [ended.code for ended in ends] == [170, 170]
    lost = [line for ended in ends for line in messages(ended.err) if line.startswith(f"lost rank {culprit} (on ")]
    assert len(lost) == 3  # every other rank says so
    stacks = ends[culprit // 2].err.partition(f"stacks of rank {culprit}, process ")[2]
    assert re.search(r"loop.py\", line \d+ in fit", stacks), ends[culprit // 2].err


def test_after_a_hang_the_ranks_go_on_from_the_newest_checkpoint(job: Job) -> None:
    options = (*FIXED, *TWO, *LIMIT, *NO_WORKERS, "--steps", "24", "--checkpoint-every", "5", "--max-restarts", "1")
    ended = make(job, "at the first start").run(*options)
    assert ended.code == 0, ended.err
    lines = messages(ended.err)
    assert re.fullmatch("restart 1 of 1: (rank 1|ranks 0, 1) hung", lines[-1])
    assert "resumed at step 10" in messages(ended.out)
    assert sorted({line["step"] for line in ended.lines()}) == list(range(1, 25))


SLOW_RUNS = {
    # Its last steps take up to 2.5 s and together more than the limit, as does the evaluation after them alone.
    "slow": ("--steps", "16", "--hang-timeout", "5", "--eval-every", "16"),
    # One takes a hundred times as long as any before, by which alone, ten times, it would be hung.
    "pauses": ("--steps", "16"),
}


@pytest.mark.parametrize("how", SLOW_RUNS)
def test_a_slow_run_that_moves_is_no_hang(how: str, job: Job) -> None:
    ended = make(job, how).run(*FIXED, *TWO, *NO_WORKERS, "--checkpoint-every", "0", *SLOW_RUNS[how])
    assert (ended.code, ended.err) == (0, "")
    assert ended.summary["steps"] == 16


# In place, where another launcher has started the ranks


def test_in_place_a_rank_that_is_stuck_ends_itself_and_the_launcher_the_job(job: Job) -> None:
    ended = make(job, "sleeps_for_ever").run(*ENDLESS, *LIMIT, *NO_WORKERS, prefix=TORCHRUN)
    assert since_hung(job) < HANG_SECONDS + LATER_SECONDS
    assert ended.code == 1  # torchrun's own, whatever happened
    assert "exitcode  : 170" in ended.err
    assert re.search(r"hung: no sign of life for \d+ s in training, after step 13; ", ended.err)
    assert "in sleeps_for_ever" in ended.err


def test_in_place_a_rank_that_holds_the_interpreter_is_ended_by_a_timer(job: Job) -> None:
    ended = make(job, "holds_the_lock").run(*ENDLESS, *LIMIT, *NO_WORKERS, prefix=TORCHRUN)
    assert since_hung(job) < HANG_SECONDS + LATER_SECONDS
    assert ended.code == 1
    assert re.search(r"rank      : 1 .*\n.*exitcode  : 1 ", ended.err), ended.err
    assert "in holds_the_lock" in ended.err


def test_in_place_a_rank_that_is_stopped_is_named_by_its_peer(job: Job) -> None:
    """Nothing in a stopped process sees it, so the limit is that of a collective; the launcher waits 30 s more for the stopped one."""
    process = make(job).start(*ENDLESS, *NO_WORKERS, "--collective-seconds", str(COLLECTIVE_SECONDS), prefix=TORCHRUN)
    reach(process, 3)
    peer, stopped = (rank_pid(process.pid, rank) for rank in (0, 1))
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: peer not in job.processes(), seconds=COLLECTIVE_SECONDS + LATER_SECONDS)
    os.kill(stopped, signal.SIGCONT)
    ended = job.outcome(process)
    assert ended.code == 1
    assert re.match(r"lost rank 1 \(on \S+\) in step \d+", messages(ended.err)[0])
    assert "exitcode  : 170" in ended.err


def test_in_place_spawn_returns_the_code_of_a_hang(job: Job) -> None:
    ended = make(job, "sleeps_for_ever").run(*ENDLESS, *LIMIT, *NO_WORKERS, *TWO, "--launcher", "spawn")
    assert since_hung(job) < HANG_SECONDS + LATER_SECONDS
    assert ended.code == 170
    assert "in sleeps_for_ever" in ended.err
