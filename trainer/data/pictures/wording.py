"""How file names, classes and faults are told in one line of bounded length, however many there are.

What is a fault is for `rows.py`, `lists.py` and `folders.py` to say.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from trainer.data.sets import I64

MOST = 5  # of a kind, told by name
MOST_CHARACTERS = 100  # of one name


def shown(name: str | bytes) -> str:
    """Return a name in quotes, on one line, shortened, and printable whatever its bytes are."""
    text = name.decode(errors="backslashreplace") if isinstance(name, bytes) else name
    return repr(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...")


def some(names: Collection[str | bytes]) -> str:
    """Return the first few names, and how many more there are."""
    words = [shown(name) for name, _ in zip(names, range(MOST), strict=False)]
    more = len(names) - len(words)
    return ", ".join(words) + (f" and {more:,} more" if more else "")


def counted(count: int, nouns: str) -> str:
    """Return a number and its noun of `picture/pictures`: `1 picture`, `1,200 pictures`."""
    one, many = nouns.split("/")
    return f"{count:,} {one if count == 1 else many}"


def classes_line(classes: Sequence[str]) -> str:
    """Return how many classes there are, and which label the first few have."""
    named = [f"{label} is {shown(name)}" for label, name in enumerate(classes[:MOST])]
    more = len(classes) - len(named)
    return f"{counted(len(classes), 'class/classes')}: {', '.join(named)}" + (f" and {more:,} more" if more else "")


class Faults:
    """Count what is wrong with the lines of one file, and keep the words of the first few."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[tuple[int, str, str]] = []

    def add(self, line: int, words: str, *, remedy: str = "") -> None:
        """Take in one fault; they may come in any order. A remedy is told once, for all lines that it is for."""
        self.count += 1
        bisect.insort(self._first, (line, words, remedy))
        del self._first[MOST:]

    def __str__(self) -> str:
        """Return the faults of the lowest lines, how many more there are, and what to do about them."""
        told = [f"line {line}: {words}" for line, words, _ in self._first]
        more = self.count - len(told)
        remedies = dict.fromkeys(remedy for _, _, remedy in self._first if remedy)
        return "; ".join([*told, *([f"and {more:,} more"] if more else []), *remedies])


def class_notes(classes: Sequence[str], *, train: I64, test: I64) -> Iterable[str]:
    """Warn of classes without pictures, and of pictures that are all of one class.

    Args:
        train, test: labels.
    """
    for labels, split in ((train, "training"), (test, "test")):
        empty = [classes[label] for label in np.flatnonzero(np.bincount(labels, minlength=len(classes)) == 0).tolist()]
        if empty:
            have = "has" if len(empty) == 1 else "have"
            yield f"{len(empty):,} of {counted(len(classes), 'class/classes')} {have} no {split} picture: {some(empty)}"
    if train.min() == train.max():
        yield f"all training pictures are of one class, {shown(classes[train[0]])}: there is nothing to learn, accuracy means nothing"
