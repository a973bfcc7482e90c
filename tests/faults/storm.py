"""Kills without warning, again and again over one run: when they come, whom they hit, and what the run does then."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.conftest import PATIENCE_SECONDS, Job, Outcome, rank_pid, wait_until
from trainer import codes

#: How many of ten kills fall into each phase, and whom they hit there, in turn. Rank 0 writes the checkpoints.
PHASES = {
    "start-up": (2, ("agent", "rank 1", "loaders", "rank 0")),
    "step": (2, ("rank 1", "loaders", "rank 0", "agent")),
    "save": (4, ("rank 0", "agent", "rank 0", "rank 1", "agent", "rank 0", "agent", "loaders")),
    "evaluation": (2, ("loaders", "rank 0", "rank 1", "agent")),
}
#: The longest pause between the first sight of a phase and the kill. A save is met at one of its files instead.
PAUSES = {"start-up": 3.0, "step": 0.1, "save": 0.0, "evaluation": 0.1}
#: In the order of writing. While the manifest is the last, all of them are read back.
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
#: A start anew may mend these ends; any other is one too early.
RETRIED = {codes.UNEXPECTED, codes.PEER_LOST, 128 + signal.SIGKILL}
RANKS = 2
LOOK_SECONDS = 0.002  # a save is over soon


@dataclass(frozen=True)
class Plan:
    """What is drawn for one kill: phase and victim, the rank that is looked at, the file of a save, the pause."""

    phase: str
    victim: str
    rank: int
    file: str
    pause: float


def draw_plans(kills: int, *, seed: int) -> list[Plan]:
    """Draw the kills; their number is a multiple of ten."""
    draw, plans = random.Random(seed), list[Plan]()
    turns = {phase: iter(victims * kills) for phase, (_, victims) in PHASES.items()}
    for _ in range(kills // 10):
        phases = [phase for phase, (count, _) in PHASES.items() for _ in range(count)]
        draw.shuffle(phases)
        for phase in phases:
            victim = next(turns[phase])
            rank = int(victim[-1]) if victim.startswith("rank") else draw.randrange(RANKS)
            plans.append(Plan(phase, victim, rank, draw.choice(FILES), draw.uniform(0, PAUSES[phase])))
    return plans


@dataclass
class Strike:
    """One kill.

    Attributes:
        phase: where it fell, by what was seen right before it.
        when: in seconds of the monotonic clock, as `new_step`.
        cut: the file that a save had come to when the process that wrote it was dead; "" if no save was cut off.
        ended: why the agent started the ranks anew, or how it ended itself.
        newest: the highest step that had been done when new ranks were there.
        folders, size: what lay in the folder of checkpoints then, unfinished ones too, and its bytes.
        new_step: when the first step after `newest` was done; not a number where the next kill came before it.
    """

    victim: str
    phase: str
    when: float
    cut: str = ""
    ended: str = ""
    newest: int = 0
    folders: int = 0
    size: int = 0
    new_step: float = math.nan

    @property
    def seconds(self) -> float:
        """Return the time from the kill to the next new step, if there is one."""
        return self.new_step - self.when


class Watch:
    """Read what one command prints, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.out, self.err = process, list[str](), list[str]()
        self.steps: list[tuple[float, int]] = []
        self.heard = 0  # lines of rank 0
        readers = ((process.stdout, self._take), (process.stderr, self._take_error))
        self._threads = [threading.Thread(target=_read, args=reader, daemon=True) for reader in readers]
        for thread in self._threads:
            thread.start()

    @property
    def restarts(self) -> list[str]:
        """Return why the agent has started its ranks anew, each time."""
        messages = [json.loads(line)["message"] for line in list(self.err) if line.startswith("{")]
        return [message.split(": ", 1)[1] for message in messages if message.startswith("restart ")]

    def end(self) -> int:
        """Wait for the end, read the rest, and return the exit code as a shell tells it."""
        code = codes.from_process(self.process.wait(timeout=PATIENCE_SECONDS))
        for thread in self._threads:
            thread.join(timeout=PATIENCE_SECONDS)
        return code

    def _take(self, line: str) -> None:
        self.out.append(line)
        self.heard += '"rank": 0' in line
        if line.startswith("{") and "learning_rate" in line:
            self.steps.append((time.monotonic(), json.loads(line)["step"]))

    def _take_error(self, line: str) -> None:
        self.err.append(line)
        sys.stderr.write(line)  # pytest shows it where the test fails


def _read(stream: Iterable[str], take: Callable[[str], None]) -> None:
    for line in stream:
        take(line)


class Storm:
    """Start a command as a user would, kill its processes, and start it again where it has ended."""

    def __init__(self, job: Job, *args: str) -> None:
        self.run = job.folder / "runs" / "job"
        self.strikes: list[Strike] = []
        self._job, self._args = job, args
        self._watches: list[Watch] = []
        self._start()

    def strike(self, plan: Plan) -> None:
        """Wait for the phase, kill the victim, and see to it that there are ranks again."""
        phase = self._await(plan)
        struck = Strike(plan.victim, phase, time.monotonic())
        self.strikes.append(struck)
        for pid in self._processes(plan):
            with contextlib.suppress(ProcessLookupError):  # a loader of an evaluation that has just ended
                os.kill(pid, signal.SIGKILL)
        if plan.victim in ("agent", "rank 0"):
            wait_until(lambda: not is_alive(self._ranks[0]))
            struck.cut = self._file_of_save() if phase != "start-up" else ""
        wait_until(lambda: not any(map(is_alive, self._ranks)))
        struck.folders, struck.size = measure(self.run / "checkpoints")
        struck.ended = self._go_on()
        struck.newest = self._newest  # by now all that the old ranks said has been read

    def finish(self) -> Outcome:
        """Wait for the end of the run, without another kill."""
        code = self._agent.end()
        steps = [one for watch in self._watches for one in watch.steps]
        for struck, next_kill in zip(self.strikes, [*(one.when for one in self.strikes[1:]), math.inf], strict=True):
            new = (when for when, step in steps if step > struck.newest and when < next_kill)
            struck.new_step = next(new, math.nan)
        out, err = (
            "".join(line for watch in self._watches for line in getattr(watch, name)) for name in ("out", "err")
        )
        return Outcome(code, out, err, self.run, self._job.folder / "trace")

    # Starts

    def _start(self) -> None:
        self._watches.append(Watch(self._job.start(*self._args)))
        self._restarts = 0
        self._meet_ranks()

    def _go_on(self) -> str:
        """Wait until the agent has started the ranks anew, or start the command again where it has ended; say why."""
        agent = self._agent
        wait_until(lambda: agent.process.poll() is not None or len(agent.restarts) > self._restarts)
        if agent.process.poll() is None:
            self._restarts += 1
            self._meet_ranks()
            return agent.restarts[-1]
        code = agent.end()
        assert code in RETRIED, f"the run has ended with {code}: {''.join(agent.err)}"
        self._start()
        return f"the agent ended with {code}"

    def _meet_ranks(self) -> None:
        """Take note of the ranks of a new start; they take a second and more until they say anything."""

        def met() -> bool:
            self._ranks = self._find_ranks()
            return all(self._ranks)

        wait_until(met)
        self._began, self._heard, self._steps = time.monotonic(), self._agent.heard, len(self._agent.steps)

    def _find_ranks(self) -> list[int]:
        """Return the process ids of the ranks; 0 for one that is not there yet."""
        found = [0] * RANKS
        for rank in range(RANKS):
            with contextlib.suppress(AssertionError, OSError):
                found[rank] = rank_pid(self._agent.process.pid, rank)
        return found

    @property
    def _agent(self) -> Watch:
        return self._watches[-1]

    # Phases

    def _await(self, plan: Plan) -> str:
        """Wait for the plan's moment, and return the phase that it is in."""
        deadline, pause = time.monotonic() + PATIENCE_SECONDS, plan.pause
        while True:
            if self._is_now(plan) and plan.phase == "start-up":  # which has had its pause
                return "step" if self._has_stepped else plan.phase
            if self._is_now(plan):
                time.sleep(pause)
                if self._is_now(plan):
                    return plan.phase
                pause /= 2  # the phase was over before that
            assert self._agent.process.poll() is None, f"the run is over: {''.join(self._agent.err)}"
            assert time.monotonic() < deadline, f"waited in vain for {plan}"
            time.sleep(LOOK_SECONDS)

    def _is_now(self, plan: Plan) -> bool:
        """Tell whether it is the plan's phase, by what can be seen from outside."""
        loaders, is_heard = len(children(self._ranks[plan.rank])), self._agent.heard > self._heard
        if plan.phase == "start-up" and plan.victim == "loaders":
            return is_heard and loaders > 0  # before that, imports may have child processes
        if plan.phase == "start-up":
            return is_heard or time.monotonic() > self._began + plan.pause
        if self.strikes and self._newest <= self.strikes[-1].newest:
            return False  # the run has not gone on yet, and an unfinished save is that of the last start
        if plan.phase == "evaluation":  # which has loaders of its own
            return loaders > 1
        if plan.phase == "save":
            return any(self._unfinished(plan.file))
        return self._has_stepped and loaders == 1 and not any(self._unfinished())

    @property
    def _has_stepped(self) -> bool:
        """Tell whether this start has done a step."""
        return len(self._agent.steps) > self._steps

    @property
    def _newest(self) -> int:
        return max((step for watch in self._watches for _, step in watch.steps), default=0)

    def _unfinished(self, file: str = "") -> Iterable[Path]:
        return (self.run / "checkpoints").glob(f".tmp-save-*/{file}")

    def _file_of_save(self) -> str:
        """Return the file that an unfinished save has come to; "" if there is none."""
        return next((file for file in reversed(FILES) if any(self._unfinished(file))), "")

    def _processes(self, plan: Plan) -> list[int]:
        rank = self._ranks[plan.rank]
        return {"agent": [self._agent.process.pid], "loaders": children(rank)}.get(plan.victim, [rank])


def children(pid: int) -> list[int]:
    """Return the child processes of a process, oldest first; none where it has ended."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has reaped yet does not."""
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def measure(folder: Path) -> tuple[int, int]:
    """Return how many entries a folder has, and how many bytes are in them."""
    found = list(folder.iterdir()) if folder.exists() else []
    return len(found), sum(file.stat().st_size for path in found for file in (path, *path.rglob("*")) if file.is_file())
