"""Say which label a word in a list of pictures stands for: a number is one itself, a class name has a place among the names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.codes import DataError, SettingError
from trainer.data.pictures.index import is_picture_name
from trainer.data.pictures.rows import FORM, LABEL_COLUMNS, read_text
from trainer.data.pictures.wording import Faults, counted, shown, some

MOST_CLASSES = 10**6


def read_names(path: Path) -> tuple[str, ...]:
    """Read a file with a class name per line, in the order of the labels; blank lines at the end do not count.

    Raises:
        DataError: it cannot be read, has no names, or a line is blank or has the name of another.
    """
    lines = [line.strip() for line in read_text(path, flag="--class-names")]
    while lines and not lines[-1]:
        lines.pop()
    first: dict[str, int] = {}
    faults = Faults()
    for number, name in enumerate(lines, 1):
        if not name:
            faults.add(number, "no name", remedy="each class has one line, in the order of the labels")
        elif first.setdefault(name, number) != number:
            faults.add(number, f"{shown(name)} is also on line {first[name]}")
    if faults.count or not lines:
        raise DataError(f"--class-names {path}: {faults if lines else 'no names in it'}")
    return tuple(lines)


@dataclass(frozen=True)
class Meaning:
    """Say what the words mean.

    Attributes:
        classes: names by label.
        labels: by name; empty where labels are numbers and no names are known.
        numbered: whether a whole number is a label.
        origin: what the classes come from, for messages.
    """

    classes: tuple[str, ...]
    labels: Mapping[str, int]
    numbered: bool
    origin: str

    def label(self, word: str) -> int:
        """Return the label that a word stands for, or -1."""
        if self.numbered and _is_number(word):
            return int(word) if int(word) < len(self.classes) else -1
        return self.labels.get(word, -1)

    def fault(self, word: str) -> tuple[str, str]:
        """Say why a word is no label, and what is one."""
        if _is_path(word):
            return f"label {shown(word)} looks like a path", f"expected {FORM}"
        allowed = []
        if self.numbered or not self.labels:
            allowed.append("a whole number from 0" + (f" to {len(self.classes) - 1}" if self.classes else ""))
        if self.labels:
            allowed.append(f"one of the names {some(self.labels)}")
        header = "; only CSV has a header" if word.lower() in LABEL_COLUMNS else ""
        return f"label {shown(word)}", f"allowed: {' or '.join(allowed)} ({self.origin}){header}"


def find_meaning(
    words: Sequence[str], *, origin: str, names: Path | None = None, num_classes: int | None = None
) -> Meaning:
    """Find the classes: those of the file `names`, else those of the words.

    Where one word is a whole number all labels are numbers, and the classes reach to the highest. Else the words that can name a
    class are the classes, sorted. `num_classes` may add some.

    Args:
        words: the different labels of a list.
        origin: that list, for messages.

    Raises:
        SettingError: `names` and `num_classes` contradict each other.
        DataError: the file cannot be used, or there are more names than `num_classes`.
    """
    if names is not None:
        return _named(names, num_classes)
    numbers = [int(word) for word in words if _is_number(word)]
    if numbers:
        count = num_classes or max(numbers) + 1
        origin = "--num-classes" if num_classes else f"as in {origin}; --num-classes can say more"
        return Meaning(tuple(map(str, range(count))), {}, True, origin)
    found = sorted(filter(_is_name, words))
    if num_classes is not None and len(found) > num_classes:
        raise DataError(f"{origin} has {len(found)} class names, but --num-classes is {num_classes}: {some(found)}")
    unnamed = map(str, range(len(found), num_classes or 0))
    return Meaning((*found, *unnamed), {name: label for label, name in enumerate(found)}, False, f"as in {origin}")


def _named(path: Path, num_classes: int | None) -> Meaning:
    names = read_names(path)
    if num_classes not in (None, len(names)):
        has = counted(len(names), "name/names")
        raise SettingError(
            f"--num-classes is {num_classes}, but --class-names {path} has {has}; leave --num-classes out"
        )
    return Meaning(names, {name: label for label, name in enumerate(names)}, True, f"--class-names {path}")


def can_be_label(word: str) -> bool:
    """Say whether a word is a label in some data set."""
    return _is_number(word) or _is_name(word)


def _is_number(word: str) -> bool:
    """Say whether a word is a plain whole number below MOST_CLASSES; int() also takes 1_0, +1 and other scripts' digits."""
    return word.isascii() and word.isdigit() and len(word) < 20 and int(word) < MOST_CLASSES


def _is_name(word: str) -> bool:
    """Say whether a word can name a class: it is neither a number, as -1, 0.5, nan or 1e3, nor a path."""
    try:
        float(word)
    except ValueError:
        return not _is_path(word)
    return False


def _is_path(word: str) -> bool:
    return "/" in word or is_picture_name(word.encode())
