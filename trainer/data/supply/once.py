"""Put data into place before they are read, once per folder, however many processes ask for it.

What is unpacked and fetched, and how, lives in `archives.py` and `fetch.py`. Where everything is there already, nothing is
written: the folder may be read-only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import filelock

from trainer import log
from trainer.codes import DataError, SettingError, TrainerError
from trainer.config import Config
from trainer.data.pictures import folders
from trainer.data.supply import archives, fetch

LOCK = ".prepare.lock"

#: Seconds after which a waiting process says so again; then after twice as many, and so on.
SAY_AGAIN_SECONDS = 60.0

#: Data sets that need no files.
MADE_HERE = ("glyphs", "random")


def prepare(
    config: Config,
    *,
    resources: Sequence[fetch.Resource] | None = None,
    stall_seconds: float = fetch.STALL_SECONDS,
) -> bool:
    """Do what --archive and --download ask for; return whether this process did something.

    Called by every process that will read the data. One does the work, the others wait for it, as long as it lives. A process that
    is killed at it leaves nothing that would be taken for whole; the next one starts again.

    Args:
        resources, stall_seconds: as for `fetch.fetch`.

    Raises:
        SettingError: --data-dir is not set or cannot be written, the archive cannot be opened, or does not go with what is there.
        DataError: the archive cannot be used, or no host gave the files.
    """
    folder = _folder(config)
    if folder is None:
        return False
    try:
        if is_prepared(config, folder):
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if is_prepared(config, folder):
                return False
            archives.finish(folder)
            if config.archive is not None:
                archives.unpack(config.archive, folder, sha256=config.archive_sha256, landmarks=landmarks(config))
            if config.download:
                fetch.fetch(config.dataset, folder, resources=resources, stall_seconds=stall_seconds)
            return True
    except (OSError, NotImplementedError) as error:  # the latter: filelock, where locks are not known
        raise _unusable(folder, error) from None


def is_prepared(config: Config, folder: Path) -> bool:
    """Tell whether the folder holds what --archive and --download ask for."""
    return (
        not archives.is_unfinished(folder)
        and (config.archive is None or archives.is_unpacked(config.archive, folder, sha256=config.archive_sha256))
        and (not config.download or fetch.is_there(config.dataset, folder))
    )


def landmarks(config: Config) -> Collection[str]:
    """Return the names of which the data set's folder must have one at its top; none where that is not known."""
    if config.dataset == "folder":
        return folders.SPLITS
    return fetch.landmarks(config.dataset) if config.dataset in fetch.LAYOUTS else ()


def _folder(config: Config) -> Path | None:
    """Return the folder to look at, None where nothing is to be done."""
    asked = "--archive" if config.archive is not None else "--download" if config.download else ""
    if config.dataset in MADE_HERE:
        if asked:
            log.info(f"--dataset {config.dataset} needs no files: {asked} has nothing to do")
        return None
    if config.download and config.dataset not in fetch.LAYOUTS:
        raise SettingError(
            f"--download cannot fetch --dataset {config.dataset}, only {', '.join(fetch.LAYOUTS)}; "
            "put the files into --data-dir, or use --archive"
        )
    if asked and config.data_dir is None:
        raise SettingError(
            f"--data-dir is not set; {asked} needs the folder to put the files of --dataset {config.dataset} into"
        )
    return config.data_dir


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel takes it from a process that dies."""
    lock = filelock.FileLock(folder / LOCK)
    waited = wait = 0.0
    while not lock.is_locked:
        try:
            lock.acquire(timeout=wait)
        except filelock.Timeout:
            waited += wait
            log.info(
                f"{folder}: another process puts the data into place; waiting for it"
                + (f", {waited:.0f} s so far" if waited else "")
            )
            wait = max(SAY_AGAIN_SECONDS, 2 * wait)
    try:
        yield
    finally:
        lock.release()


def _unusable(folder: Path, error: OSError | NotImplementedError) -> TrainerError:
    if not isinstance(error, OSError):
        return SettingError(f"--data-dir {folder} cannot be locked: {error}; prepare the data elsewhere, or by hand")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(f"--data-dir {folder} is full: make room for bytes and files, or name another one")
    where = f" ({error.filename})" if error.filename not in (None, str(folder)) else ""
    return SettingError(
        f"--data-dir {folder} cannot be used as uid {os.getuid()}: {error.strerror or error}{where}; "
        "name another one, or mount one that holds the data already"
    )
