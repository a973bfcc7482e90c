"""Find the pictures that two lists name, and check both lists as a whole before anything is returned.

How a row is written lives in `rows.py`, what its label means in `labels.py`.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.codes import DataError, SettingError
from trainer.data.pictures.index import Pictures, build_index
from trainer.data.pictures.labels import Meaning, can_be_label, find_meaning
from trainer.data.pictures.rows import FORM, read_rows
from trainer.data.pictures.wording import Faults, class_notes, classes_line, counted, shown
from trainer.data.sets import I64

FLAGS = ("--train-list", "--test-list")
NEW, MISSING = -1, -2

#: What is said of a folder that is not there, so that its files are missing.
NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def read_lists(
    train: Path | None, test: Path | None, *, root: Path | None, names: Path | None, num_classes: int | None
) -> Pictures:
    """Read both lists and check every row of them.

    Args:
        train, test: text or CSV files.
        root: folder that relative paths start from.
        names: file with a class name per line, in the order of the labels.
        num_classes: number of classes; without it and without names, what the training list has.

    Raises:
        SettingError: a path is not given, or `names` and `num_classes` contradict each other.
        DataError: a file cannot be read, or rows are wrong; the line has the first few of them, with their numbers.
    """
    root, paths = _given(root, train, test)
    files = _Files(root)
    lists = [_read(path, flag, files) for path, flag in zip(paths, FLAGS, strict=True)]
    leading = _leading(lists)
    meaning = find_meaning(leading.words, origin=leading.where, names=names, num_classes=num_classes)
    labels = [_labels(part, meaning) for part in lists]
    _raise_faults(lists, labels, root)
    splits = [build_index(root, names=part.names, labels=values) for part, values in zip(lists, labels, strict=True)]
    notes = (
        *_double_notes(lists, np.concatenate(labels)),
        *class_notes(meaning.classes, train=labels[0], test=labels[1]),
    )
    return Pictures(splits[0], splits[1], meaning.classes, notes, _facts(lists, meaning))


def _given(root: Path | None, *lists: Path | None) -> tuple[Path, list[Path]]:
    settings = dict(zip((*FLAGS, "--data-dir"), (*lists, root), strict=True))
    absent = [flag for flag, path in settings.items() if path is None]
    if root is None or absent:
        raise SettingError(
            f"{' and '.join(absent)} not set; --dataset list needs --train-list, --test-list and --data-dir, "
            "the folder that the paths in the lists start from"
        )
    try:
        os.scandir(root).close()
    except OSError as error:
        raise DataError(
            f"--data-dir {root} cannot be listed: {error.strerror}; the lists' paths start from it"
        ) from None
    return root, [path for path in lists if path is not None]


class _Files:
    """Say which files there are, from one listing of each folder, and which row named a file first."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)
        self._folders: dict[bytes, dict[bytes, int]] = {}
        self._rows = 0

    def find(self, path: bytes) -> int:
        """Take in the next row's path: NEW, MISSING, or the number of an earlier row that has it too."""
        row = self._rows
        self._rows += 1
        folder, _, name = path.rpartition(b"/")
        if path[:1] == b"/" and not folder:
            folder = b"/"
        files = self._folders.get(folder)
        if files is None:
            files = self._folders[folder] = dict.fromkeys(self._list(folder), NEW)
        earlier = files.get(name, MISSING)
        if earlier == NEW:
            files[name] = row
        return earlier

    def _list(self, folder: bytes) -> Iterator[bytes]:
        whole = folder if folder.startswith(b"/") else self._root + b"/" + folder
        try:
            with os.scandir(whole) as entries:
                yield from (entry.name for entry in entries if _is_file(entry))
        except OSError as error:
            if error.errno not in NO_FOLDER:
                raise DataError(f"folder {shown(whole)} cannot be listed: {error.strerror}") from None


def _is_file(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False  # links in a circle


@dataclass(frozen=True)
class _List:
    """Hold one list as it was read.

    Attributes:
        where: setting and path, for messages.
        kind: text or CSV, in words.
        names: path of each row's picture.
        lines: line number of each row.
        words: the different labels, in the order in which they came.
        codes: place in `words` of each row's label.
        earlier: per row: NEW, MISSING, or the number of an earlier row with the same path, counted over both lists.
    """

    where: str
    kind: str
    names: list[bytes]
    lines: I64
    words: tuple[str, ...]
    codes: I64
    earlier: I64
    faults: Faults


def _read(path: Path, flag: str, files: _Files) -> _List:
    faults = Faults()
    kind, rows = read_rows(path, flag=flag, faults=faults)
    names: list[bytes] = []
    words: dict[str, int] = {}
    lines, codes, earlier = array("q"), array("q"), array("q")
    for line, text, label in rows:
        name = text.encode()
        names.append(name)
        lines.append(line)
        codes.append(words.setdefault(label, len(words)))
        earlier.append(files.find(name))
    if not names and not faults.count:
        raise DataError(f"{flag} {path} has no samples; expected {FORM}")
    arrays = [np.array(values, np.int64) for values in (lines, codes, earlier)]
    return _List(f"{flag} {path}", kind, names, arrays[0], tuple(words), arrays[1], arrays[2], faults)


def _leading(lists: Sequence[_List]) -> _List:
    """Return the training list; if none of its labels can be one, the test list, which is then not blamed for it."""
    return next((part for part in lists if any(map(can_be_label, part.words))), lists[0])


def _labels(part: _List, meaning: Meaning) -> I64:
    """Return each row's label, or -1 where it has none, which is added to the list's faults."""
    values = np.array([meaning.label(word) for word in part.words], np.int64)
    labels = values[part.codes]
    for row in np.flatnonzero(labels < 0).tolist():
        words, remedy = meaning.fault(part.words[part.codes[row]])
        part.faults.add(int(part.lines[row]), words, remedy=remedy)
    return labels


def _raise_faults(lists: Sequence[_List], labels: Sequence[I64], root: Path) -> None:
    """Add the rows whose files are missing, and raise one error for both lists if any of their rows is wrong."""
    told = []
    for part, values in zip(lists, labels, strict=True):
        missing = np.flatnonzero((part.earlier == MISSING) & (values >= 0))
        if missing.size and missing.size == np.count_nonzero(values >= 0):
            told.append(_none_found(part, missing, root))
            continue
        for row in missing.tolist():
            part.faults.add(int(part.lines[row]), f"no file {shown(part.names[row])}", remedy=_remedy(part.names[row]))
        if part.faults.count:
            lines = counted(part.faults.count, "line is/lines are")
            told.append(f"{part.where}, pictures below {root}: {lines} wrong: {part.faults}")
    if told:
        raise DataError(". ".join(told))


def _none_found(part: _List, missing: I64, root: Path) -> str:
    name = part.names[missing[0]]
    also = f"; also, {part.faults}" if part.faults.count else ""
    return (
        f"{part.where}: 0 of {len(part.names):,} pictures found below {root}, is --data-dir right? "
        f"(line {part.lines[missing[0]]}: {', '.join(filter(None, (shown(name), _remedy(name))))}){also}"
    )


def _remedy(name: bytes) -> str:
    return "write / for the backslashes" if b"\\" in name else ""


def _double_notes(lists: Sequence[_List], labels: I64) -> Iterator[str]:
    """Warn of paths that come twice; `labels` are those of both lists."""
    start = 0
    for part in lists:
        again = part.earlier != NEW
        yield from _told(part, part.earlier >= start, "listed more than once")
        yield from _told(part, again & (part.earlier < start), f"also in {lists[0].where}")
        other = labels[part.earlier] != labels[start : start + len(part.names)]
        yield from _told(part, again & other, "listed before with another label")
        start += len(part.names)


def _told(part: _List, rows: NDArray[np.bool_], words: str) -> Iterator[str]:
    if rows.any():
        first = int(np.argmax(rows))
        count = counted(int(np.count_nonzero(rows)), "picture/pictures")
        yield f"{part.where}: {count} {words} (first: line {part.lines[first]}, {shown(part.names[first])})"


def _facts(lists: Sequence[_List], meaning: Meaning) -> tuple[str, ...]:
    found = (f"{part.where} ({part.kind}): {counted(len(part.names), 'picture/pictures')}" for part in lists)
    numbers = f"{counted(len(meaning.classes), 'class/classes')}, by number"
    return (*found, classes_line(meaning.classes) if meaning.labels else numbers)
