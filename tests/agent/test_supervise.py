"""The agent with real children: whose code it returns, how signals reach them, that nothing outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent.conftest import ROOT, AgentRun, exists, messages, runs, wait_until
from trainer import agent
from trainer.agent import Ends

#: (stop signal or 0, (code, was it killed by us) in the order of the ends) -> (the node's code, the rank of the first cause)
ENDS = {
    "all finished": (0, [(0, False), (0, False)], 0, None),
    "one failed": (0, [(0, False), (1, False)], 1, 1),
    "a lost peer is no cause": (0, [(170, False), (170, False), (137, False)], 137, 2),
    "all lost a peer": (0, [(170, False), (170, False)], 170, None),
    "one lost a peer": (0, [(0, False), (170, False)], 170, None),
    "the first cause wins": (0, [(3, False), (1, False)], 3, 0),
    "what we killed is no cause": (0, [(170, False), (137, True)], 170, None),
    "what we killed after a cause": (0, [(2, False), (137, True)], 2, 0),
    "stopped": (15, [(143, False), (143, False)], 143, None),
    "interrupted": (2, [(130, False), (130, False)], 130, None),
    "stopped, one killed": (15, [(143, False), (137, True)], 143, None),
    "stopped, one had finished": (15, [(0, False), (143, False)], 143, None),
    "stopped after all had finished": (15, [(0, False), (0, False)], 0, None),
    "stopped, peers of another node went first": (15, [(170, False), (170, False)], 143, None),
    "stopped, the save failed": (15, [(143, False), (1, False)], 1, 1),
    "stopped, one was killed by somebody": (15, [(137, False), (143, False)], 137, 0),
    "ranks that somebody else stopped": (0, [(143, False), (143, False)], 143, 0),
    "one rank lost its peer to a stop": (0, [(170, False), (143, False)], 143, 1),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_first_cause_decides(name: str) -> None:
    stop, collected, code, first = ENDS[name]
    ends = Ends(stop=stop)
    for rank, (ended, killed) in enumerate(collected):
        ends.add(rank, ended, killed=killed)
    assert ends.code == code
    assert (ends.first[0] if ends.first else None) == first


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 77, 170])
def test_a_code_that_all_children_return_is_the_nodes(node: AgentRun, code: int) -> None:
    assert node.run(f"sys.exit({code})")[0] == code


def test_a_node_with_one_child_returns_its_code_and_adds_no_line_to_the_childs_own(node: AgentRun) -> None:
    code, out, err = node.run("sys.exit(4)", ranks=1, first_rank=6)
    assert code == 4
    assert "ended first" not in out + err


def test_of_several_children_the_first_is_named_with_the_codes_meaning(node: AgentRun) -> None:
    code, out, err = node.run("time.sleep(rank - 6)\nsys.exit(4 if rank == 6 else 170)", ranks=2, first_rank=6)
    assert code == 4
    assert "rank 6 ended first, with code 4 (diverged: the loss is not finite)" in out
    assert err == ""


def test_the_agent_imports_neither_torch_nor_numpy(node: AgentRun) -> None:
    assert "modules False False\n" in node.run("")[1]


def test_a_killed_child_is_137_and_named(node: AgentRun) -> None:
    node.start("ready()\nif rank == 1: time.sleep(60)\ntime.sleep(60)", first_rank=4, peer_seconds=0.5)
    os.kill(node.ready(4, 5)[1], signal.SIGKILL)
    code, _, err = node.end()
    assert code == 137
    first, second, third = messages(err)
    assert first == "warning rank 5 ended first, with code 137 (killed by SIGKILL)"
    assert second == "warning rank 4 has not ended by itself and is killed: a peer has ended"
    assert re.fullmatch(r"warning stacks of rank 4, process \d+:", third)
    assert " in <module>" in err


def test_ranks_that_still_start_are_not_left_waiting_for_a_killed_one(node: AgentRun) -> None:
    node.start("pulse(600)\nready()\ntime.sleep(600)", peer_seconds=600)
    os.kill(node.ready(0, 1)[1], signal.SIGKILL)
    assert node.end()[0] == 137


def test_a_crash_is_told_as_a_shell_tells_it(node: AgentRun) -> None:
    code, _, err = node.run("os.kill(os.getpid(), signal.SIGSEGV)", ranks=1)
    assert code == 139
    assert "rank 0 ended first, with code 139 (killed by SIGSEGV)" in err


def test_a_code_that_is_not_ours_is_passed_on_and_said_to_be_foreign(node: AgentRun) -> None:
    code, _, err = node.run("sys.exit(99)", ranks=1)
    assert code == 99
    assert "rank 0 ended first, with code 99 (not one of the trainer's own codes)" in err


def test_survivors_may_end_by_themselves(node: AgentRun) -> None:
    """The cause is the child that ended later with a cause, not the one that lost it as a peer."""
    code, out, _ = node.run("if rank == 0: sys.exit(170)\ntime.sleep(0.5)\nsys.exit(3)")
    assert code == 3
    assert "rank 1 ended first, with code 3" in out


def test_one_child_may_finish_long_before_another(node: AgentRun) -> None:
    """Code 0 starts no clock: rank 0 saves while the others have left."""
    assert node.run("if rank == 0: time.sleep(1)", peer_seconds=0.2)[0] == 0


def test_a_stop_of_one_child_is_a_stop_of_all_with_the_grace_time_for_the_save(node: AgentRun) -> None:
    """Somebody stopped the rank, or another node stopped all ranks: this agent was sent nothing."""
    child = """
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: note("TERM"))
ready()
while rank == 1 and not os.path.exists("ready-0"):
    time.sleep(0.01)
if rank == 1:
    sys.exit(143)
while not os.path.exists("words-0"):
    time.sleep(0.01)
time.sleep(0.6)
note("saved")
sys.exit(143)
"""
    code, out, err = node.run(child, peer_seconds=0.2, grace=30)
    assert (code, err) == (143, "")
    assert "rank 1 ended first, with code 143 (stopped by SIGTERM)" in out
    assert node.words(0) == ["TERM", "saved"]


def test_a_child_that_waits_for_one_that_was_stopped_is_stopped_too(node: AgentRun) -> None:
    node.start("ready()\ntime.sleep(60)", ranks=3)
    os.kill(node.ready(0, 1, 2)[1], signal.SIGINT)
    code, _, _ = node.end()
    assert code == 130


OBEDIENT = """
signal.signal(signal.SIGTERM, lambda *_: note("TERM"))
signal.signal(signal.SIGINT, lambda *_: note("INT"))
ready()
while not (os.path.exists("go") and os.path.exists(f"words-{rank}")):
    time.sleep(0.01)
last = open(f"words-{rank}").read().split()[-1]
sys.exit(130 if last == "INT" else 143)
"""


@pytest.mark.parametrize(("signum", "word", "code"), [(signal.SIGTERM, "TERM", 143), (signal.SIGINT, "INT", 130)])
@pytest.mark.parametrize("times", [1, 2])
def test_a_stop_signal_reaches_each_child_each_time(
    node: AgentRun, signum: signal.Signals, word: str, code: int, times: int
) -> None:
    process = node.start(OBEDIENT)
    node.ready(0, 1)
    for count in range(1, times + 1):
        process.send_signal(signum)
        wait_until(lambda count=count: all(len(node.words(rank)) == count for rank in (0, 1)))
    (node.folder / "go").touch()
    assert node.end()[0] == code
    assert node.words(0) == node.words(1) == [word] * times


def test_an_interrupt_that_becomes_a_stop_is_a_stop(node: AgentRun) -> None:
    process = node.start(OBEDIENT)
    node.ready(0, 1)
    for signum, count in ((signal.SIGINT, 1), (signal.SIGTERM, 2)):
        process.send_signal(signum)
        wait_until(lambda count=count: all(len(node.words(rank)) == count for rank in (0, 1)))
    (node.folder / "go").touch()
    assert node.end()[0] == 143


def test_a_child_that_has_no_handler_ends_at_once(node: AgentRun) -> None:
    process = node.start("ready()\ntime.sleep(60)")
    node.ready(0, 1)
    process.send_signal(signal.SIGTERM)
    code, out, err = node.end()
    assert (code, err) == (143, "")
    assert "ended first" not in out


def test_children_that_ignore_the_stop_are_killed_after_the_grace_time(node: AgentRun) -> None:
    process = node.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(60)", grace=0.3)
    pids = node.ready(0, 1)
    process.send_signal(signal.SIGTERM)
    code, _, err = node.end()
    assert code == 143
    assert [line.split(" ", 1)[1] for line in err.splitlines()] == [
        f"warning rank {rank} has not ended by itself and is killed: the grace time is over" for rank in (0, 1)
    ]
    assert not any(map(exists, pids))


def test_a_stopped_child_is_killed_after_the_grace_time(node: AgentRun) -> None:
    process = node.start("ready()\ntime.sleep(60)", grace=0.3, ranks=1)
    (pid,) = node.ready(0)
    os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 143
    assert not exists(pid)


def test_a_signal_while_the_agent_starts_is_not_lost(node: AgentRun) -> None:
    """From the first instruction on: it ends by the signal, or with its code, and leaves no child."""
    for pause in (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15):
        process = node.start("ready()\ntime.sleep(60)")
        time.sleep(pause)
        process.send_signal(signal.SIGTERM)
        assert node.end()[0] in (143, -signal.SIGTERM)
        for path in node.folder.glob("ready-*"):
            text = path.read_text()  # nothing, where the child was ended before it wrote its number
            assert not text or not exists(int(text))
            path.unlink()


def test_no_child_outlives_an_agent_that_is_killed(node: AgentRun) -> None:
    process = node.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(60)", ranks=3)
    pids = node.ready(0, 1, 2)
    process.kill()
    assert node.end()[0] == -signal.SIGKILL
    wait_until(lambda: not any(map(runs, pids)))


def test_no_child_is_left_as_a_zombie(node: AgentRun) -> None:
    node.start("ready()\nif rank == 0: time.sleep(60)", grace=0.2)
    rank_0, rank_1 = node.ready(0, 1)
    wait_until(lambda: not exists(rank_1))  # reaped while the other one still runs
    assert node.process is not None
    node.process.send_signal(signal.SIGTERM)
    assert node.end()[0] == 143
    assert not exists(rank_0)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_listener_has_a_free_port_and_keeps_it(address: str) -> None:
    try:
        with agent.listen(address) as first, agent.listen(address) as second:
            assert len({first.getsockname()[1], second.getsockname()[1], 0}) == 3
    except OSError:
        if address == "127.0.0.1":
            raise
        pytest.xfail("this machine has no IPv6 loopback")


def test_the_first_child_alone_gets_the_listener(tmp_path: Path) -> None:
    script = (
        "import os, socket, sys\n"
        "from trainer import agent, log\n"
        "log.setup('text')\n"
        "listener = agent.listen('127.0.0.1')\n"
        "child = 'import os, sys; sys.exit(0 if os.path.exists(\"/proc/self/fd/\" + sys.argv[1]) else 7)'\n"
        "command = [sys.executable, '-c', child, str(listener.fileno())]\n"
        "launch = agent.Launch([dict(os.environ)] * int(sys.argv[1]), listener)\n"
        "code = agent.supervise(command, launch=lambda *_: launch, first_rank=0, grace=5)\n"
        "sys.exit(code + 10 * (listener.fileno() != -1))\n"
    )
    for ranks, code in ((1, 0), (2, 7)):
        command = [sys.executable, "-c", script, str(ranks)]
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == code, ended.stderr
