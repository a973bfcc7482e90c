"""A disk that keeps nothing but what was synced: what can be left of recorded file effects when the power fails.

The worst that POSIX allows is taken: a file's bytes are gone until the file was synced, and of the changes of a folder's names
since the folder was synced any choice may have reached the disk. `Recorded` notes the effects while they really happen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint import Files

#: Kind, path, and what else the effect has: data, or the other name.
Effect = tuple[str, Path, bytes | Path | None]

#: Names to bytes of files, or to folders.
Tree = dict[str, "bytes | Tree"]


class Recorded(Files):
    """Do and note every effect."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.effects.append(("mkdir", path, None))

    def write(self, path: Path, data: bytes | memoryview) -> None:
        super().write(path, data)
        self.effects.append(("write", path, bytes(data)))

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.effects.append(("sync", path, None))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.effects.append(("rename", source, target))

    def rmtree(self, path: Path) -> None:
        super().rmtree(path)
        self.effects.append(("rmtree", path, None))


@dataclass
class File:
    data: bytes
    synced: bool = False

    def left(self) -> Iterator[bytes]:
        yield self.data if self.synced else b""


@dataclass
class Folder:
    synced: dict[str, Folder | File] = field(default_factory=dict)
    changes: list[dict[str, Folder | File | None]] = field(default_factory=list)

    def names(self) -> dict[str, Folder | File]:
        return _changed(self.synced, self.changes)

    def left(self) -> Iterator[Tree]:
        """Yield every tree that can be there after the power failed."""
        for count in range(len(self.changes) + 1):
            for some in itertools.combinations(self.changes, count):
                nodes = _changed(self.synced, list(some))
                for content in itertools.product(*(list(node.left()) for node in nodes.values())):
                    yield dict(zip(nodes, content, strict=True))


def _changed(
    names: dict[str, Folder | File], changes: list[dict[str, Folder | File | None]]
) -> dict[str, Folder | File]:
    result = dict(names)
    for change in changes:
        for name, node in change.items():
            result.pop(name, None)
            if node is not None:
                result[name] = node
    return result


class Disk:
    """A simulated disk that holds, safely, what is under `root` now."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, _loaded(root)

    def apply(self, effect: Effect) -> None:
        kind, path, more = effect
        if kind == "sync":
            node = self._node(path)
            if isinstance(node, File):
                node.synced = True
            else:
                node.synced, node.changes = node.names(), []
            return
        parent = self._node(path.parent)
        assert isinstance(parent, Folder)
        if kind == "mkdir":
            parent.changes.append({path.name: Folder()})
        elif kind == "write":
            assert isinstance(more, bytes)
            parent.changes.append({path.name: File(more)})
        elif kind == "rename":
            assert isinstance(more, Path)
            parent.changes.append({path.name: None, more.name: parent.names()[path.name]})
        else:
            gone = self._node(path)
            if isinstance(gone, Folder):
                gone.changes.append(dict.fromkeys(gone.names()))
            parent.changes.append({path.name: None})

    def _node(self, path: Path) -> Folder | File:
        node: Folder | File = self.top
        for name in path.relative_to(self.root).parts:
            assert isinstance(node, Folder)
            node = node.names()[name]
        return node

    def left(self) -> list[Tree]:
        """Return every different tree that can be there if the power fails now."""
        return list({repr(tree): tree for tree in self.top.left()}.values())


def _loaded(folder: Path) -> Folder:
    return Folder(
        {path.name: _loaded(path) if path.is_dir() else File(path.read_bytes(), True) for path in folder.iterdir()}
    )


def put(tree: Tree, folder: Path) -> None:
    """Write a tree into a real folder."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            put(content, folder / name)
        else:
            (folder / name).write_bytes(content)
