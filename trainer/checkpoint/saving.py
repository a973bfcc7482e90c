"""Write and remove checkpoints, so that each is there whole or not at all whenever the process or the power ends.

Every effect goes through `files.py`. When a checkpoint is due is decided elsewhere; `writer.py` calls this from a thread.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import DISK, TEMPORARY, Bytes, Files, SaveFailed, free_space, make_folder
from trainer.checkpoint.layout import ASIDE, MANIFEST, MODEL, OPTIMIZER, STATE, VERSION, find, folder_name, step_of
from trainer.checkpoint.packing import Snapshot, Tensors
from trainer.checkpoint.reading import Described, described, is_valid, read_manifest, verify
from trainer.codes import CheckpointError


def save(
    folder: Path, *, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any], files: Files = DISK
) -> Path:
    """Write checkpoint `step` into `folder` and return its path; at any moment it is there whole or not at all.

    `model` is the state dict of the model as built, without DDP or torch.compile around it. `state` is what JSON can
    hold. Costs one copy of the tensors in host memory, and reading back what was written. An equal valid checkpoint is
    kept as it is.

    Raises:
        SaveFailed: the file system refused; older checkpoints are as they were.
    """
    return write(
        folder, step=step, parts=pack(Snapshot(), step=step, model=model, optimizer=optimizer, state=state), files=files
    )


def pack(
    snapshot: Snapshot, *, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any]
) -> dict[str, Bytes]:
    """Return a checkpoint's files as bytes that no later step changes, the manifest apart; a part of `save`."""
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in model), "save the unwrapped model"
    text = _json({**state, "step": step})
    return {**snapshot.take({MODEL: model, OPTIMIZER: optimizer}), STATE: text}


def write(folder: Path, *, step: int, parts: Mapping[str, Bytes], files: Files = DISK) -> Path:
    """Write what `pack` returned; the other part of `save`. Uses neither torch nor what it packed. Raises SaveFailed."""
    target = folder / folder_name(step)
    manifest = {name: described(data) for name, data in parts.items()}
    try:
        if _holds(target, manifest):
            return target
        make_folder(folder, files=files)
        _remove_temporary(folder, files)
        temporary = _write_beside(target, parts, manifest=manifest, files=files)
        verify(temporary)
        _put_in_place(temporary, target, files=files)
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(OSError):
            _remove_temporary(folder, files)
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise SaveFailed(f"cannot save checkpoint {target}: {reason}; {free_space(folder)}") from error
    return target


def _holds(path: Path, manifest: Mapping[str, Described]) -> bool:
    """Tell whether these very files are already there, and good."""
    with contextlib.suppress(CheckpointError):
        return read_manifest(path) == manifest and is_valid(path)
    return False


def _write_beside(target: Path, parts: Mapping[str, Bytes], *, manifest: Mapping[str, Described], files: Files) -> Path:
    temporary = target.with_name(f"{TEMPORARY}save-{target.name}")
    files.mkdir(temporary)
    for name, data in {**parts, MANIFEST: _json({"version": VERSION, "files": manifest})}.items():
        files.write(temporary / name, data)
        files.sync(temporary / name)
    files.sync(temporary)
    return temporary


def _put_in_place(temporary: Path, target: Path, *, files: Files) -> None:
    """Rename `temporary` to `target`; a valid checkpoint that is there goes only when the new one is on the disk."""
    aside = target.with_name(target.name + ASIDE)
    if is_valid(target):
        _discard([aside], files)
        files.rename(target, aside)
    _discard([target], files)
    files.rename(temporary, target)
    files.sync(target.parent)
    _discard([aside], files)


def prune(
    folder: Path, *, keep: int, best: int | None = None, verified: Path | None = None, files: Files = DISK
) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and that of step `best`; return what was removed, newest first.

    None is removed unless a newer one is valid, which costs reading it; `verified` has just been read back. What
    savers that died left goes too.

    Raises:
        SaveFailed: the file system refused; no checkpoint is left half removed.
        CheckpointError: the folder cannot be listed.
    """
    found = find(folder)
    doomed = [path for path in found[keep:] if step_of(path) != best]
    if doomed and not any(path == verified or is_valid(path) for path in found[:keep]):
        doomed = []
    try:
        _remove_temporary(folder, files)
        _discard(doomed, files)
    except OSError as error:
        raise SaveFailed(f"cannot remove old checkpoints in {folder}: {error.strerror or error}") from error
    return doomed


def sweep(folder: Path, *, files: Files = DISK) -> list[Path]:
    """Remove what killed processes left in a folder of a run or of its checkpoints, and return what it was.

    That is: temporary files and folders, and a checkpoint that was being replaced. The latter goes if its successor is
    valid, and else gets its name back. Nobody else may be writing there: hold the run first.

    Raises:
        SaveFailed: the file system refused.
        CheckpointError: the folder cannot be listed.
    """
    asides = [path for path in find(folder) if path.suffix == ASIDE]
    try:
        left = _remove_temporary(folder, files)
        for aside in asides:
            target = aside.with_suffix("")
            if is_valid(target):
                _discard([aside], files)
                left.append(aside)
            elif is_valid(aside):
                _discard([target], files)
                files.rename(aside, target)
    except OSError as error:
        raise SaveFailed(f"cannot remove what a killed run left in {folder}: {error.strerror or error}") from error
    return left


def _discard(paths: Sequence[Path], files: Files) -> None:
    """Remove checkpoints, those that are there, oldest first: names first, so that none is ever seen half removed."""
    doomed = []
    for path in (path for path in reversed(paths) if path.exists()):
        doomed.append(path.with_name(f"{TEMPORARY}gone-{path.name}"))
        files.rename(path, doomed[-1])
    for number, path in enumerate(doomed):
        if not number:
            files.sync(path.parent)
        files.rmtree(path)


def _remove_temporary(folder: Path, files: Files) -> list[Path]:
    left = sorted(folder.glob(f"{TEMPORARY}*"))
    for path in left:
        files.rmtree(path)
    return left


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()
