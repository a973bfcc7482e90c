"""Hangs as a rank sees them itself: a thread ends it in place, a timer where no thread can run, and stacks come on request."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.beat import Phase
from trainer.cli.hangs import allowance_for
from trainer.config import Config

ROOT = Path(__file__).resolve().parent.parent.parent

RANK = """
import ctypes, os, signal, sys, threading, time
from trainer import beat, log
from trainer.cli import hangs
log.setup("text", rank=3)
for phase in beat.LEAST_SECONDS:
    beat.LEAST_SECONDS[phase] = 0.5
hangs._LOOK_SECONDS, hangs._LATER_SECONDS = 0.1, {later}
pulse = beat.Pulse(beat.Allowance(0.5))
def falls_silent():
    {how}
hangs.print_stacks_on_request()
with hangs.watched(pulse):
    pulse.step(6)
    print("ready", flush=True)
    falls_silent()
print("threads", threading.active_count())
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], how: str, *, later: float = 20) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK.format(how=how, later=later)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    started.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    return started[-1]


@pytest.mark.parametrize(
    "how", ["time.sleep(60)", "[None for _ in iter(int, 1)]", "threading.Lock().acquire(); threading.Event().wait()"]
)
def test_in_place_a_silent_rank_ends_itself_and_shows_its_stacks(
    started: list[subprocess.Popen[str]], how: str
) -> None:
    process = start(started, how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 170
    line, *stacks = err.splitlines()
    assert re.search(r"error \[rank 3\] hung: no sign of life for [1-9]\d* s in its first steps, after step 6; ", line)
    assert any("in falls_silent" in stack for stack in stacks)


def test_in_place_a_rank_that_holds_the_interpreters_lock_ends_with_1_and_its_stacks(
    started: list[subprocess.Popen[str]],
) -> None:
    process = start(started, "ctypes.PyDLL(None).sleep(60)", later=1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in falls_silent" in err


def test_in_place_a_rank_that_goes_on_is_left_alone_and_no_thread_stays(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "[(time.sleep(0.1), pulse.step(n)) for n in range(15)]", later=0.3)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "ready\nthreads 1\n", "")


def test_a_rank_shows_its_stacks_on_request_and_goes_on(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "[(time.sleep(0.1), pulse.step(n)) for n in range(15)]")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Current thread" in err
    assert "most recent call first" in err


def test_settings_say_how_long_what_may_take() -> None:
    one = allowance_for(Config(rendezvous_seconds=50.0), single_node=True)
    several = allowance_for(Config(compile=True, collective_seconds=300.0), single_node=False)
    given = allowance_for(Config(hang_timeout=7.0), single_node=False)
    assert [one.seconds(phase) for phase in (Phase.SETUP, Phase.STEP)] == [1900, 60]
    # A rank that waits for another node's first comes to its own limit, and names it.
    assert [several.seconds(phase) for phase in (Phase.FIRST_STEPS, Phase.STEP)] == [3600, 315]
    assert given.seconds(Phase.STEP) == 7
