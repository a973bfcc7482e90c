"""A process that is to end with its parent: real ones, killed without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT

PATIENCE_SECONDS = 30
CHILD = "import os, sys, time; from trainer.parent import die_with; die_with({parent}); print(os.getpid(), flush=True); time.sleep(60)"
STARTS_A_CHILD = (
    "import os, subprocess, sys\n"
    "child = sys.argv[1].replace('PARENT', str(os.getpid()))\n"
    "subprocess.run([sys.executable, '-c', child])"
)


def test_it_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", STARTS_A_CHILD, CHILD.format(parent="PARENT")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_ends_at_once_when_its_parent_has_ended_already() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD.format(parent=1)], cwd=ROOT, capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert (ended.returncode, ended.stdout) == (1, b"")
