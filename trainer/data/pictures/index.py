"""Which files a split has, and their labels, in a few arrays: what 200,000 Python strings would cost is paid by every loader process.

Objects are counted by writing to them, so a forked process soon has a copy of each page that holds one; an array is shared as
it is. Who finds the files lives in `folders.py` and `lists.py`, who reads them in `images.py`.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.sets import I64, U8

SUFFIXES = frozenset(b".bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split())


def is_picture_name(name: bytes) -> bool:
    """Say whether a file's name ends like a picture's, in upper or lower case."""
    return name[name.rfind(b".") :].lower() in SUFFIXES


@dataclass(frozen=True)
class Index:
    """Hold the pictures of one split.

    Attributes:
        root: folder that the names start from.
        names: uint8, all names as the file system has them, one after the other.
        ends: int64 [n], where each name ends in `names`.
        labels: int64 [n].
    """

    root: Path
    names: U8
    ends: I64
    labels: I64

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.labels)

    def name(self, number: int) -> str:
        """Return the name of a picture's file, below the root."""
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.names[start : int(self.ends[number])].tobytes())

    def path(self, number: int) -> Path:
        """Return the path of a picture's file."""
        return self.root / self.name(number)

    def digest(self) -> str:
        """Return the sha256 of names and labels, wherever the root is."""
        state = hashlib.sha256(self.names.data)
        state.update(self.ends.data)
        state.update(self.labels.data)
        return state.hexdigest()


def build_index(root: Path, *, names: Iterable[str | bytes], labels: Sequence[int] | I64) -> Index:
    """Put names and labels into arrays; a name in bytes is taken as the file system has it."""
    blob, ends = bytearray(), array("q")
    for name in names:
        blob += os.fsencode(name)
        ends.append(len(blob))
    return Index(root, np.array(blob, np.uint8), np.array(ends, np.int64), np.array(labels, np.int64))


@dataclass(frozen=True)
class Pictures:
    """Hold both splits of a data set of picture files.

    Attributes:
        classes: names by label; where the data have no names, the labels as text.
        notes: what a person should hear about the data, a line each.
        facts: what was found and left out, a line each, for the log.
    """

    train: Index
    test: Index
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    facts: tuple[str, ...]
