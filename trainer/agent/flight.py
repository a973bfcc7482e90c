"""NCCL's flight recorder, which torch keeps in every rank that uses NCCL: what it needs, and how it is asked where a rank hangs.

A rank that uses gloo has none, makes no pipe, and is not asked. What it wrote is read by torch's command `torchfrtrace`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

#: How many of its last collectives a rank remembers; an entry has some hundred bytes.
_ENTRIES = 2000
_PIPE, _DUMP = "pipe-of-rank-", "nccl-of-rank-"


class FlightRecorder:
    """Hold the folder in which ranks leave what their flight recorders hold.

    Attributes:
        environment: what a rank needs for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {
            "TORCH_FR_BUFFER_SIZE": str(_ENTRIES),
            "TORCH_FR_DUMP_TEMP_FILE": str(folder / _DUMP),
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / _PIPE),
        }

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask these ranks to write down their last collectives; waits for nobody."""
        for rank in ranks:
            with contextlib.suppress(OSError):  # no pipe, or nobody who reads it
                pipe = os.open(self._folder / f"{_PIPE}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                with contextlib.closing(os.fdopen(pipe, "wb", buffering=0)) as file:
                    file.write(b"1")

    def written(self) -> list[Path]:
        """Return the files that ranks have written."""
        return sorted(self._folder.glob(f"{_DUMP}*"))


@contextlib.contextmanager
def flight_recorder() -> Iterator[FlightRecorder]:
    """Make a folder for a node's ranks; it stays only if one of them has written into it."""
    made = FlightRecorder(Path(tempfile.mkdtemp(prefix="trainer-")))
    try:
        yield made
    finally:
        if not made.written():
            shutil.rmtree(made._folder, ignore_errors=True)
