"""Starts anew: after which ends, how often, when the budget comes back, and what a stop in between does."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.agent.conftest import AgentRun, exists, messages, wait_until

DIES = "note('start')\nif start <= {times}: os.kill(os.getpid(), signal.SIGKILL)\n"


def restarts(err: str) -> list[str]:
    return [line.removeprefix("warning ") for line in messages(err) if "restart" in line]


def test_ranks_that_die_are_started_again_with_the_cause_in_one_line(node: AgentRun) -> None:
    child = "if rank == 1:\n    note(os.environ['CAUSES'].replace(' ', '_') or '-')\n    if start < 3: os.kill(os.getpid(), signal.SIGKILL)"
    code, _, err = node.run(child, max_restarts=3)
    assert code == 0
    cause = "rank 1 ended with 137 (killed by SIGKILL)"
    told = cause.replace(" ", "_")
    assert node.words(1) == ["-", told, f"{told};_{told}"]
    assert restarts(err) == [f"restart {n} of 3: rank 1 ended with 137 (killed by SIGKILL)" for n in (1, 2)]


def test_when_the_restarts_are_used_up_the_code_is_that_of_the_last_end(node: AgentRun) -> None:
    code, _, err = node.run(DIES.format(times=9), ranks=1, max_restarts=2)
    assert code == 137
    assert node.words(0) == ["start"] * 3
    assert restarts(err)[-1] == "all 2 restarts (--max-restarts) are used up without a newer checkpoint"


def test_without_restarts_nothing_is_said_of_them(node: AgentRun) -> None:
    code, _, err = node.run(DIES.format(times=9), ranks=1)
    assert (code, node.words(0), restarts(err)) == (137, ["start"], [])


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 130, 143])
def test_an_end_that_a_start_cannot_mend_is_final(node: AgentRun, code: int) -> None:
    assert node.run(f"note('start')\nsys.exit({code} if rank == 0 else 0)", max_restarts=3)[0] == code
    assert node.words(0) == ["start"]


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (1, "rank 0 ended with 1 (unexpected exception, or the last save failed)"),
        (170, "a peer was lost"),
        (99, "rank 0 ended with 99 (not one of the trainer's own codes)"),
    ],
)
def test_an_end_that_a_start_may_mend_is_followed_by_one(node: AgentRun, code: int, cause: str) -> None:
    ended, _, err = node.run(f"sys.exit({code} if start == 1 else 0)", ranks=1, max_restarts=1)
    assert ended == 0
    assert restarts(err) == [f"restart 1 of 1: {cause}"]


def test_a_permanent_code_of_one_rank_wins_over_the_lost_peers_of_the_others(node: AgentRun) -> None:
    code, _, err = node.run("note('start')\nsys.exit(3 if rank == 0 else 170)", max_restarts=3)
    assert (code, node.words(1), restarts(err)) == (3, ["start"], [])


def test_no_rank_of_the_last_start_is_left_when_the_next_one_begins(node: AgentRun) -> None:
    child = """
if start == 1:
    ready()
    if rank == 1:
        while not os.path.exists("ready-0"): time.sleep(0.01)
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
note("left" if os.path.exists("/proc/" + pathlib.Path("ready-0").read_text()) else "alone")
"""
    code, _, err = node.run(child, peer_seconds=0.3, max_restarts=1)
    assert code == 0
    assert node.words(0) == node.words(1) == ["alone"]
    assert "rank 0 has not ended by itself and is killed: a peer has ended" in err


def test_a_newer_checkpoint_gives_the_restarts_back(node: AgentRun) -> None:
    """Five starts that save something new and die, then those that save nothing new: with two restarts, three of them."""
    child = "note('start')\npulse(60).saved(10 * min(start, 5))\nos.kill(os.getpid(), signal.SIGKILL)"
    code, _, err = node.run(child, ranks=1, max_restarts=2)
    assert code == 137
    counts = [line[len("restart ")] for line in restarts(err) if line.startswith("restart")]
    assert counts == ["1"] * 5 + ["2"]
    assert len(node.words(0)) == 7


def test_steps_without_a_checkpoint_give_no_restart_back(node: AgentRun) -> None:
    child = "note('start')\npulse(60).step(100 * start)\nos.kill(os.getpid(), signal.SIGKILL)"
    assert node.run(child, ranks=1, max_restarts=2)[0] == 137
    assert len(node.words(0)) == 3


def test_a_start_anew_is_told_what_a_rank_of_the_last_one_told(node: AgentRun) -> None:
    child = """
note(os.environ["TOLD"] or "nothing")
if rank == 1 and start == 1: pulse(60).tell("20300101-härtetest")
sys.exit(1 if start < 3 else 0)
"""
    assert node.run(child, max_restarts=3)[0] == 0
    assert node.words(0) == ["nothing", "20300101-härtetest", "20300101-härtetest"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_between_two_starts_is_obeyed(node: AgentRun, signum: signal.Signals, code: int) -> None:
    """It comes when the last rank has ended and before the next one is started."""
    prelude = f"""
from trainer.agent import starts
watch = starts.watch
def and_stop(*args, **options):
    ends = watch(*args, **options)
    os.kill(os.getpid(), {signum.value})
    return ends
starts.watch = and_stop
"""
    ended, _, err = node.run("note('start')\nsys.exit(1)", max_restarts=3, prelude=prelude)
    assert ended == code
    assert node.words(0) == ["start"]
    assert len(restarts(err)) == 1


def test_a_stop_while_ranks_end_is_followed_by_no_start(node: AgentRun) -> None:
    child = """
signal.signal(signal.SIGTERM, lambda *_: note("TERM"))
note("start")
ready()
while len(pathlib.Path(f"words-{rank}").read_text().split()) < 2:
    time.sleep(0.01)
sys.exit(1)
"""
    process = node.start(child, max_restarts=3)
    node.ready(0, 1)
    process.send_signal(signal.SIGTERM)
    code, _, err = node.end()
    assert (code, node.words(0), restarts(err)) == (1, ["start", "TERM"], [])


def test_an_agent_that_is_killed_after_a_restart_leaves_no_rank(node: AgentRun) -> None:
    process = node.start("if start == 1: sys.exit(1)\nready()\ntime.sleep(60)", max_restarts=1)
    pids = node.ready(0, 1)
    process.kill()
    assert node.end()[0] == -signal.SIGKILL
    wait_until(lambda: not any(map(exists, pids)))


ORPHAN = """
if start == 1:
    grandchild = os.fork()
    if grandchild:
        pathlib.Path("orphan").write_text(str(grandchild))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    os._exit(0)
while os.path.exists("/proc/" + pathlib.Path("orphan").read_text()):
    time.sleep(0.01)
"""


def test_as_the_first_process_of_a_container_it_restarts_ranks_and_reaps_what_they_leave(node: AgentRun) -> None:
    namespace = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
    if os.system(f"{' '.join(namespace)} true 2>/dev/null"):
        namespace = ()
    # Where namespaces are not to be had, orphans of the ranks still come to the agent, as they come to PID 1.
    prelude = "import ctypes; ctypes.CDLL(None).prctl(36, 1)"
    code, out, err = node.run(ORPHAN, ranks=1, max_restarts=1, prelude=prelude, prefix=namespace)
    assert code == 0, out + err
    assert re.search("restart 1 of 1: rank 0 ended with 137", err)
