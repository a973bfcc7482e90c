"""Verify and read checkpoints, and turn their bytes into tensors; which one is meant, and which is the newest valid one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from trainer.checkpoint.files import Bytes
from trainer.checkpoint.layout import FOLDER, MANIFEST, MODEL, OPTIMIZER, PARTS, STATE, VERSION, find, step_of
from trainer.checkpoint.packing import Tensors
from trainer.codes import CheckpointError

_ADVICE = "use another checkpoint, or restore this one from a copy"

#: Size and SHA-256 of a file, as the manifest holds them.
Described = dict[str, int | str]


@dataclass(frozen=True)
class Loaded:
    """The contents of one checkpoint; `step` is the number of optimizer steps that were made."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def read(path: Path) -> dict[str, bytes]:
    """Return the files of one checkpoint by name, the manifest apart, verified against it.

    Raises:
        CheckpointError: a file is missing, cannot be read, or is not what was saved; names the file and the reason.
    """
    wanted = read_manifest(path)
    parts = {name: _bytes(path / name) for name in PARTS}
    for name, data in parts.items():
        _check(path / name, described(data), wanted=wanted[name])
    return parts


def verify(path: Path) -> None:
    """Check one checkpoint against its manifest, from the disk and in little memory.

    Raises:
        CheckpointError: as `read`.
    """
    wanted = read_manifest(path)
    for name in PARTS:
        try:
            with (path / name).open("rb") as file:
                # What is on the disk is asked for, not what the system still has in memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                found: Described = {"bytes": file.tell(), "sha256": digest}
        except OSError as error:
            raise _unreadable(path / name, error) from error
        _check(path / name, found, wanted=wanted[name])


def is_valid(path: Path) -> bool:
    """Tell whether a checkpoint is there and what was saved; costs reading it."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def described(data: Bytes) -> Described:
    """Return size and SHA-256."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_manifest(path: Path) -> dict[str, Described]:
    """Return what the manifest of a checkpoint says of its files. Raises CheckpointError."""
    path = path / MANIFEST
    try:
        manifest = json.loads(_bytes(path))
        if manifest["version"] != VERSION:
            raise CheckpointError(f"{path} has format version {manifest['version']!r}; this program reads {VERSION}")
        return {name: {key: manifest["files"][name][key] for key in ("bytes", "sha256")} for name in PARTS}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is no manifest; {_ADVICE}") from None


def _check(path: Path, found: Described, *, wanted: Described) -> None:
    if found != wanted:
        fault = f"its {found['bytes']} bytes are not the {wanted['bytes']} that were saved"
        raise CheckpointError(f"{path} is not what {MANIFEST} says: {fault}; {_ADVICE}")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    fault = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return CheckpointError(f"{path} {fault}; {_ADVICE}")


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
    if step_of(path) is not None or is_valid(path):
        return path
    for folder in (path / FOLDER, path):
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
