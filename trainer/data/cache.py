"""Keep the drawn glyphs in a folder, so that a start costs a look and not a drawing, and ranks share one copy in memory.

How the pictures come about lives in `glyphs.py`. The folder `glyphs-<version>-<digest of the look>` holds an .npy file per array and
`digests.json`; it is written beside, renamed, and checked against its digests at every opening.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from trainer import log
from trainer.data.glyphs import LOOK, TEST, TRAIN, draw_masters, draw_split
from trainer.data.sets import ArraySource, digest

Found = tuple[dict[str, ArraySource], list[str]]

SPLITS = {"train": range(TRAIN), "test": range(TRAIN, TRAIN + TEST)}

#: A drawing takes seconds; who holds the lock for longer is stuck, and the others draw for themselves.
LOCK_SECONDS = 120.0


def folder_name() -> str:
    """Return the name of the cache folder, another one for every other look."""
    return f"glyphs-{LOOK.version}-{hashlib.sha256(repr(LOOK).encode()).hexdigest()[:8]}"


def glyph_sources(cache_dir: Path | None) -> Found:
    """Return the glyphs by split, and the digests of their arrays, from the cache where there is one or can be one.

    One process draws, others wait for it. A damaged cache is drawn again, with a warning. Where no cache can be
    written, the same pictures are drawn in memory.
    """
    if cache_dir is None:
        return _drawn()
    folder = cache_dir / folder_name()
    try:
        return _read(folder) or _made(folder)
    except OSError as error:
        log.info(f"glyphs: no cache in {cache_dir} ({_reason(error)}); drawn in memory at each start, see --cache-dir")
        return _drawn()


def _reason(error: OSError) -> str:
    if isinstance(error, filelock.Timeout):
        return f"its lock was held for more than {LOCK_SECONDS:g} s"
    return error.strerror or str(error) or type(error).__name__


def _drawn() -> Found:
    masters = draw_masters()
    sources = {split: ArraySource(*draw_split(numbers, masters=masters)) for split, numbers in SPLITS.items()}
    return sources, _digests(sources)


def _digests(sources: dict[str, ArraySource]) -> list[str]:
    return [digest(array) for source in sources.values() for array in (source.images, source.labels)]


def _read(folder: Path) -> Found | None:
    """Open the cache; None where there is none, or, with a warning, where it is damaged."""
    if not folder.exists():
        return None
    try:
        digests = json.loads((folder / "digests.json").read_text())
        sources = {
            split: ArraySource(*(_opened(folder, split, what) for what in ("images", "labels"))) for split in SPLITS
        }
        if _digests(sources) == digests:
            return sources, digests
    except (OSError, ValueError, EOFError):
        pass  # a missing, cut or garbled file
    log.warning(f"glyphs: the cache {folder} is damaged; it is drawn again")
    return None


def _opened(folder: Path, split: str, what: str) -> Any:
    return np.asarray(np.load(folder / f"{split}-{what}.npy", mmap_mode="r"))


def _made(folder: Path) -> Found:
    """Draw the cache under a lock, unless another process did so while this one waited."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info(f"glyphs: another process draws them into {folder}; waiting for it")
        lock.acquire(timeout=LOCK_SECONDS)
    try:
        return _read(folder) or _write(folder)
    finally:
        lock.release()


def _write(folder: Path) -> Found:
    """Draw into a folder beside and rename it; with the lock held, whatever lies there was left by a killed process."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    log.info(f"glyphs: drawing them into {folder}, once")
    sources, digests = _drawn()
    try:
        for split, source in sources.items():
            np.save(partial / f"{split}-images.npy", source.images)
            np.save(partial / f"{split}-labels.npy", source.labels)
        (partial / "digests.json").write_text(json.dumps(digests, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return _read(folder) or (sources, digests)
