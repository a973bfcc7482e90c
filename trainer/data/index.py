"""Which files a split has, and their labels, in a few arrays: what 200,000 Python strings would cost is paid by every loader process.

Objects are counted by writing to them, so a forked process soon has a copy of each page that holds one; an array is shared as
it is. Who finds the files lives in `folders.py` and `lists.py`, who reads them in `images.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.sets import I64, U8


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


def build_index(root: Path, *, names: Sequence[str], labels: Sequence[int]) -> Index:
    """Put names and labels into arrays."""
    encoded = [os.fsencode(name) for name in names]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), dtype=np.int64)
    blob = np.frombuffer(b"".join(encoded), np.uint8)
    return Index(root, blob, ends, np.array(labels, np.int64))


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
