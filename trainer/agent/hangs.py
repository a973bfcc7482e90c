"""Hangs, as the agent sees them: from outside, so also a rank that holds the interpreter's lock, and one that is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer import log
from trainer.beat import Records, Sign, Watch

_LOOK_SECONDS = 1.0
#: How long the ranks have for printing their stacks, together, and the least for each.
_STACKS_SECONDS, _LEAST_STACK_SECONDS = 2.0, 0.1
#: How long NCCL's flight recorder has for its file after that: it hears of a request within a second.
_RECORDER_SECONDS = 5.0

#: What NCCL's flight recorder reads: the beginnings of the names of the pipe on which a rank is asked, and of the file that it
#: writes then; the rank's number follows. Up to some release of torch there is no pipe unless the number of entries is set.
_PIPE, _FILE, _OLD_FILE = (
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
_ENTRIES, _OLD_ENTRIES, _DEFAULT_ENTRIES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"

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
            # Ranks that wait for one another fall silent together: the one that they wait for may be due a moment later.
            overdue = self._overdue(signs, pids, at=now + _LOOK_SECONDS)
        return {index: _describe(signs[index], now=now, state=_state(pids[index])) for index in overdue}

    def _overdue(self, signs: list[Sign], pids: Mapping[int, int], *, at: float) -> list[int]:
        late = [watch.is_overdue(sign, now=at) for sign, watch in zip(signs, self._watches, strict=True)]
        return [index for index, is_late in enumerate(late) if is_late and index in pids]


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

    A stopped one is continued with the request waiting for it, so that it prints where it was stopped. Where ranks use NCCL, its
    flight recorder is asked, too.
    """
    asked, since = [_ask_recorder(rank, process.pid) for rank, process in processes.items()], time.time_ns()
    seconds = max(_STACKS_SECONDS / len(processes), _LEAST_STACK_SECONDS)
    for rank, process in processes.items():
        log.warning(f"stacks of rank {rank}, process {process.pid}:")
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGCONT)
        time.sleep(seconds)  # stacks are written bit by bit, and those of two ranks would be mixed
    _wait_for_recorders([file for file in asked if file], since=since)


def _ask_recorder(rank: int, pid: int) -> Path | None:
    """Ask NCCL's flight recorder in a rank for what it knows and return the file that it will write; None where there is none."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
        # Without waiting for a reader: where the rank has not opened its pipe, or ended, that is an error.
        pipe = os.open(f"{variables[_PIPE]}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except (OSError, KeyError):
        return None
    with contextlib.suppress(OSError), open(pipe, "wb", buffering=0) as request:
        request.write(b"1")
    prefix = variables.get(_FILE) or variables.get(_OLD_FILE)
    return Path(f"{prefix}{rank}") if prefix else None


def _wait_for_recorders(files: list[Path], *, since: int) -> None:
    """Wait for the files and say where they are; `since` is in nanoseconds, so that those of an earlier hang do not count."""
    deadline, written = time.monotonic() + _RECORDER_SECONDS, list[Path]()
    while len(written) < len(files) and time.monotonic() < deadline:
        time.sleep(0.2)  # also for the rest of a file that has begun
        written = [file for file in files if file.exists() and file.stat().st_mtime_ns > since]
    for folder in sorted({file.parent for file in written}):
        log.warning(f"NCCL's flight recorder wrote what each rank's collectives did: torchfrtrace {folder}")


@contextlib.contextmanager
def recording(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Give the variables with which NCCL's flight recorder in the ranks writes files, should the agent ask for them.

    They lie in a new folder, which goes at the end where there are none, and stays where there are some.
    """
    folder, variables = None, dict[str, str]()
    with contextlib.suppress(OSError):  # without a place for files nothing is recorded
        folder = Path(tempfile.mkdtemp(prefix="trainer-nccl-"))
        os.mkfifo(folder / "try.pipe")  # NCCL ends a process in which it cannot make its pipe
        variables = recorder_environment(environ, folder=folder)
    try:
        yield variables
    finally:
        if folder is not None:
            for pipe in folder.glob("*.pipe"):
                pipe.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()


def recorder_environment(environ: Mapping[str, str], *, folder: Path) -> dict[str, str]:
    """Return what to add to `environ` so that NCCL's flight recorder writes to files in `folder` when it is asked."""
    wanted = {_PIPE: f"{folder}/pipe_", _OLD_ENTRIES: environ.get(_ENTRIES) or _DEFAULT_ENTRIES}
    if not environ.get(_OLD_FILE):  # the new name would hide what the user says by the old one
        wanted[_FILE] = f"{folder}/rank_"
    return {name: value for name, value in wanted.items() if not environ.get(name)}
