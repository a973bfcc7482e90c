"""Find pictures that a data set of class folders has twice, as far as that is cheap: links to one file, and same names.

A picture that is in training and test lets the test score look better than it is.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trainer.data.pictures.wording import shown
from trainer.data.sets import U64

#: Pairs of files that are looked at; each costs two calls of stat, and the reading of both files where their sizes are equal.
MOST_PAIRS = 500


def twin_notes(root: Path, *, train: Sequence[bytes], val: Sequence[bytes], inodes: U64) -> Iterator[str]:
    """Warn of pictures that are there twice.

    Looked at are files with one inode number, anywhere, and files with one name in one class of both splits.

    Args:
        train, val: names below the root, of the form SPLIT/CLASS/name.
        inodes: of the pictures of train, then of val.
    """
    names = (*train, *val)
    pairs = sorted({*_links(inodes), *_namesakes(train, val)})
    same = [pair for pair in pairs[:MOST_PAIRS] if _are_same(*(root / os.fsdecode(names[row]) for row in pair))]
    across = [pair for pair in same if pair[0] < len(train) <= pair[1]]
    within = sorted(set(same) - set(across))
    least = "at least " if len(pairs) > MOST_PAIRS else ""
    for found, where in ((across, "in train/ and in val/"), (within, "twice in train/ or in val/")):
        if found:
            first, second = (shown(names[row]) for row in found[0])
            are = "picture is" if len(found) == 1 else "pictures are"
            yield f"{least}{len(found):,} {are} {where} (first: {first} and {second})"


def _links(inodes: U64) -> Iterator[tuple[int, int]]:
    """Pair each row with the first that has its inode number; numbers of different disks may be equal by chance."""
    _, firsts, groups = np.unique(inodes, return_index=True, return_inverse=True)
    first = firsts[groups]
    for row in np.flatnonzero(first != np.arange(len(inodes))).tolist():
        yield int(first[row]), row


def _namesakes(train: Sequence[bytes], val: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Pair the pictures of train/ and val/ that have the same class and name."""
    rows = {name.partition(b"/")[2]: row for row, name in enumerate(val, len(train))}
    for row, name in enumerate(train):
        other = rows.get(name.partition(b"/")[2])
        if other is not None:
            yield row, other


def _are_same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second) or filecmp.cmp(first, second, shallow=False)
    except OSError:
        return False  # reading the pictures will tell
