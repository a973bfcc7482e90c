"""Find the pictures of a data set whose classes are folders: train/CLASS/picture and val/CLASS/picture.

Pictures in folders below a class folder belong to the class. Classes and pictures are sorted by the bytes of their names, so
that a label and a sample's number are the same on every file system. Which pictures are there twice lives in `twins.py`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trainer.codes import DataError
from trainer.data.pictures.index import SUFFIXES, Index, Pictures, build_index, is_picture_name
from trainer.data.pictures.twins import twin_notes
from trainer.data.pictures.wording import MOST, class_notes, classes_line, counted, shown, some
from trainer.data.sets import I64

#: What zip, a NAS and a file system leave behind; it is ignored like names with a leading dot.
LEFT_BEHIND = frozenset({b"__MACOSX", b"@eaDir", b"lost+found"})

SPLITS = ("train", "val")
PICTURE, FOLDER, BROKEN_LINK, OTHER = range(4)


class _Split:
    """Collect the pictures of train/ or val/: their names below the root, their inode numbers, how many each class has."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root
        self.root = os.fsencode(root)
        self.folder = self.root + b"/" + name.encode()
        self.folders: frozenset[bytes] = frozenset()
        self.names: list[bytes] = []
        self.inodes = array("Q")
        self.counts: list[int] = []
        self.others = self.broken = 0
        self.some_others: list[bytes] = []
        self.some_broken: list[bytes] = []

    def take(self, found: Sequence[tuple[bytes, int]]) -> None:
        """Take in the pictures of the next class: paths and inode numbers."""
        self.names += [path[len(self.root) + 1 :] for path, _ in found]
        self.inodes.extend(inode for _, inode in found)
        self.counts.append(len(found))

    def leave_out(self, others: list[bytes], broken: list[bytes]) -> None:
        """Count what is no picture, and the links to pictures that are not there; keep the first names."""
        self.others += len(others)
        self.some_others = sorted(self.some_others + others)[:MOST]
        self.broken += len(broken)
        self.some_broken = sorted(self.some_broken + broken)[:MOST]

    def labels(self) -> I64:
        """Return the label of each picture."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def index(self) -> Index:
        """Return the pictures in arrays."""
        return build_index(self.path, names=self.names, labels=self.labels())

    def __str__(self) -> str:
        return f"{os.fsdecode(self.folder)}/"


def scan_folders(root: Path, *, allow_empty: bool) -> Pictures:
    """Find the pictures below train/ and val/; the classes are the folders in train/.

    Args:
        allow_empty: whether a class may have no training picture.

    Raises:
        DataError: there are no such folders, they cannot be listed, or do not fit each other; the line says what is there.
    """
    _check_layout(root)
    train, val = (_Split(root, name) for name in SPLITS)
    classes = _class_folders(train)
    _check_classes(train, val, classes)
    for split in (train, val):
        for name in classes:
            _find_pictures(split, name)
    _check_pictures(train, val, classes, allow_empty=allow_empty)
    names = tuple(name.decode(errors="backslashreplace") for name in classes)
    notes = (
        *_link_notes(train),
        *_link_notes(val),
        *twin_notes(root, train=train.names, val=val.names, inodes=np.array(train.inodes + val.inodes, np.uint64)),
        *class_notes(names, train=train.labels(), test=val.labels()),
    )
    return Pictures(train.index(), val.index(), names, notes, (_fact(train), _fact(val), classes_line(names)))


def _entries(folder: bytes) -> Iterator[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise DataError(f"folder {shown(folder)} cannot be listed: {error.strerror}") from None


def _kind(entry: os.DirEntry[bytes]) -> int:
    """Say what an entry is; links are followed. It costs no system call but for links."""
    name = entry.name
    if name[:1] == b"." or name in LEFT_BEHIND:
        return OTHER
    is_picture = is_picture_name(name)
    try:
        if is_picture and entry.is_file():
            return PICTURE
        if entry.is_dir():
            return FOLDER
    except OSError:
        pass  # links in a circle lead nowhere either
    return BROKEN_LINK if is_picture and entry.is_symlink() else OTHER


def _class_folders(split: _Split) -> list[bytes]:
    """List a split's folder; what else is in it is left out."""
    kinds = [(entry.name, _kind(entry)) for entry in _entries(split.folder)]
    split.folders = frozenset(name for name, kind in kinds if kind == FOLDER)
    split.leave_out([name for name, kind in kinds if kind != FOLDER], [])
    return sorted(split.folders)


def _find_pictures(split: _Split, class_name: bytes) -> None:
    """Add the pictures of one class to a split, if it has the class.

    No link leads into a folder that was entered for this class before, or to the split or the root: so links in a circle end.
    """
    found: list[tuple[bytes, int]] = []
    others: list[bytes] = []
    broken: list[bytes] = []
    entered = {_identity(split.root), _identity(split.folder)}
    waiting = [(split.folder + b"/" + class_name, True)] if class_name in split.folders else []
    while waiting:
        folder, is_link = waiting.pop()
        identity = _identity(folder)
        if is_link and identity in entered:
            continue
        entered.add(identity)
        inside = []
        for entry in _entries(folder):
            kind = _kind(entry)
            if kind == PICTURE:
                found.append((entry.path, entry.stat().st_ino if entry.is_symlink() else entry.inode()))
            elif kind == FOLDER:
                inside.append((entry.path, entry.is_symlink()))
            else:
                (broken if kind == BROKEN_LINK else others).append(entry.path[len(split.folder) + 1 :])
        waiting += sorted(inside, reverse=True)
    split.take(sorted(found))
    split.leave_out(others, broken)


def _identity(folder: bytes) -> tuple[int, int]:
    try:
        status = Path(os.fsdecode(folder)).stat()
    except OSError as error:
        raise DataError(f"folder {shown(folder)} cannot be read: {error.strerror}") from None
    return status.st_dev, status.st_ino


def _check_layout(root: Path) -> None:
    expected = "expected train/ and val/ in it, with a folder for each class"
    try:
        there = _folders(root)
    except DataError as error:
        raise DataError(f"--data-dir: {error}; {expected}") from None
    missing = [f"{name}/" for name in SPLITS if name not in there]
    if missing:
        near = [path for path in (root.parent, *(root / name for name in there)) if _has_splits(path)]
        hint = f"; --data-dir {near[0]} has both" if near else ""
        found = some([f"{name}/" for name in there]) or "no folder"
        raise DataError(f"--data-dir {root} has no {' and no '.join(missing)} but {found}{hint}; {expected}")


def _folders(folder: Path) -> list[str]:
    return sorted(os.fsdecode(entry.name) for entry in _entries(os.fsencode(folder)) if _kind(entry) == FOLDER)


def _has_splits(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in SPLITS)


def _check_classes(train: _Split, val: _Split, classes: Sequence[bytes]) -> None:
    if not classes:
        there = f"{counted(train.others, 'file/files')} ({some(train.some_others)})" if train.others else "nothing"
        raise DataError(
            f"{train} has no class folder but {there}; put the pictures of each class into a folder of its own"
        )
    unknown = sorted(set(_class_folders(val)) - set(classes))
    if unknown:
        raise DataError(
            f"{val} has {counted(len(unknown), 'class/classes')} that {train} has not: {some(unknown)}; "
            f"{train} has {some(classes)}"
        )


def _check_pictures(train: _Split, val: _Split, classes: Sequence[bytes], *, allow_empty: bool) -> None:
    for split in (train, val):
        if not split.names:
            raise DataError(
                f"{split} has no picture in its class folders but {_others(split)}; pictures end in {_suffixes()}"
            )
    empty = [name for name, count in zip(classes, train.counts, strict=True) if not count]
    if empty and not allow_empty:
        raise DataError(
            f"{train} has {counted(len(empty), 'class/classes')} without pictures: {some(empty)}; {_others(train)} left out; "
            "remove the folder, add pictures, or set --empty-classes allow"
        )


def _suffixes() -> str:
    return " ".join(sorted(suffix.decode() for suffix in SUFFIXES))


def _others(split: _Split) -> str:
    count = counted(split.others, "other file/other files")
    more = ", ..." if split.others > len(split.some_others) else ""
    return f"{count} ({some(split.some_others)}{more})" if split.others else count


def _link_notes(split: _Split) -> Iterator[str]:
    if split.broken:
        yield f"{split}: {counted(split.broken, 'link/links')} to pictures lead nowhere: {some(split.some_broken)}"


def _fact(split: _Split) -> str:
    classes = sum(1 for count in split.counts if count)
    found = f"{counted(len(split.names), 'picture/pictures')} in {counted(classes, 'class/classes')}"
    return f"{split}: {found}" + (f"; {_others(split)} ignored" if split.others else "")
