"""What a zip or tar file holds, member by member, in one form; what must not be unpacked is refused here.

Refused are names outside of the folder, links that point outside, devices, pipes, and zips with a password. How members get onto the disk
lives in `archives.py`.
"""

from __future__ import annotations

import functools
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, cast

from trainer.codes import DataError

ZIP_HEADS = (b"PK\3\4", b"PK\5\6")
BLOCK = 2**20


@dataclass(frozen=True)
class Member:
    """Be one file, folder or link of an archive.

    Attributes:
        name: as the archive has it.
        parts: its path from the folder on, checked.
        size: bytes of the file.
        open: opens the file; None: it is a folder or a link.
        target: the path, from the folder on, that a link points to.
    """

    name: str
    parts: tuple[str, ...]
    size: int = 0
    open: Callable[[], IO[bytes]] | None = None
    target: tuple[str, ...] | None = None


def read_members(archive: Path) -> Iterator[Member]:
    """Go through the members of a zip or tar file, told by content; a file can be opened until the next one is asked for.

    Raises:
        DataError: a member is refused, or the archive is cut.
        tarfile.TarError, zipfile.BadZipFile and what decompression raises: it is damaged, or no archive.
    """
    with archive.open("rb") as file:
        head = file.read(4)
    return _zip_members(archive) if head in ZIP_HEADS else _tar_members(archive)


def refusal(archive: Path, name: str, *, why: str) -> DataError:
    """Return the error that says why a member is not unpacked."""
    return DataError(f"{archive}: its member {name[:200]!r} {why}; refused, and nothing of it was put into place")


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise refusal(archive, info.filename, why="is a link or a device, which a zip should not have")
            if info.flag_bits & 1:
                raise refusal(archive, info.filename, why="needs a password")
            parts = _parts(archive, info.filename, info.filename.replace("\\", "/"))  # some Windows tools write it so
            opening = None if info.is_dir() else functools.partial(file.open, info)
            yield Member(info.filename, parts, info.file_size, opening)


class _Header(tarfile.TarInfo):
    """Take a header that cannot be read for damage; tarfile itself takes it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the end mark
            raise tarfile.ReadError(f"{error}, no end mark") from None


def _tar_members(archive: Path) -> Iterator[Member]:
    with tarfile.open(archive, tarinfo=_Header) as file:
        while (info := file.next()) is not None:
            file.members.clear()  # type: ignore[attr-defined]  # it would keep them all: 1 kB each
            yield _tar_member(archive, file, info)
        rest = cast(IO[bytes], file.fileobj)
        while block := rest.read(BLOCK):  # to the end, where a compressed file has its checksum
            if any(block):
                raise DataError(f"{archive} goes on after its end mark: damaged, or several archives in one file")


def _tar_member(archive: Path, file: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    parts = _parts(archive, info.name, info.name)
    if info.isdir():
        return Member(info.name, parts)
    if info.isreg():
        return Member(info.name, parts, info.size, functools.partial(_opened, file, info))
    if info.issym():
        return Member(info.name, parts, target=_resolved(archive, info, parts[:-1]))
    if info.islnk():
        return Member(info.name, parts, target=_resolved(archive, info, ()))
    raise refusal(archive, info.name, why="is a device, a pipe or of an unknown kind")


def _opened(file: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    return cast(IO[bytes], file.extractfile(info))  # None for what is no file alone


def _parts(archive: Path, name: str, path: str) -> tuple[str, ...]:
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or ".." in parts:
        raise refusal(archive, name, why="lies outside of the folder")
    return parts


def _resolved(archive: Path, info: tarfile.TarInfo, start: Sequence[str]) -> tuple[str, ...]:
    """Return what a link points to, from the folder on; exact, since no link is ever written as one."""
    parts = [*start]
    outside = info.linkname.startswith("/")
    for part in info.linkname.split("/"):
        if part == "..":
            outside = outside or not parts
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    if outside:
        raise refusal(archive, info.name, why=f"points outside of the folder, to {info.linkname[:200]!r}")
    return tuple(parts)
