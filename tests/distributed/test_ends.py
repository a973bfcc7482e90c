"""How whole jobs end: by signals, by the loss of a rank or a node, by errors of one rank; what they leave, and what a person reads."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.conftest import PATIENCE_SECONDS, Job, none_left, rank_pid, reach, wait_until

HOST = socket.gethostname()
SMALL = ("--limit-train", "64", "--limit-test", "20", "--global-batch-size", "8", "--workers", "0")
TELLING = (*SMALL, "--log-format", "json", "--log-every", "1", "--max-restarts", "0")
#: Goes on until something ends it.
ENDLESS = (*TELLING, "--steps", "1000000", "--eval-every", "1000000", "--checkpoint-every", "0")
TWO = ("--nproc-per-node", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TRAINER = ("-m", "trainer")
#: Of the rank that meets the trouble; the others have none.
CULPRIT = "TRAINER_TEST_CULPRIT"

USERS = f'''
import os, signal, sys, time
import numpy as np
import torch

def culprit():
    return os.environ.get("RANK", "0") == os.environ["{CULPRIT}"]

class Pictures(torch.utils.data.Dataset):
    classes = 3
    def __init__(self, trouble):
        self.trouble = trouble
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if culprit() and index:
            self.trouble()
        return torch.full((1, 16, 16), index, dtype=torch.uint8), index % 3

def unreadable(split, config):
    def trouble():
        raise OSError("sector 37 is unreadable")
    return Pictures(trouble)

def arrays(split, config):
    return np.zeros((64, 16, 16), np.uint8), np.arange(64) % 3

class Linear(torch.nn.Module):
    def __init__(self, trouble):
        super().__init__()
        self.layer, self.trouble, self.calls = torch.nn.Linear(16 * 16, 3), trouble, 0
    def forward(self, pictures):
        self.calls += 1
        if culprit() and self.calls == 4:
            self.trouble()
        return self.layer(pictures.mean(1).flatten(1))

def __getattr__(name):
    if name == "not_importable" and culprit():
        raise ImportError("no module named fancy")
    if name == "not_importable":
        return lambda config, **_: Linear(None)
    raise AttributeError(name)

def fails(config, **_):
    def trouble():
        raise KeyError("surprise")
    return Linear(trouble)

def leaves(config, **_):
    return Linear(lambda: os._exit(0))

def crashes(config, **_):
    return Linear(lambda: os.kill(os.getpid(), signal.SIGSEGV))

def crashes_at_first(config, **_):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    return Linear(lambda: first and os.kill(os.getpid(), signal.SIGKILL))
'''


class Ending(Job):
    """A job that finds the models and data above."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        (folder / "users.py").write_text(USERS)

    def start(self, *args: str, **options: object) -> subprocess.Popen[str]:
        self.env |= {"PYTHONPATH": f"{self.env['PYTHONPATH']}:{self.folder}"}
        return super().start(*args, **options)  # type: ignore[arg-type]

    def culprit(self, rank: int) -> Ending:
        self.env |= {CULPRIT: str(rank)}
        return self


@pytest.fixture
def job(tmp_path: Path, job_env: dict[str, str]) -> Iterator[Ending]:
    with none_left(Ending(tmp_path / "job", job_env)) as made:
        yield made


def end(
    *processes: subprocess.Popen[str], job: Ending, within_seconds: float = PATIENCE_SECONDS
) -> list[tuple[int, list[str]]]:
    """Wait for the commands; return each one's code as a shell tells it and the lines of its stderr; none may leave a process."""
    ends = []
    for process in processes:
        _, err = process.communicate(timeout=within_seconds)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        ends.append((code, [_message(line) for line in err.splitlines()]))
    wait_until(lambda: not job.left(), seconds=5)
    return ends


def _message(line: str) -> str:
    """Return "rank: message" of a JSON line (rank - for the agent's), and any other line as it is: there should be none."""
    if not line.startswith("{"):
        return line
    record = json.loads(line)
    return f"{'-' if record['rank'] is None else record['rank']}: {record['message']}"


# Stop signals

STOPS = {
    "TERM to rank 1": (signal.SIGTERM, "rank 1", 1),
    "TERM to the agent": (signal.SIGTERM, "agent", 1),
    "INT to the agent, twice": (signal.SIGINT, "agent", 2),
    "TERM to the group, twice": (signal.SIGTERM, "group", 2),
    "INT to the group": (signal.SIGINT, "group", 1),  # Ctrl-C in a terminal
}


def send(signum: signal.Signals, whom: str, process: subprocess.Popen[str]) -> None:
    if whom == "group":
        os.killpg(process.pid, signum)
    else:
        os.kill(process.pid if whom == "agent" else rank_pid(process.pid, int(whom[-1])), signum)


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_signal_ends_all_ranks_after_a_joint_step_that_is_saved(name: str, job: Ending) -> None:
    signum, whom, times = STOPS[name]
    process = job.start(*ENDLESS, *TWO)
    reach(process, 3)
    for _ in range(times):
        send(signum, whom, process)
    ((code, lines),) = end(process, job=job)
    assert (code, lines) == (128 + signum, [])
    (step,) = job.saved_steps()
    assert step >= 3


def test_a_stop_of_one_node_ends_both_nodes(job: Ending, free_port: int) -> None:
    nodes = start_nodes(job, free_port, *ENDLESS)
    reach(nodes[0], 3)
    nodes[1].send_signal(signal.SIGTERM)
    assert end(*nodes, job=job) == [(143, []), (143, [])]
    assert len(job.saved_steps()) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_while_ranks_wait_for_others_ends_them_at_once(
    signum: signal.Signals, job: Ending, free_port: int
) -> None:
    process = start_node(job, free_port, 0, *ENDLESS)
    wait_until(lambda: _listens(free_port))
    process.send_signal(signum)
    assert end(process, job=job, within_seconds=20) == [(128 + signum, [])]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_while_ranks_start_ends_them_at_once(signum: signal.Signals, job: Ending) -> None:
    for pause in (0.0, 0.3, 0.8):
        process = job.start(*ENDLESS, *TWO)
        wait_until(lambda process=process: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        time.sleep(pause)
        process.send_signal(signum)
        assert end(process, job=job, within_seconds=20) == [(128 + signum, [])]


# A rank or a node is lost

LOST = re.compile(r"(\d): lost rank (\d) \(on (\S+)\)(?:, which holds the ranks' store,)? in (.*)")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_and_ends_the_node_with_137(victim: int, job: Ending) -> None:
    process = job.start(*ENDLESS, *TWO)
    reach(process, 3)
    send(signal.SIGKILL, f"rank {victim}", process)
    ((code, lines),) = end(process, job=job, within_seconds=30)
    assert code == 137
    first, second = sorted(lines)  # of two processes, so in either order
    assert first == f"-: rank {victim} ended first, with code 137 (killed by SIGKILL)"
    found = LOST.fullmatch(second)
    assert found, second
    assert found.groups()[:3] == (str(1 - victim), str(victim), HOST)
    assert re.fullmatch(r"step \d+", found[4])
    assert job.saved_steps() == []


def start_node(job: Ending, port: int, node: int, *args: str) -> subprocess.Popen[str]:
    where = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port))
    return job.start("--nproc-per-node", "1", *where, *args)


def start_nodes(job: Ending, port: int, *args: str) -> list[subprocess.Popen[str]]:
    return [start_node(job, port, node, *args) for node in (0, 1)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_lost_is_named_by_the_other(victim: int, job: Ending, free_port: int) -> None:
    nodes = start_nodes(job, free_port, *ENDLESS)
    reach(nodes[0], 3)
    nodes[victim].kill()
    (code, lines), (killed, _) = end(nodes[1 - victim], nodes[victim], job=job, within_seconds=30)
    assert (code, killed) == (170, 137)
    (line,) = lines
    found = LOST.fullmatch(line)
    assert found, line
    assert found.groups()[:3] == (str(1 - victim), str(victim), HOST)
    assert re.fullmatch(r"step \d+", found[4])


def test_nothing_outlives_an_agent_that_is_killed(job: Ending) -> None:
    """Not even loader processes, which ignore stop signals."""
    process = job.start(*ENDLESS, *TWO, "--workers", "2")
    reach(process, 3)
    assert len(job.left()) == 1 + 2 + 2 * 2
    process.kill()
    assert end(process, job=job) == [(137, [])]


WAITED = "waited 3 s (--rendezvous-seconds) at 127.0.0.1:{} for rank 1 of 2; check that every node was started"
NO_ANSWER = (
    "rank 0 did not answer at 127.0.0.1:{} within 3 s (--rendezvous-seconds); "
    "check that node 0 runs and that its address and port are right"
)


@pytest.mark.parametrize(("node", "line"), [(0, WAITED), (1, NO_ANSWER)])
def test_a_node_that_never_comes_is_named(node: int, line: str, job: Ending, free_port: int) -> None:
    process = start_node(job, free_port, node, *ENDLESS, "--rendezvous-seconds", "3")
    assert end(process, job=job) == [(170, [f"{node}: {line.format(free_port)}"])]


# Errors of one rank


def test_data_that_one_rank_cannot_read_end_both_nodes_with_3(job: Ending, free_port: int) -> None:
    nodes = start_nodes(job.culprit(1), free_port, *ENDLESS, "--dataset", "users:unreadable")
    (code, first), (other_code, second) = end(*nodes, job=job)
    assert (code, other_code) == (3, 3)
    assert first == ["0: a rank could not read its data at step 1; its own line says which"]
    assert len(second) <= 2  # of the step that fails, and of the one after it, which is under way
    assert all(re.fullmatch(r"1: .* sample \d+ .*OSError: sector 37 is unreadable.*", line) for line in second)
    assert job.saved_steps() == []


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_setting_that_one_rank_cannot_use_ends_both_nodes_with_2(culprit: int, job: Ending, free_port: int) -> None:
    options = ("--dataset", "users:arrays", "--model", "users:not_importable")
    ends = end(*start_nodes(job.culprit(culprit), free_port, *ENDLESS, *options), job=job)
    assert [code for code, _ in ends] == [2, 2]
    (line,) = ends[culprit][1]
    assert re.fullmatch(rf"{culprit}: --model is 'users:not_importable', .*no module named fancy.*", line)
    if culprit == 1:
        (told,) = ends[0][1]
        assert re.fullmatch(r"0: rank 1: --model is 'users:not_importable', .*no module named fancy.*", told)


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_unexpected_error_of_one_rank_ends_both_nodes_with_1(culprit: int, job: Ending, free_port: int) -> None:
    options = ("--dataset", "users:arrays", "--model", "users:fails")
    ends = end(*start_nodes(job.culprit(culprit), free_port, *ENDLESS, *options), job=job)
    assert [code for code, _ in ends] == [1, 1]
    lines = ends[culprit][1]
    assert lines == [f"{culprit}: unexpected KeyError: 'surprise'"]
    others = ends[1 - culprit][1]
    assert others == (["0: rank 1 ended: unexpected KeyError: 'surprise'"] if culprit == 1 else [])
    assert job.saved_steps() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run_with_4_and_saves_nothing(ranks: int, job: Ending) -> None:
    process = job.start(
        *TELLING, "--steps", "40", "--checkpoint-every", "1", "--lr", "1e30", "--nproc-per-node", str(ranks)
    )
    ((code, lines),) = end(process, job=job)
    assert code == 4
    (line,) = lines
    step = re.fullmatch(r"0: the loss is not finite at step (\d+); lower --lr, .*", line)
    assert step, line
    assert job.saved_steps() == list(range(1, int(step[1])))[-3:]


def test_a_rank_that_leaves_without_a_word_is_a_lost_peer(job: Ending) -> None:
    process = job.culprit(1).start(*ENDLESS, *TWO, "--dataset", "users:arrays", "--model", "users:leaves")
    ((code, lines),) = end(process, job=job)
    assert code == 170
    assert LOST.fullmatch(*lines)
    assert job.saved_steps() == []


def test_a_crash_in_native_code_is_passed_on(job: Ending) -> None:
    process = job.culprit(0).start(*ENDLESS, *TWO, "--dataset", "users:arrays", "--model", "users:crashes")
    ((code, lines),) = end(process, job=job)
    assert code == 139
    first, second = sorted(lines)
    assert first == "-: rank 0 ended first, with code 139 (killed by SIGSEGV)"
    assert LOST.fullmatch(second)


# Other launchers

SPAWN = ("--launcher", "spawn", *TWO)


def test_spawn_passes_a_stop_signal_on(job: Ending) -> None:
    process = job.start(*ENDLESS, *SPAWN)
    reach(process, 3)
    process.send_signal(signal.SIGTERM)
    assert end(process, job=job) == [(143, [])]
    assert len(job.saved_steps()) == 1


@pytest.mark.parametrize(("model", "code"), [("not_importable", 2), ("crashes", 139)])
def test_spawn_returns_the_code_of_the_rank_that_failed(model: str, code: int, job: Ending) -> None:
    process = job.culprit(1).start(*ENDLESS, *SPAWN, "--dataset", "users:arrays", "--model", f"users:{model}")
    assert end(process, job=job)[0][0] == code


def test_torchrun_ends_when_a_rank_is_killed(job: Ending) -> None:
    process = job.start(*ENDLESS, prefix=(*TORCHRUN, *TRAINER))
    reach(process, 3)
    send(signal.SIGKILL, "rank 1", process)
    ((code, _),) = end(process, job=job)
    assert code == 1  # torchrun's own, whatever happened


def test_torchrun_reports_the_code_of_the_rank_that_failed(job: Ending) -> None:
    options = ("--dataset", "users:arrays", "--model", "users:not_importable")
    process = job.culprit(1).start(*ENDLESS, *options, prefix=(*TORCHRUN, *TRAINER))
    ((code, lines),) = end(process, job=job)
    assert code == 1
    assert any("exitcode  : 2" in line for line in lines)
    assert not any("exitcode  : 170" in line for line in lines)


def test_a_start_anew_by_torchrun_meets_in_the_same_store(job: Ending) -> None:
    options = ("--dataset", "users:arrays", "--model", "users:crashes_at_first", "--steps", "8", "--eval-every", "8")
    prefix = (*TORCHRUN, "--max-restarts", "1", *TRAINER)
    process = job.culprit(1).start(*TELLING, *options, prefix=prefix)
    ((code, lines),) = end(process, job=job)
    assert code == 0, lines
    assert job.saved_steps() == [8]
