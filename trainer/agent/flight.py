"""NCCL's flight recorder, which torch keeps in every rank that uses NCCL: what it needs, and how it is asked where a rank hangs.

A rank that uses gloo has none, makes no pipe, and is not asked. What it wrote is read by torch's command `torchfrtrace`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

#: Of each, the rank's number follows: the pipe that a rank reads, as NAME0.pipe, and the file that it writes then.
_PIPE, _DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
#: How many of its last collectives a rank remembers; 2000, where nobody says.
_ENTRIES = "TORCH_FR_BUFFER_SIZE"
#: Older names, which still count. Of older releases the pipe is made only where the number is set, by this one.
_OLD_DUMP, _OLD_ENTRIES = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
#: A rank looks at its pipe each second, and then has to write.
_WAIT_SECONDS = 5.0


class FlightRecorder:
    """Ask the ranks of a node what their flight recorders hold.

    Args:
        environ: what is set already, and stays.
        folder: where pipes and files go, but for those that `environ` puts elsewhere.

    Attributes:
        environment: what a rank needs for it.
    """

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        wanted = {_PIPE: f"{folder}/pipe_", _DUMP: f"{folder}/rank_", _OLD_ENTRIES: environ.get(_ENTRIES) or "2000"}
        if environ.get(_OLD_DUMP):
            del wanted[_DUMP]  # which would hide it
        self.environment = {name: value for name, value in wanted.items() if not environ.get(name)}
        known = {**environ, **self.environment}
        self._pipe, self._dump = known[_PIPE], known.get(_DUMP) or known[_OLD_DUMP]
        self._asked, self._since = list[int](), 0

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask these ranks to write down their last collectives; waits for nobody."""
        self._asked, self._since = [], time.time_ns() - 10**9  # a file's time may be that of the last tick
        for rank in ranks:
            with contextlib.suppress(OSError):  # no pipe, or nobody who reads it
                pipe = os.open(f"{self._pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                with os.fdopen(pipe, "wb", buffering=0) as file:
                    file.write(b"1")
                self._asked.append(rank)

    def written(self) -> list[Path]:
        """Return the files of the ranks that could be asked; waits some seconds for those that are not there yet."""
        files, deadline = [Path(f"{self._dump}{rank}") for rank in self._asked], time.monotonic() + _WAIT_SECONDS
        while not all(map(self._is_new, files)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [file for file in files if self._is_new(file)]

    def _is_new(self, file: Path) -> bool:
        return file.exists() and file.stat().st_size > 0 and file.stat().st_mtime_ns >= self._since


@contextlib.contextmanager
def flight_recorder(environ: Mapping[str, str]) -> Iterator[FlightRecorder | None]:
    """Make a folder for a node's ranks; it stays only if one of them has written into it. None: there can be no such folder."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="trainer-nccl-"))
        os.mkfifo(folder / "try.pipe")  # torch ends the process where it cannot make its pipe
        made = FlightRecorder(environ, folder)
    except OSError:
        made = None
    try:
        yield made
    finally:
        if folder is not None:
            for pipe in folder.glob("*.pipe"):
                pipe.unlink()
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
