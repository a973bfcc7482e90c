"""Real agents with small children: how they are started, how children leave word, how a test waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_SECONDS = 60
ROOT = Path(__file__).resolve().parent.parent.parent

AGENT = """
import json, os, sys
from trainer import agent, log
from trainer.agent import hangs, watch
from trainer.beat import Records
log.setup("text")
code, ranks, grace, first_rank, peer_seconds, max_restarts, seconds, prelude = json.loads(sys.argv[1])
watch._PEER_SECONDS = peer_seconds or watch._PEER_SECONDS
hangs._LOOK_SECONDS, hangs._STACKS_SECONDS = 0.2, 1.0
exec(prelude)
starts = []
def launch(told, causes):
    records = Records(ranks, seconds=seconds)
    starts.append(told)
    of_start = dict(os.environ, START=str(len(starts)), TOLD=told, CAUSES="; ".join(causes), BEAT_FD=str(records.fd))
    return agent.Launch([dict(of_start, RANK=str(first_rank + index)) for index in range(ranks)], None, records)
command = [sys.executable, "-S", "-c", code]
end = agent.supervise(command, launch=launch, first_rank=first_rank, grace=grace, max_restarts=max_restarts)
print("modules", "torch" in sys.modules, "numpy" in sys.modules)
sys.exit(end)
"""

#: What each child begins with: `rank`, `start` (from 1), `ready()` that tells the test, `note()` that leaves a word for it,
#: and `pulse(seconds)`, with which it gives signs of life, each due after so many seconds.
CHILD = """
import faulthandler, os, pathlib, signal, sys, time
rank, start = int(os.environ["RANK"]), int(os.environ["START"])
faulthandler.register(signal.SIGUSR1, file=2)
for signum in (signal.SIGTERM, signal.SIGINT):  # as a rank begins: see stop.py
    signal.signal(signum, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
def note(word):
    with open(f"words-{rank}", "a") as file:
        file.write(word + "\\n")
def ready():
    pathlib.Path(f"ready-{rank}").write_text(str(os.getpid()))
def pulse(seconds):
    from trainer import beat
    for phase in beat.LEAST_SECONDS:
        beat.LEAST_SECONDS[phase] = seconds
    return beat.Pulse(beat.Allowance(seconds), fd=int(os.environ["BEAT_FD"]), index=rank)
"""


class AgentRun:
    """Run an agent with children of `python -c`, in a folder where they leave words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(
        self,
        child: str,
        *,
        ranks: int = 2,
        grace: float = 20,
        first_rank: int = 0,
        peer_seconds: float = 0,
        max_restarts: int = 0,
        seconds: float = 600,
        prelude: str = "",
        prefix: tuple[str, ...] = (),
    ) -> subprocess.Popen[str]:
        """Start it; `seconds` is how long a child may take to its first sign of life, `prelude` runs in the agent first."""
        arguments = json.dumps([CHILD + child, ranks, grace, first_rank, peer_seconds, max_restarts, seconds, prelude])
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", AGENT, arguments], cwd=self.folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        return self.process

    def end(self) -> tuple[int, str, str]:
        """Wait for the agent and return its code, stdout and stderr."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, out, err

    def run(self, child: str, **options: Any) -> tuple[int, str, str]:
        """Start it and wait for its end."""
        self.start(child, **options)
        return self.end()

    def ready(self, *ranks: int) -> list[int]:
        """Wait for the ranks and return their process ids."""
        files = [self.folder / f"ready-{rank}" for rank in ranks]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def words(self, rank: int) -> list[str]:
        """Return what a rank has noted."""
        path = self.folder / f"words-{rank}"
        return path.read_text().split() if path.exists() else []


def wait_until(fulfilled: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not fulfilled():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def exists(pid: int) -> bool:
    """Tell whether there is such a process, alive or as a zombie."""
    return Path(f"/proc/{pid}").exists()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def messages(err: str) -> list[str]:
    """Return the agent's lines on stderr without their time."""
    return [line.split(" ", 1)[1] for line in err.splitlines() if line[2:3] == ":"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[AgentRun]:
    made = AgentRun(tmp_path)
    yield made
    if made.process is not None:
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()
