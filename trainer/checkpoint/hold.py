"""One writer per run: a lock on the run's folder that ends with the process, whatever ended it.

It is a POSIX record lock: of the process, not of the open file as flock's is, so that a loader's process that outlives
its killed parent does not hold on to it; network file systems know it across hosts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer import log
from trainer.codes import PeerLost, SettingError, Stopped

LOCK = ".lock"

_HELD = (errno.EACCES, errno.EAGAIN)
_LOOK_SECONDS = 0.2


@contextlib.contextmanager
def hold(folder: Path, *, wait_seconds: float, stop: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Hold a run's folder, once per process, for the time of the context.

    Where another process holds it: say who, and wait. A file system without locks is a warning, and the run goes on.
    `stop` returns the number of a stop signal that came meanwhile, else 0.

    Raises:
        PeerLost: it was held by another for `wait_seconds`.
        SettingError: the folder cannot be written.
        Stopped: `stop` said so.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise SettingError(
            f"the run folder {folder} cannot be written ({error.strerror}, as uid {os.getuid()}); choose another with --runs-dir"
        ) from error
    try:
        with contextlib.suppress(PermissionError):  # it is another user's, who has done this
            os.fchmod(descriptor, os.fstat(descriptor).st_mode | 0o060)
        if _wait_for(descriptor, folder=folder, seconds=wait_seconds, stop=stop):
            _sign(descriptor)
        yield
    finally:
        os.close(descriptor)  # which lets go of the lock


def _wait_for(descriptor: int, *, folder: Path, seconds: float, stop: Callable[[], int]) -> bool:
    """Take the lock; False if this file system has none."""
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD:
                log.warning(f"{folder} cannot be locked ({error.strerror}): see to it that no second run writes there")
                return False
        else:
            return True
        if signum := stop():
            raise Stopped(signum)
        holder = _holder(descriptor)
        if time.monotonic() >= deadline:
            raise PeerLost(
                f"{folder} is held by {holder}; waited {seconds:g} s for it; end that run, or choose another --run-name"
            )
        if not told:
            log.info(f"{folder} is held by {holder}; waiting up to {seconds:g} s for it")
            told = True
        time.sleep(_LOOK_SECONDS)


def _sign(descriptor: int) -> None:
    """Write down who holds the lock, in the file itself; for people, so it may fail."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started})
    with contextlib.suppress(OSError):
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, line.encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {found['pid']} on host {found['host']} since {found['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
