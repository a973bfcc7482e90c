"""Hangs, as the agent sees them: from outside, so also a rank that holds the interpreter's lock, and one that is stopped."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from trainer import log
from trainer.beat import Records, Sign, Watch

_LOOK_SECONDS = 1.0
#: How long the ranks have for printing their stacks, together, and the least for each.
_STACKS_SECONDS, _LEAST_STACK_SECONDS = 2.0, 0.1

_STATES = {
    "T": "it is stopped, by a signal",
    "t": "it is stopped, by a debugger",
    "D": "it waits in the kernel, as for a disk or device",
    "Z": "it has ended",
}


class Hangs:
    """Look at the ranks' signs of life, and find those whose next one is overdue.

    Attributes:
        seconds: how long to wait between two looks.
    """

    def __init__(self, records: Records | None) -> None:
        self.seconds = _LOOK_SECONDS if records else 3600.0
        self._records = records
        self._watches = [Watch() for _ in (records.read() if records else [])]

    def find(self, pids: Mapping[int, int]) -> dict[int, str]:
        """Return what there is to say of each rank that is hung, by its number on the node; `pids` are those that run."""
        if self._records is None:
            return {}
        now, signs = time.monotonic(), self._records.read()
        overdue = self._overdue(signs, pids, at=now)
        if overdue:
            # Ranks that wait for one another fall silent together: the one they wait for may be due a moment later.
            overdue = self._overdue(signs, pids, at=now + _LOOK_SECONDS)
        return {index: _describe(signs[index], now=now, state=_state(pids[index])) for index in overdue}

    def _overdue(self, signs: list[Sign], pids: Mapping[int, int], *, at: float) -> list[int]:
        late = [watch.is_overdue(sign, now=at) for sign, watch in zip(signs, self._watches, strict=True)]
        return [index for index in pids if late[index]]


def _describe(sign: Sign, *, now: float, state: str) -> str:
    line = sign.silence(now)
    return f"{line}; {_STATES[state]}" if state in _STATES else line


def _state(pid: int) -> str:
    """Return the letter of a process's state, or "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def show_stacks(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Have each rank print the stacks of its threads (`faulthandler`, on SIGUSR1), one rank after the other.

    A stopped one is continued with the request waiting for it, so that it prints where it was stopped.
    """
    seconds = max(_STACKS_SECONDS / len(processes), _LEAST_STACK_SECONDS)
    for rank, process in processes.items():
        log.warning(f"stacks of rank {rank}, process {process.pid}:")
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGCONT)
        time.sleep(seconds)  # stacks are written bit by bit, and those of two ranks would be mixed
