"""Hangs: which ranks are found, what is printed of them, and that a rank that goes on is left alone."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.agent.conftest import AgentRun, exists, messages
from trainer.agent import hangs
from trainer.beat import Allowance, Pulse, Records

#: Gives signs of life, each due 0.5 s later, and then none any more, in a function whose name a stack shows.
FALLS_SILENT = """
import ctypes, re
def falls_silent():
    {how}
mine = pulse(0.5)
mine.step(7)
ready()
if rank == 1:
    falls_silent()
while True:
    mine.step(8)
    time.sleep(0.1)
"""
WAYS = {
    "waits": "time.sleep(60)",
    "runs without an end": "while True: pass",
    "holds the interpreter's lock, waiting": "ctypes.PyDLL(None).sleep(60)",
    "holds the interpreter's lock, computing": "re.match('(a|a?)+b', 'a' * 60)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores what can be ignored": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 14, 15)]; time.sleep(60)",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_falls_silent_is_named_shows_its_stack_and_ends_the_node(node: AgentRun, way: str) -> None:
    code, _, err = node.run(FALLS_SILENT.format(how=WAYS[way]))
    assert code == 170
    hung, *rest = messages(err)
    assert re.match(r"error rank 1 is hung: no sign of life for [1-9] s in its first steps, after step 7; ", hung)
    assert ("it is stopped, by a signal" in hung) == (way == "stops itself")
    assert [re.sub(r"\d+:$", "PID:", line) for line in rest] == [
        "warning stacks of rank 0, process PID:",
        "warning stacks of rank 1, process PID:",
        "error all ranks of this node are killed: nothing goes on without the one that is hung",
    ]
    own = err.split("stacks of rank 1")[1]
    assert " in falls_silent" in own
    assert " in falls_silent" not in err.split("stacks of rank 1")[0]
    assert not any(map(exists, node.ready(0, 1)))


def test_a_rank_that_is_stopped_from_outside_is_found(node: AgentRun) -> None:
    node.start(FALLS_SILENT.format(how="mine.step(9); time.sleep(0.2); falls_silent()"))
    os.kill(node.ready(0, 1)[0], signal.SIGSTOP)
    code, _, err = node.end()
    assert code == 170
    assert re.match("error rank 0 is hung: .*; it is stopped, by a signal$", messages(err)[0])


def test_a_rank_that_is_due_a_moment_after_the_one_that_waits_for_it_is_named_too() -> None:
    records = Records(3, seconds=600)
    for index, seconds in enumerate((0.3, 1.1, 60)):
        pulse = Pulse(Allowance(seconds), fd=os.dup(records.fd), index=index)
        for step in range(10):  # until the first steps are over, which have a longer limit
            pulse.step(step)
    records.close()
    watched, pids = hangs.Hangs(records), dict.fromkeys(range(3), os.getpid())
    assert watched.find(pids) == {}
    time.sleep(0.5)
    found = watched.find(pids)
    assert list(found) == [0, 1]
    assert "1 s are allowed" in found[1]


def test_a_rank_that_never_gives_a_sign_is_found(node: AgentRun) -> None:
    code, _, err = node.run("time.sleep(60)", ranks=1, first_rank=5, seconds=0.5)
    assert code == 170
    assert re.match("error rank 5 is hung: no sign of life for [1-9] s in its setup; ", messages(err)[0])


def test_a_rank_that_ends_with_a_code_of_its_own_when_it_is_continued_is_still_hung(node: AgentRun) -> None:
    child = "pulse(0.3)\nsignal.signal(signal.SIGCONT, lambda *_: os._exit(3))\nos.kill(os.getpid(), signal.SIGSTOP)"
    assert node.run(child, ranks=1)[0] == 170


def test_a_slow_rank_that_goes_on_is_left_alone(node: AgentRun) -> None:
    child = "mine = pulse(2.0)\nfor step in range(8):\n    time.sleep(0.5)\n    mine.step(step)"
    assert node.run(child)[::2] == (0, "")


def test_a_rank_that_has_finished_is_not_hung(node: AgentRun) -> None:
    child = "mine = pulse(0.3)\nif rank == 0: sys.exit(0)\nfor _ in range(25):\n    time.sleep(0.1)\n    mine.step(1)"
    assert node.run(child)[::2] == (0, "")


def test_ranks_of_a_node_that_was_paused_are_left_alone(node: AgentRun) -> None:
    """As `docker pause` does: all processes are stopped for longer than a sign may take, the agent with them."""
    child = "mine = pulse(1.5)\nready()\nfor step in range(30):\n    mine.step(step)\n    time.sleep(0.1)"
    prelude = "from trainer import beat; beat._LATE_SECONDS = 1.5"
    process = node.start(child, prelude=prelude)
    node.ready(0, 1)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(process.pid, signal.SIGCONT)  # the agent first: it must not take the others for hung
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGCONT)
    assert node.end()[::2] == (0, "")


def test_a_hang_is_followed_by_a_start(node: AgentRun) -> None:
    child = "pulse(0.3)\nnote('start')\nif start == 1: time.sleep(60)"
    code, _, err = node.run(child, ranks=1, max_restarts=1)
    assert code == 0
    assert messages(err)[-1] == "warning restart 1 of 1: rank 0 hung"


def test_a_stop_while_stacks_are_printed_is_not_lost(node: AgentRun) -> None:
    child = (
        "signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getppid(), signal.SIGTERM))\npulse(0.3)\ntime.sleep(60)"
    )
    code, _, err = node.run(child, ranks=1, max_restarts=3)
    assert code == 143
    assert "restart" not in err


def test_a_rank_that_even_a_kill_does_not_end_is_left_behind(node: AgentRun) -> None:
    prelude = "import subprocess; subprocess.Popen.kill = lambda self: None; watch._GONE_SECONDS = 0.3"
    code, _, err = node.run("pulse(0.3)\nready()\ntime.sleep(60)", ranks=1, max_restarts=3, prelude=prelude)
    assert code == 170
    assert re.search(r"error rank 0 \(process \d+\) does not end, though it was killed", messages(err)[-1])
