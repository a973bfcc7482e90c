"""Numbers in files that another process reads while they are written: prometheus_client's multiprocess files, by name instead of pid.

A number is found again by whoever opens the same name, so a restarted rank goes on counting; and it outlives its writer. The client's
own file class lays a file out; a number is then written by one store to its place. The client's value classes are not used: they are
chosen for a whole process by an environment variable, which would change what a user's own metrics do.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.metrics.table import Kind

#: The whole catalogue takes a third of it at most, so a file never grows: growing ends the process where the disk is full.
FILE_BYTES = 1 << 15
#: How a file is called until all its numbers are in it: a name that no reader looks for.
_UNPUBLISHED = ".new"


class Key(NamedTuple):
    """Say which number it is, in the words of the reader: `family` is the metric's name without _total."""

    family: str
    name: str
    labels: Mapping[str, str]
    help: str


class Cell:
    """Hold one number of a file, and beside it a mark: a second number, which is not exported.

    A gauge's mark says which of several processes wrote last; one that has none was never written, and is absent.
    """

    __slots__ = ("_at", "_numbers", "value")

    def __init__(self, numbers: memoryview[float], at: int) -> None:
        self._numbers, self._at = numbers, at
        self.value: float = numbers[at]

    def add(self, amount: float) -> None:
        """Count `amount` more."""
        self.value += amount
        self._numbers[self._at] = self.value

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._numbers[self._at] = value
        self._numbers[self._at + 1] = time.monotonic()  # which all processes share, and which never goes back

    @property
    def mark(self) -> float:
        """Return the number beside; 0.0 where there was none yet."""
        return float(self._numbers[self._at + 1])

    def note(self, mark: float) -> None:
        """Keep a number beside a counter's, for the next start."""
        self._numbers[self._at + 1] = mark


def nothing() -> Cell:
    """Return a number that is nobody's: it can be written, and nobody reads it."""
    return Cell(memoryview(bytearray(16)).cast("d"), 0)


class Files:
    """Keep the files of one process in the node's folder.

    Args:
        name: what the files are kept by: a rank's, whichever process it is. No two living processes may have the same.
    """

    def __init__(self, folder: Path, *, name: str) -> None:
        assert "_" not in name, "the reader splits file names at it"
        self._folder, self._name = folder, name

    def cells(self, kind: Kind, *, keys: Sequence[Key]) -> list[Cell]:
        """Return the numbers that have these keys in the file of one kind; those that are new are 0.

        Raises:
            OSError: the folder is not there, or there is no room.
        """
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        prefix = "gauge_mostrecent" if kind == "gauge" else kind
        path = self._folder / f"{prefix}_{self._name}.db"
        is_new = not path.exists()
        working = path.with_name(path.name + _UNPUBLISHED) if is_new else path
        if is_new:
            _allocate(working)
        texts = [mmap_key(key.family, key.name, [*key.labels], [*key.labels.values()], key.help) for key in keys]
        layout = MmapedDict(str(working))
        for text in texts:
            layout.read_value(text)  # makes room for it
        layout.close()
        places = {text: place for text, _, _, place in MmapedDict.read_all_values_from_file(str(working))}
        numbers = _map(working)
        if is_new:
            working.rename(path)
        return [Cell(numbers, places[text] // numbers.itemsize) for text in texts]


def _allocate(path: Path) -> None:
    """Make a file whose bytes are really there: writing through a map to a full disk would end the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
    finally:
        os.close(fd)


def _map(path: Path) -> memoryview[float]:
    fd = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(fd, 0)).cast("d")
    finally:
        os.close(fd)
