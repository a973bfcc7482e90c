"""The node's folder of numbers: new with each launch, in memory where that can be, and gone at its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer import log

_PREFIX = "trainer-metrics-"
#: A folder that is younger may be another process's that has not locked it yet.
_NEW_SECONDS = 60.0
#: Writing to a file in memory never waits for a disk.
IN_MEMORY = Path("/dev/shm")


def places() -> tuple[Path, ...]:
    """Return where the folder may be, the best first."""
    return (IN_MEMORY, Path(tempfile.gettempdir()))


@contextlib.contextmanager
def new_folder(parents: Sequence[Path]) -> Iterator[Path | None]:
    """Make the folder in the first of `parents` that allows it, and remove it at the end; None, with a warning, where none does.

    Folders that launches left which were killed are removed: nobody holds their lock.
    """
    made = next(filter(None, map(_make, parents)), None)
    if made is None:
        log.warning(f"no metrics: none of {', '.join(map(str, parents))} can be written")
        yield None
        return
    folder, lock = made
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int] | None:
    try:
        _remove_abandoned(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return None
    return folder, lock


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _NEW_SECONDS:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def keep_ranks(folder: Path, ranks: Sequence[int]) -> None:
    """Remove the numbers of ranks that are no longer of this node: where nodes come and go, ranks get other numbers."""
    ours = {f"rank{rank}" for rank in ranks}
    for path in folder.glob("*_rank*.db"):
        if path.stem.rpartition("_")[2] not in ours:
            path.unlink(missing_ok=True)
