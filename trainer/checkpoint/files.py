"""Every effect on the file system that saving and removing have, behind one seam, so that a test can break each.

What is written, and in which order, is decided in `saving.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from trainer.codes import TrainerError

#: What begins so is nobody's once its writer is gone: one process at a time holds a run.
TEMPORARY = ".tmp-"

Bytes = bytes | memoryview


class SaveFailed(TrainerError):
    """Say that a checkpoint could not be written or removed: where, why, and the free space."""


class Files:
    """Every effect on the file system that saving and removing have, one method each.

    Folders may be written, and files read, by their group, so that another user id of the group can resume and clean up.
    """

    def mkdir(self, path: Path) -> None:
        """Make a folder; its parent exists."""
        path.mkdir()
        with contextlib.suppress(PermissionError):  # a share may say that its files belong to somebody else
            path.chmod(path.stat().st_mode | 0o070)

    def write(self, path: Path, data: Bytes) -> None:
        """Write a new file."""
        with path.open("xb") as file:
            with contextlib.suppress(PermissionError):
                os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode | 0o040)
            file.write(data)

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes, or a folder's names, are on the disk; some file systems say "full" only here."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems know no fsync of a folder; then there is nothing that could be waited for.
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a folder; the target does not exist."""
        source.rename(target)

    def rmtree(self, path: Path) -> None:
        """Remove a file, or a folder and all in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


DISK = Files()


def make_folder(path: Path, *, files: Files) -> None:
    """Make a folder, and those above it, that are still there after the power fails."""
    if not path.is_dir():
        make_folder(path.parent, files=files)
        files.mkdir(path)
        files.sync(path.parent)


def replace_json(path: Path, value: Any) -> None:
    """Write a small JSON file so that the old or the new one is there at any moment. Raises OSError."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    temporary.unlink(missing_ok=True)
    DISK.write(temporary, f"{json.dumps(value, indent=2, allow_nan=False)}\n".encode())
    DISK.sync(temporary)
    temporary.replace(path)
    DISK.sync(path.parent)


def free_space(folder: Path) -> str:
    """Say how much room there is where `folder` is or would be, and what to do."""
    place = next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK))
    return f"{shutil.disk_usage(place).free / 1e6:.1f} MB are free there; make room, or check its limits and rights"
