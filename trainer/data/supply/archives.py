"""Unpack a zip or tar file into a folder: only what stays inside, and whole or not at all, also after a kill.

Everything is written to `.unpacking` first, which is worthless until its last byte. Then it is renamed to `.unpacked`, which is
complete, and its entries are renamed into place; whoever finds `.unpacked` goes on with that. Last comes the marker
`.unpacked-<archive>.json`, which says that there is nothing to do. (Against a loss of power the files are not secured: that would
cost a wait for each.) One process at a time may be at it: `once.py` holds the lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import lzma
import os
import shutil
import stat
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer import log
from trainer.codes import DataError, SettingError, TrainerError
from trainer.data.supply.members import Member, read_members, refusal

PARTIAL, READY = ".unpacking", ".unpacked"
ENTRIES, MARKER = "entries", "marker.json"
BLOCK = 2**20

#: So many of the names that were put into place are remembered, and looked for at each start.
MOST_REMEMBERED = 100
MOST_NAME = 200  # bytes of an archive's name in its marker's

#: Macs add a folder of this name to each zip.
IGNORED = "__MACOSX"
#: What this program keeps in a data folder begins so; of a folder that was packed up again it is left out.
OWN = (READY, PARTIAL, ".fetching", ".prepare.lock")

_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Marker:
    """Say which archive was unpacked, when, and the first names that were put into place."""

    archive: str
    size: int
    mtime_ns: int
    sha256: str | None
    unpacked: str
    entries: list[str]


def unpack(archive: Path, folder: Path, *, sha256: str | None = None, landmarks: Collection[str] = ()) -> bool:
    """Unpack `archive` into `folder`, unless that was done; return whether there was something to do.

    Files and folders get the rights that new ones have, links become second names of the files that they point to.

    Args:
        archive: zip, or tar, plain or compressed by gzip, bzip2 or xz; told by content.
        folder: exists, and has none of the archive's top-level names.
        sha256: what the archive must have, in hex.
        landmarks: where the archive has none of these names at its top, but in a folder that holds all the rest, that folder is left
            out: of pictures/train/... and pictures/val/..., train and val are put into place.

    Raises:
        SettingError: the archive cannot be opened, or a name is already there.
        DataError: it is damaged, refused or too large, or has another sha256. Nothing has been put into place.
        OSError: the folder cannot be written.
    """
    finish(folder)
    if is_unpacked(archive, folder, sha256=sha256):
        return False
    found = _describe(archive, sha256)
    old = _read_marker(folder, archive.name)
    if old and (old.size, old.mtime_ns) == (found.size, found.mtime_ns) and _are_there(old, folder):
        _write_marker(folder / _marker_name(archive.name), dataclasses.replace(old, sha256=found.sha256))
        return True  # only the sha256 had not been asked for
    started = time.monotonic()
    log.info(f"unpacking {archive} ({show_size(found.size)}) into {folder}, once")
    files, size = _make_ready(archive, folder, found=found, landmarks=landmarks)
    finish(folder)
    log.info(f"unpacked {files} files, {show_size(size)}, in {time.monotonic() - started:.1f} s")
    return True


def is_unpacked(archive: Path, folder: Path, *, sha256: str | None = None) -> bool:
    """Tell whether this archive was unpacked into the folder, by its marker; the archive itself may be gone.

    It is the same archive if it has the same name, size and time of change, or a sha256 that was checked then and is asked for now.
    """
    marker = _read_marker(folder, archive.name)
    if marker is None or not _are_there(marker, folder):
        return False
    if sha256 is not None:
        return marker.sha256 == sha256.lower()
    try:
        found = archive.stat()
    except OSError:
        return True
    return (found.st_size, found.st_mtime_ns) == (marker.size, marker.mtime_ns)


def is_unfinished(folder: Path) -> bool:
    """Tell whether a process was killed while it put complete data into place; `finish` goes on with it."""
    return (folder / READY).exists()


def finish(folder: Path) -> None:
    """Put what is complete into place, and write the marker. Raises SettingError where a name is already there."""
    ready = folder / READY
    if not ready.exists():
        return
    for entry in sorted((ready / ENTRIES).iterdir()):
        check_free(folder / entry.name)
        entry.rename(folder / entry.name)
    with contextlib.suppress(FileNotFoundError):  # it was the last thing to be done before a kill
        archive = json.loads((ready / MARKER).read_text())["archive"]
        (ready / MARKER).rename(folder / _marker_name(archive))
    ready.rename(folder / PARTIAL)  # what a kill leaves of it is worthless from now on
    shutil.rmtree(folder / PARTIAL)


def check_free(target: Path) -> None:
    """Raise SettingError where something is that an archive would put there: nothing is ever overwritten."""
    if os.path.lexists(target):
        raise SettingError(
            f"{target} is already there, and the archive has it too: move it away, name another --data-dir, "
            "or leave --archive or --download out to use what is there (an archive that is the same in spite of a new date: --archive-sha256)"
        )


def show_size(size: int) -> str:
    """Return a number of bytes in words."""
    unit, factor = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6) if size >= 1e6 else ("kB", 1e3)
    return f"{size / factor:.1f} {unit}"


def _describe(archive: Path, sha256: str | None) -> Marker:
    """Look at the archive, and check its sha256 where one is given: one more reading of all of it."""
    try:
        found = archive.stat()
        if not stat.S_ISREG(found.st_mode):
            raise SettingError(f"--archive {archive} is no file; expected a zip or tar file")
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest() if sha256 else None
    except OSError as error:
        raise SettingError(f"--archive {archive} cannot be read as uid {os.getuid()}: {error.strerror}") from None
    if digest and sha256 and digest != sha256.lower():
        raise DataError(f"{archive} has sha256 {digest}; --archive-sha256 is {sha256}: another file, or a damaged copy")
    return Marker(archive.name, found.st_size, found.st_mtime_ns, digest, "", [])


def _make_ready(archive: Path, folder: Path, *, found: Marker, landmarks: Collection[str]) -> tuple[int, int]:
    """Write everything to PARTIAL, and rename that to READY; return the number of files and their size."""
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    try:
        (partial / "content").mkdir(parents=True)
        with _damage_told(archive):
            files, size = _extract(archive, partial / "content", folder=folder)
        _top(partial / "content", landmarks).rename(partial / ENTRIES)
        names = sorted(entry.name for entry in (partial / ENTRIES).iterdir())
        if not names:
            raise DataError(f"{archive} holds no files")
        for name in names:
            check_free(folder / name)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        _write_marker(partial / MARKER, dataclasses.replace(found, unpacked=now, entries=names[:MOST_REMEMBERED]))
        partial.rename(folder / READY)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return files, size


@contextlib.contextmanager
def _damage_told(archive: Path) -> Iterator[None]:
    try:
        yield
    except TrainerError:
        raise
    except (OSError, *_DAMAGE) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a matter of the disk, not of the archive
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{archive} is damaged, cut, or of an unknown kind ({why}); copy it again") from error


def _extract(archive: Path, content: Path, *, folder: Path) -> tuple[int, int]:
    """Write the members below `content`; return the number of files and their size."""
    usage = shutil.disk_usage(folder)
    room = usage.free if usage.total else sys.maxsize  # some network file systems do not tell
    _check_room(archive, archive.stat().st_size, room=room, folder=folder)  # a lower bound, known at once
    files = size = 0
    links = []
    for member in read_members(archive):
        if not member.parts or member.parts[0] == IGNORED or member.parts[0].startswith(OWN):
            continue
        check_free(folder / member.parts[0])
        target = content.joinpath(*member.parts)
        if member.target is not None:
            links.append((member, target, content.joinpath(*member.target)))
            continue
        size += member.size
        _check_room(archive, size, room=room, folder=folder)
        with _duplicate_refused(archive, member):
            files += _write(member, target)
    for member, target, source in links:  # last, since a link may come before its file
        if not source.is_file():
            raise refusal(archive, member.name, why="is a link to something that is no file of the archive")
        with _duplicate_refused(archive, member):
            _link(source, target)
    return files + len(links), size


def _check_room(archive: Path, size: int, *, room: int, folder: Path) -> None:
    if size > room:
        raise DataError(
            f"{archive} needs {show_size(size)} or more, unpacked; {folder} has {show_size(room)} free: make room, "
            "or name another --data-dir"
        )


@contextlib.contextmanager
def _duplicate_refused(archive: Path, member: Member) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise refusal(archive, member.name, why="is there twice, as two files or as a file and a folder") from None


def _write(member: Member, target: Path) -> int:
    """Write a file or make a folder; return the number of files."""
    if member.open is None:
        target.mkdir(parents=True, exist_ok=True)
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with member.open() as source, target.open("xb") as file:
        shutil.copyfileobj(source, file, BLOCK)
    return 1


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileExistsError:
        raise
    except OSError:  # this file system has no hard links
        shutil.copyfile(source, target)


def _top(content: Path, landmarks: Collection[str]) -> Path:
    """Return the folder whose entries go into place: the first with a landmark, on the way through folders with one entry."""
    top = content
    while landmarks:
        names = [entry.name for entry in top.iterdir()]
        if not set(landmarks).isdisjoint(names):
            return top
        if len(names) != 1 or not (top / names[0]).is_dir():
            break
        top /= names[0]
    return content


def _marker_name(archive: str) -> str:
    name = archive if len(os.fsencode(archive)) <= MOST_NAME else hashlib.sha256(os.fsencode(archive)).hexdigest()
    return f"{READY}-{name}.json"


def _read_marker(folder: Path, archive: str) -> Marker | None:
    try:
        return Marker(**json.loads((folder / _marker_name(archive)).read_text()))
    except (OSError, ValueError, TypeError):
        return None  # never unpacked, or garbled


def _write_marker(path: Path, marker: Marker) -> None:
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(json.dumps(dataclasses.asdict(marker), indent=1))
    beside.replace(path)


def _are_there(marker: Marker, folder: Path) -> bool:
    return all(os.path.lexists(folder / name) for name in marker.entries)
