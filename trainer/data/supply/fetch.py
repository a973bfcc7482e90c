"""Fetch what torchvision knows an address and a digest of, into the folders where the readers look; every wait has an end.

What comes lies in `.fetching` until it is whole and has its digest; only then is it renamed or unpacked into place. One process
at a time may be at it: `once.py` holds the lock.
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trainer import log
from trainer.codes import DataError
from trainer.data import idx
from trainer.data.cifar import KINDS
from trainer.data.supply.archives import check_free, show_size, unpack

PARTIAL = ".fetching"

#: A host that does not send a block in this time, its name looked up and the connection made, is given up.
STALL_SECONDS = 10.0
BLOCK = 2**16
MOST_BYTES = 2**30


@dataclass(frozen=True)
class Layout:
    """Say where the reader of a data set looks: for `files`, there or in `subfolder`."""

    subfolder: str
    files: tuple[str, ...]


_IDX_FILES = tuple(name for pair in idx.FILES.values() for name in pair)

#: What can be fetched.
LAYOUTS = {
    "mnist": Layout("MNIST/raw", _IDX_FILES),
    "fashion-mnist": Layout("FashionMNIST/raw", _IDX_FILES),
} | {name: Layout(kind.subfolder, kind.files) for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Resource:
    """Be one file to fetch.

    Attributes:
        urls: where it is, in the order to try.
        md5: what it must have, in hex.
        path: where it belongs, below the folder; for an archive its name.
        is_archive: whether it is unpacked instead.
    """

    urls: tuple[str, ...]
    md5: str
    path: str
    is_archive: bool = False


class _Failed(Exception):
    """Say why nothing usable came from a host."""


def torchvision_resources(name: str) -> tuple[Resource, ...]:
    """Return what torchvision fetches for a data set of LAYOUTS."""
    from torchvision import datasets  # takes a second or two, and is needed for a download alone

    kinds = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
    kind = getattr(datasets, kinds[name])
    if name in KINDS:
        return (Resource((kind.url,), kind.tgz_md5, kind.filename, is_archive=True),)
    subfolder = LAYOUTS[name].subfolder
    return tuple(
        Resource(tuple(mirror + file for mirror in kind.mirrors), md5, f"{subfolder}/{file}")
        for file, md5 in kind.resources
    )


def is_there(name: str, folder: Path) -> bool:
    """Tell whether the folder has every file of a data set of LAYOUTS."""
    return all(_has(name, folder, file) for file in LAYOUTS[name].files)


def landmarks(name: str) -> frozenset[str]:
    """Return the names of which one is at the top of a folder with a data set of LAYOUTS."""
    layout = LAYOUTS[name]
    return frozenset({layout.subfolder.split("/")[0], *layout.files, *(f"{file}.gz" for file in layout.files)})


def fetch(
    name: str, folder: Path, *, resources: Sequence[Resource] | None = None, stall_seconds: float = STALL_SECONDS
) -> bool:
    """Fetch the files of a data set that the folder does not have; return whether there was something to do.

    Args:
        name: a key of LAYOUTS.
        folder: exists.
        resources: what to fetch from where. Unset: what torchvision says.
        stall_seconds: how long a host may take for each 64 KiB, and for all that comes before the first.

    Raises:
        DataError: a file came from no host as it must be; the line has each host and its reason.
        SettingError: the folder that an archive unpacks to is there already, but lacks files.
        OSError: the folder cannot be written.
    """
    if is_there(name, folder):
        return False
    resources = torchvision_resources(name) if resources is None else resources
    wanted = [item for item in resources if item.is_archive or not _has(name, folder, _plain(item.path))]
    if any(item.is_archive for item in wanted):
        check_free(folder / LAYOUTS[name].subfolder)
    hosts = ", ".join(dict.fromkeys(urlsplit(url).netloc for item in wanted for url in item.urls))
    log.info(f"fetching {name} into {folder} from {hosts}, once")
    started, size = time.monotonic(), 0
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    try:
        partial.mkdir()
        for item in wanted:
            size += _fetch_one(item, folder, partial=partial, stall_seconds=stall_seconds)
    except _Failed as error:
        raise DataError(
            f"--dataset {name} cannot be fetched: {error}; put its files into --data-dir {folder} yourself, or use --archive"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info(f"fetched {name}: {show_size(size)} in {time.monotonic() - started:.1f} s")
    return True


def _plain(path: str) -> str:
    return path.rsplit("/", 1)[-1].removesuffix(".gz")


def _has(name: str, folder: Path, file: str) -> bool:
    places = (folder, folder / LAYOUTS[name].subfolder)
    return any((place / (file + ending)).is_file() for place in places for ending in ("", ".gz"))


def _fetch_one(item: Resource, folder: Path, *, partial: Path, stall_seconds: float) -> int:
    """Fetch one file and put it into place; return its size."""
    arrived = partial / Path(item.path).name
    reasons = []
    for url in item.urls:
        try:
            _download(url, arrived, md5=item.md5, stall_seconds=stall_seconds)
            break
        except _Failed as error:
            reasons.append(f"{urlsplit(url).netloc}: {error}")
    else:
        raise _Failed(f"{arrived.name} ({'; '.join(reasons)})")
    size = arrived.stat().st_size
    if item.is_archive:
        unpack(arrived, folder)
    else:
        target = folder / item.path
        target.parent.mkdir(parents=True, exist_ok=True)
        arrived.rename(target)
    return size


def _download(url: str, path: Path, *, md5: str, stall_seconds: float) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    size = 0
    with path.open("wb") as file:
        for block in _blocks(url, stall_seconds=stall_seconds):
            size += len(block)
            if size > MOST_BYTES:
                raise _Failed(f"sent more than {show_size(MOST_BYTES)}")
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != md5:
        raise _Failed(f"sent another file: {size} bytes with md5 {digest.hexdigest()}, expected {md5}")


def _blocks(url: str, *, stall_seconds: float) -> Iterator[bytes]:
    """Yield what the host sends.

    A thread of its own waits for the host, since nothing else bounds the look-up of a name, or a host that sends a byte now and then.
    """
    arrived: queue.Queue[bytes | _Failed] = queue.Queue(maxsize=16)
    threading.Thread(target=_receive, args=(url, arrived, stall_seconds / 2), daemon=True).start()
    size = 0
    while True:
        try:
            block = arrived.get(timeout=stall_seconds)
        except queue.Empty:
            what = f"{size} bytes, then no {BLOCK >> 10} KiB" if size else "no answer"
            raise _Failed(f"{what} within {stall_seconds:g} s") from None
        if isinstance(block, _Failed):
            raise block
        if not block:
            return
        size += len(block)
        yield block


def _receive(url: str, arrived: queue.Queue[bytes | _Failed], timeout: float) -> None:
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "trainer"})
        with urllib.request.urlopen(request, timeout=timeout) as response:
            while block := response.read(BLOCK):
                arrived.put(block)
            missing = getattr(response, "length", None)
        arrived.put(_Failed(f"closed the connection with {missing} bytes to go") if missing else b"")
    except Exception as error:  # noqa: BLE001 - whatever it is, this host is of no use
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        arrived.put(_Failed(_reason(error, timeout)))


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _reason(error.reason, timeout)
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
