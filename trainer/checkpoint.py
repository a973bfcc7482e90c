"""Save, find, verify, load and remove checkpoints: folders that are whole or not there.

    <run>/checkpoints/step-00000500/   model.safetensors  optimizer.safetensors  state.json  manifest.json

The manifest holds the size and the SHA-256 of the other three; a checkpoint is valid only if they hold. Nothing is
pickled. When to save, and who saves (one process per run), is decided elsewhere; no collectives live here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from trainer.codes import CheckpointError, TrainerError

Tensors = Mapping[str, Tensor]

VERSION = 1
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_PARTS = (MODEL, OPTIMIZER, STATE)
# ".old" is a checkpoint that was being replaced by one of the same step: still good if its successor never came.
_FOLDER = re.compile(r"step-([0-9]{1,18})(\.old)?")
_TEMPORARY = ".tmp-"
_ADVICE = "use another checkpoint, or restore this one from a copy"


class SaveFailed(TrainerError):
    """Say that a checkpoint could not be written or removed: where, why, and the free space."""


class Files:
    """Every effect on the file system that saving and removing have, one method each."""

    def mkdir(self, path: Path) -> None:
        """Make a folder that its group may write, so that another user id of the group can resume and clean up."""
        path.mkdir(parents=True)
        path.chmod(path.stat().st_mode | 0o070)

    def write(self, path: Path, data: bytes) -> None:
        """Write a new file."""
        with path.open("xb") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes, or a folder's names, are on the disk; some file systems say "full" only here."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a folder; the target does not exist."""
        source.rename(target)

    def rmtree(self, path: Path) -> None:
        """Remove a folder and all in it."""
        shutil.rmtree(path)


DISK = Files()


@dataclass(frozen=True)
class Loaded:
    """The contents of one checkpoint; `step` is the number of optimizer steps that were made."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def save(
    folder: Path, *, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any], files: Files = DISK
) -> Path:
    """Write checkpoint `step` into `folder` and return its path; at any moment it is there whole or not at all.

    `model` is the state dict of the model as built, without DDP or torch.compile around it. `state` is what JSON can
    hold. Costs two copies of the tensors in host memory. An equal valid checkpoint is kept as it is.

    Raises:
        SaveFailed: the file system refused; older checkpoints are as they were.
    """
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in model), "save the unwrapped model"
    parts = {MODEL: _pack(model), OPTIMIZER: _pack(optimizer), STATE: _json({**state, "step": step})}
    target = folder / f"step-{step:08d}"
    if _contents(target) == parts:
        return target
    try:
        if not folder.is_dir():
            files.mkdir(folder)
        _sweep(folder, files)
        _put_in_place(_write_beside(target, parts, files), target, files)
        files.sync(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            _sweep(folder, files)
        raise SaveFailed(f"cannot save checkpoint {target}: {error.strerror or error}; {_free(folder)}") from error
    return target


def _write_beside(target: Path, parts: Mapping[str, bytes], files: Files) -> Path:
    temporary = target.with_name(f"{_TEMPORARY}save-{target.name}")
    files.mkdir(temporary)
    manifest = {"version": VERSION, "files": {name: _described(data) for name, data in parts.items()}}
    for name, data in {**parts, MANIFEST: _json(manifest)}.items():
        files.write(temporary / name, data)
        files.sync(temporary / name)
    files.sync(temporary)
    return temporary


def _put_in_place(temporary: Path, target: Path, files: Files) -> None:
    """Rename `temporary` to `target`; a valid checkpoint that is there stays findable, as ".old", until that is done."""
    aside = target.with_name(f"{target.name}.old")
    if _contents(target) is not None:
        _discard(aside, files)
        files.rename(target, aside)
    _discard(target, files)
    files.rename(temporary, target)
    _discard(aside, files)


def prune(folder: Path, *, keep: int, files: Files = DISK) -> list[Path]:
    """Remove all but the newest `keep` checkpoints, and return what was removed, newest first.

    None is removed unless one of those kept is valid, which costs reading it. What savers that died left goes too.

    Raises:
        SaveFailed: the file system refused; no checkpoint is left half removed.
    """
    found = find(folder)
    doomed = found[keep:] if any(_contents(path) for path in found[:keep]) else []
    try:
        _sweep(folder, files)
        for path in reversed(doomed):
            _discard(path, files)
    except OSError as error:
        raise SaveFailed(f"cannot remove old checkpoints in {folder}: {error.strerror or error}") from error
    return doomed


def _discard(path: Path, files: Files) -> None:
    """Remove a checkpoint, if it is there, in two strokes: an interrupted removal leaves no half checkpoint."""
    if path.exists():
        doomed = path.with_name(f"{_TEMPORARY}gone-{path.name}")
        files.rename(path, doomed)
        files.rmtree(doomed)


def _sweep(folder: Path, files: Files) -> None:
    """Remove what savers that died left behind: one process at a time holds a run, so it is nobody's."""
    for path in sorted(folder.glob(f"{_TEMPORARY}*")):
        files.rmtree(path)


def _pack(tensors: Tensors) -> bytes:
    # Clones: safetensors takes neither another memory order nor two names for one memory (tied weights).
    order = torch.contiguous_format
    clones = {name: tensor.detach().cpu().clone(memory_format=order) for name, tensor in tensors.items()}
    return safetensors.torch.save(clones)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _described(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _free(folder: Path) -> str:
    place = next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK))
    return f"{shutil.disk_usage(place).free / 1e6:.1f} MB are free there; make room, or check its limits and rights"


def find(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first by step number; other names are passed over. Reads no file.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    try:
        paths = [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}; check its rights") from error
    numbered = [(int(match[1]), match[2] is None, path) for path in paths if (match := _FOLDER.fullmatch(path.name))]
    return [path for *_, path in sorted(numbered, reverse=True)]


def read(path: Path) -> dict[str, bytes]:
    """Return the files of one checkpoint by name, the manifest apart, verified against it.

    Raises:
        CheckpointError: a file is missing, cannot be read, or is not what was saved; names the file and the reason.
    """
    wanted = _read_manifest(path / MANIFEST)
    parts = {name: _bytes(path / name) for name in _PARTS}
    for name, data in parts.items():
        if _described(data) != wanted[name]:
            fault = f"its {len(data)} bytes are not the {wanted[name]['bytes']} that were saved"
            raise CheckpointError(f"{path / name} is not what {MANIFEST} says: {fault}; {_ADVICE}")
    return parts


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = json.loads(_bytes(path))
        if manifest["version"] != VERSION:
            raise CheckpointError(f"{path} has format version {manifest['version']!r}; this program reads {VERSION}")
        return {name: {key: manifest["files"][name][key] for key in ("bytes", "sha256")} for name in _PARTS}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is no manifest; {_ADVICE}") from None


def _contents(path: Path) -> dict[str, bytes] | None:
    """Return the files of a checkpoint, or None if it is not there or not valid."""
    with contextlib.suppress(CheckpointError):
        return read(path)
    return None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {_ADVICE}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {_ADVICE}") from error


def read_newest(folder: Path) -> tuple[Path | None, dict[str, bytes], list[str]]:
    """Return the newest valid checkpoint (None if there is none at all), its files, and a line for each passed over.

    Raises:
        CheckpointError: there are checkpoints, but none is valid.
    """
    passed: list[str] = []
    for path in find(folder):
        try:
            return path, read(path), passed
        except CheckpointError as error:
            passed.append(f"passed over {path.name}: {error}")
    if passed:
        raise CheckpointError(f"none of the {len(passed)} checkpoints in {folder} can be used; {passed[0]}")
    return None, {}, passed


def parse(files: Mapping[str, bytes]) -> Loaded:
    """Turn the files that `read` returned into tensors (on the CPU) and state.

    Raises:
        CheckpointError: they are whole, but not in the format that this program writes.
    """
    try:
        state = json.loads(files[STATE])
        step = int(state.pop("step"))
        model, optimizer = safetensors.torch.load(files[MODEL]), safetensors.torch.load(files[OPTIMIZER])
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"the checkpoint is not one that this program wrote: {error!r}") from error
    return Loaded(step=step, model=model, optimizer=optimizer, state=state)


def resolve(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest valid one of a run or its checkpoints folder.

    Raises:
        CheckpointError: there is none, or none that is valid.
    """
    if _FOLDER.fullmatch(path.name) or _contents(path) is not None:
        return path
    for folder in (path / "checkpoints", path):
        if (newest := read_newest(folder)[0]) is not None:
            return newest
    raise CheckpointError(f"{path} holds no checkpoint; name a checkpoint's folder (step-00000500) or a run's folder")


def weights_digest(tensors: Tensors) -> str:
    """Return the SHA-256, as 64 hex digits, over name, type, shape and bytes of every tensor, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
