"""Elastic nodes, under torch's elastic agent: the number of ranks changes, the global batch and the order of the samples do not."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.distributed.conftest import Job, NewJob, Outcome, messages, rank_pid, saves_apart, wait_until

FIXED = (
    "--log-format", "json", "--log-every", "1", "--workers", "0", "--limit-train", "600", "--limit-test", "20",
    "--global-batch-size", "30", "--norm", "group", "--eval-every", "1000000",
)  # fmt: skip
STEPS = 150
#: torch's own patience is made for large clusters: 30 s for more nodes to come, 15 s until a silent one is given up.
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


def node(
    job: Job, port: int, *args: str, steps: int = STEPS, nodes: str = "1:3", endpoint: str = "127.0.0.1"
) -> subprocess.Popen[str]:
    env = {"PET_NNODES": nodes, "PET_RDZV_ENDPOINT": f"{endpoint}:{port}", "PET_RDZV_CONF": QUICK}
    every = ("--checkpoint-every", "10", "--collective-seconds", "20")
    options = (*FIXED, "--steps", str(steps), "--nproc-per-node", "1", *every, *args)
    return job.start(*options, env=env)


def worlds(outs: list[str]) -> list[int]:
    """Return the numbers of ranks with which the run was begun or gone on with, in order, as rank 0 told."""
    told = [json.loads(line) for out in outs for line in out.splitlines() if line.startswith("{")]
    told = [line for line in told if re.match(r"\d+ ranks? on \d+ nodes?, ", line["message"])]
    return [int(line["message"].split()[0]) for line in sorted(told, key=lambda line: line["time"])]


def received(outcome: Outcome) -> set[str]:
    """Return what the model received; steps after the newest checkpoint were done again, with the same samples."""
    return {line for path in outcome.trace.iterdir() for line in path.read_text().splitlines()}


def slowed(seconds: float) -> dict[str, str]:
    return {"TRAINER_TEST_SLEEP": str(seconds)}


#: Steps that last, so that nodes can leave and join in the middle of the run.
SLOW = """
import os, time
import numpy as np

def load(split, config):
    count = 600 if split == "train" else 20
    pictures = np.random.default_rng(len(split)).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return pictures, np.arange(count) % 10

def build(config, *, classes, shape):
    import torch

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(28 * 28, classes)
        def forward(self, x):
            time.sleep(float(os.environ.get("TRAINER_TEST_SLEEP", "0")) if self.training else 0)
            return self.layer(x.flatten(1))
    return Slow()
"""
SLOWLY = ("--dataset", "slow:load", "--model", "slow:build", "--lr", "0.01")


@pytest.fixture
def new_slow_job(new_job: NewJob) -> NewJob:
    def make(name: str) -> Job:
        job = new_job(name)
        (job.folder / "slow.py").write_text(SLOW)
        job.env |= {"PYTHONPATH": f"{job.env['PYTHONPATH']}:{job.folder}"}
        return job

    return make


def test_a_node_is_lost_and_another_joins_and_the_result_is_that_of_the_unbroken_run(
    new_slow_job: NewJob, free_port: int
) -> None:
    unbroken = new_slow_job("whole").run(*FIXED, *SLOWLY, "--steps", str(STEPS), "--nproc-per-node", "2")
    assert unbroken.code == 0, unbroken.err

    job = new_slow_job("parts")
    job.env |= slowed(0.15)
    first = node(job, free_port, *SLOWLY)
    wait_until(lambda: _listens(free_port))  # the node that holds the endpoint may not be lost
    second = node(job, free_port, *SLOWLY)
    wait_until(lambda: job.saved_steps(), seconds=60)
    os.killpg(second.pid, signal.SIGKILL)
    seen = job.saved_steps()[-1]
    wait_until(lambda: job.saved_steps()[-1] > seen + 20)
    third = node(job, free_port, *SLOWLY)
    ended = job.outcome(first, third)
    assert ended.code == 0, ended.err
    outs = [ended.out, second.communicate()[0]]
    assert worlds(outs) == [2, 1, 2]
    assert ended.summary["steps"] == STEPS
    assert received(ended) == received(unbroken)
    assert ended.summary["final_loss"] == pytest.approx(unbroken.summary["final_loss"], rel=1e-4)
    assert not job.left()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_of_one_node_stops_all_after_a_save(signum: signal.Signals, job: Job, free_port: int) -> None:
    nodes = [node(job, free_port, steps=1_000_000, nodes="2:2") for _ in range(2)]
    wait_until(lambda: job.saved_steps(), seconds=60)
    nodes[1].send_signal(signum)
    errors = [saves_apart(messages(process.communicate(timeout=60)[1])) for process in nodes]
    assert ([process.returncode for process in nodes], errors) == ([128 + signum] * 2, [[], []])
    wait_until(lambda: not job.left(), seconds=5)
    assert job.saved_steps()


ELSEWHERE = "no-such-host.invalid"


@pytest.mark.parametrize("endpoint", ["127.0.0.1", ELSEWHERE])
def test_a_stop_while_nodes_wait_for_others_ends_at_once(endpoint: str, job: Job, free_port: int) -> None:
    process = node(job, free_port, nodes="2:3", endpoint=endpoint)
    wait_until(lambda: _listens(free_port) if endpoint == "127.0.0.1" else _obeys(process.pid))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 143, process.communicate()[1]


def _obeys(pid: int) -> bool:
    """Tell whether the process has SIGTERM blocked: it takes it in its own time, also in a wait."""
    status = Path(f"/proc/{pid}/status").read_text()
    blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(blocked and int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1)


WAITED = "waited 2 s (--rendezvous-seconds) at 127.0.0.1:{} for 2 nodes; check that they were started"
NOBODY = (
    f"nobody answered at {ELSEWHERE}:{{}}, where the nodes meet, within 2 s (--rendezvous-seconds): "
    "Name or service not known; check that its node was started"
)


@pytest.mark.parametrize(("endpoint", "line"), [("127.0.0.1", WAITED), (ELSEWHERE, NOBODY)])
def test_a_node_to_which_no_others_come_says_so(endpoint: str, line: str, job: Job, free_port: int) -> None:
    ended = job.outcome(node(job, free_port, "--rendezvous-seconds", "2", nodes="2:3", endpoint=endpoint))
    assert (ended.code, saves_apart(messages(ended.err))) == (170, [line.format(free_port)])


def test_a_rank_that_is_killed_is_told_and_started_anew(job: Job, free_port: int) -> None:
    process = node(job, free_port, steps=300, nodes="1:1")
    wait_until(lambda: job.saved_steps(), seconds=60)
    os.kill(rank_pid(process.pid, 0), signal.SIGKILL)
    ended = job.outcome(process)
    assert (ended.code, saves_apart(messages(ended.err))) == (0, ["local rank 0 ended first, killed by SIGKILL"])
    assert ended.summary["steps"] == 300
    assert len(received(ended)) == 300 * 30


def test_a_node_that_is_not_needed_ends_with_the_run(new_slow_job: NewJob, free_port: int) -> None:
    job = new_slow_job("job")
    job.env |= slowed(0.1)
    first = node(job, free_port, *SLOWLY, steps=100, nodes="1:1")
    wait_until(lambda: job.saved_steps(), seconds=60)
    second = node(job, free_port, *SLOWLY, steps=100, nodes="1:1")
    outs = [process.communicate(timeout=60) for process in (first, second)]
    assert ([first.returncode, second.returncode], worlds([out for out, _ in outs])) == ([0, 0], [1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_end_that_no_start_can_mend_ends_all_nodes_without_another_start(job: Job, free_port: int) -> None:
    nodes = [node(job, free_port, "--lr", "1e30", steps=100, nodes="2:2") for _ in range(2)]
    outs = [process.communicate(timeout=90) for process in nodes]
    assert [process.returncode for process in nodes] == [4, 4]
    assert worlds([out for out, _ in outs]) == [2]
    assert sum("not finite at step" in err for _, err in outs) == 1
    assert not job.left()


@pytest.mark.parametrize(
    ("options", "words"), [(("--run-name", ""), "--run-name"), (("--resume", "never"), "--resume is never")]
)
def test_what_an_elastic_run_cannot_be_is_said_before_it_starts(options: tuple[str, ...], words: str, job: Job) -> None:
    elastic = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "127.0.0.1:29555"}
    ended = job.run(*FIXED, *options, env=elastic)
    assert ended.code == 2
    (line,) = saves_apart(messages(ended.err))
    assert words in line


def test_when_the_node_that_holds_the_rendezvous_is_lost_the_others_end(new_slow_job: NewJob, free_port: int) -> None:
    job = new_slow_job("job")
    job.env |= slowed(0.15)
    first = node(job, free_port, *SLOWLY)
    wait_until(lambda: _listens(free_port))
    second = node(job, free_port, *SLOWLY)
    wait_until(lambda: job.saved_steps(), seconds=60)
    os.killpg(first.pid, signal.SIGKILL)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 170, err
    told = f"the nodes that met at 127.0.0.1:{free_port}, or the one that holds their rendezvous, have ended: "
    assert saves_apart(messages(err))[-1].startswith(told)
