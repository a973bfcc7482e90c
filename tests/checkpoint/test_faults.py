"""Checkpoints and a world that breaks: every kind of damage to a file, and a fault at every file effect."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from trainer.checkpoint import MANIFEST, Files, SaveFailed, find, parse, prune, read, read_newest, save, sweep, verify
from trainer.codes import UNEXPECTED, CheckpointError

PARTS = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def _save(folder: Path, step: int, seed: int = 0, **more: Any) -> Path:
    model = {"weight": torch.arange(24.0).view(4, 6), "count": torch.tensor(2**40 + seed)}
    return save(folder, step=step, model=model, optimizer={"step/weight": torch.tensor(1.0)}, state={}, **more)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _remove(path: Path) -> None:
    path.unlink()


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [_truncate, _empty, _lengthen, _flip, _zero, _remove, _make_folder]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", PARTS)
def test_damaged_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    before, newest = _save(tmp_path, 9), _save(tmp_path, 10)
    damage(newest / name)
    for look in (read, verify):
        with pytest.raises(CheckpointError, match=name) as caught:
            look(newest)
        assert str(newest) in str(caught.value)
    path, files, passed = read_newest(tmp_path)
    assert path == before
    assert parse(files).step == 9
    assert len(passed) == 1
    assert passed[0].startswith("passed over step-00000010: ")


def test_flipped_bits_of_the_manifest_are_seen(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    whole = (path / MANIFEST).read_bytes()
    for bit in range(0, 8 * len(whole), 3):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (path / MANIFEST).write_bytes(data)
        with pytest.raises(CheckpointError):
            read(path)


def test_another_format_version_is_named(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    (path / MANIFEST).write_text('{"version": 2, "shards": []}')
    with pytest.raises(CheckpointError, match=r"manifest\.json has format version 2; this program reads 1"):
        read(path)


def test_checkpoints_that_are_all_bad_are_an_error_and_not_a_new_start(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _flip(_save(tmp_path, step) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"none of the 3 .* passed over step-00000003: .*model\.safetensors"):
        read_newest(tmp_path)


@pytest.mark.parametrize("state", [b"{}", b"[]", b'{"step": "x"}', b'{"step": null}', b"\xff"])
def test_contents_of_another_writer_are_refused(tmp_path: Path, state: bytes) -> None:
    files = read(_save(tmp_path, 1))
    with pytest.raises(CheckpointError, match="not one that this program wrote"):
        parse({**files, "state.json": state})


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    files = read(_save(tmp_path, 1))
    with pytest.raises(CheckpointError, match="not one that this program wrote"):
        parse({**files, "model.safetensors": b"PK\x03\x04 a pickle in a zip"})


# Faults of the file system.


class Breaking(Files):
    """Fail at file effect number `at` (counted from 0), and with `lasting` at all that follow."""

    def __init__(self, at: int, *, lasting: bool = False) -> None:
        self.at, self.lasting, self.effects = at, lasting, 0

    def _count(self) -> None:
        number, self.effects = self.effects, self.effects + 1
        if number == self.at or (self.lasting and number > self.at):
            raise OSError(28, "No space left on device")

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)

    def write(self, path: Path, data: bytes | memoryview) -> None:
        if self.effects == self.at:
            super().write(path, data[: len(data) // 2])
        self._count()
        super().write(path, data)

    def sync(self, path: Path) -> None:
        self._count()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def rmtree(self, path: Path) -> None:
        if self.effects == self.at:
            next(path.iterdir()).unlink(missing_ok=True)
        self._count()
        super().rmtree(path)


NEVER = 10**6


def _effects(act: Callable[[Files], Any]) -> int:
    counting = Breaking(NEVER)
    act(counting)
    return counting.effects


def test_save_has_the_expected_file_effects(tmp_path: Path) -> None:
    # Two folders, the first synced in its parent; four files written and synced; the temporary synced, renamed, its parent synced.
    assert _effects(lambda files: _save(tmp_path / "checkpoints", 2, files=files)) == 3 + 4 * 2 + 3


@pytest.mark.parametrize("at", range(12))
def test_failed_save_leaves_the_older_checkpoint_alone_and_nothing_else(tmp_path: Path, at: int) -> None:
    _save(tmp_path, 1)
    before = _tree(tmp_path)
    with pytest.raises(SaveFailed, match=r"step-00000002: No space left on device; \d+\.\d MB are free") as caught:
        _save(tmp_path, 2, seed=1, files=Breaking(at))
    assert caught.value.code == UNEXPECTED
    new = {name: data for name, data in _tree(tmp_path).items() if name not in before}
    assert {name: data for name, data in _tree(tmp_path).items() if name in before} == before
    # Only the last effect, the sync of the parent, comes after the new checkpoint is in place: it is whole.
    assert _names(tmp_path) == ["step-00000001", *(["step-00000002"] if at == 11 else [])]
    assert bool(new) == (at == 11)
    assert _save(tmp_path, 2, seed=1) == tmp_path / "step-00000002"


@pytest.mark.parametrize("at", range(12))
def test_disk_that_stays_broken_leaves_the_older_checkpoint_in_use(tmp_path: Path, at: int) -> None:
    older = _save(tmp_path, 1)
    before = _tree(older)
    with pytest.raises(SaveFailed):
        _save(tmp_path, 2, files=Breaking(at, lasting=True))
    assert _tree(older) == before
    assert read_newest(tmp_path)[2] == []
    _save(tmp_path, 2)
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]


def test_first_save_that_fails_leaves_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed):
        _save(tmp_path / "checkpoints", 1, files=Breaking(4))
    assert read_newest(tmp_path / "checkpoints") == (None, {}, [])
    assert _names(tmp_path / "checkpoints") == []


def test_file_size_limit_is_reported_with_path_and_free_space(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    before = _tree(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SaveFailed, match=r"step-00000002: File too large; .* MB are free"):
            save(tmp_path, step=2, model={"weight": torch.zeros(10_000)}, optimizer={}, state={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _tree(tmp_path) == before
    assert _names(tmp_path) == ["step-00000001"]


IN_A_SMALL_DISK = """
import json, subprocess, sys
from pathlib import Path
import torch
from trainer.checkpoint import SaveFailed, hold, read_newest, save
from trainer.codes import SettingError

def attempt(step, numbers):
    try:
        save(folder, step=step, model={"weight": torch.ones(numbers)}, optimizer={}, state={})
    except SaveFailed as error:
        return str(error)

def tree():
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

def held():
    try:
        with hold(folder.parent, wait_seconds=0):
            return ""
    except SettingError as error:
        return str(error)

folder = Path(sys.argv[1]) / "checkpoints"
told = {"fits": attempt(1, 10)}
before = tree()
told["full"] = attempt(2, 1_000_000)
told["unchanged"] = tree() == before and [path.name for path in folder.iterdir()] == ["step-00000001"]
told["fits again"] = attempt(3, 20)
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
told |= {"read-only": attempt(4, 20), "held": held(), "newest": read_newest(folder)[0].name}
print(json.dumps(told))
"""


def test_full_and_read_only_disks_are_reported_and_leave_the_older_checkpoints(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"', tmp_path]
    command = [*mount, sys.executable, "-W", "error", "-c", IN_A_SMALL_DISK, tmp_path]
    run = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told.pop("full").startswith(
        f"cannot save checkpoint {tmp_path}/checkpoints/step-00000002: No space left on device; 1.0 MB are free there"
    )
    assert "step-00000004: Read-only file system; " in told.pop("read-only")
    assert told.pop("held").startswith(f"the run folder {tmp_path} cannot be written (Read-only file system, as uid 0)")
    assert told == {"fits": None, "unchanged": True, "fits again": None, "newest": "step-00000003"}


class Removing(Breaking):
    """Remove a folder before file effect number `at`."""

    def __init__(self, at: int, *, folder: Path) -> None:
        super().__init__(at)
        self.folder = folder

    def _count(self) -> None:
        number, self.effects = self.effects, self.effects + 1
        if number == self.at:
            shutil.rmtree(self.folder)

    write = Files.write  # the folder goes at another effect: nothing to be half written
    rmtree = Files.rmtree


@pytest.mark.parametrize("removed", ["run", "run/checkpoints"])
@pytest.mark.parametrize("at", range(8))
def test_folder_that_is_removed_during_a_save_is_reported_and_then_made_again(
    tmp_path: Path, removed: str, at: int
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    _save(folder, 1)
    with pytest.raises(SaveFailed, match=r"step-00000002: No such file or directory; .* MB are free"):
        _save(folder, 2, files=Removing(at, folder=tmp_path / removed))
    assert _save(folder, 3).is_dir()
    assert _names(folder) == ["step-00000003"]


class Corrupting(Files):
    """Flip a bit of one file while it is written, and tell nobody."""

    def write(self, path: Path, data: bytes | memoryview) -> None:
        super().write(path, data)
        if path.name == "optimizer.safetensors":
            _flip(path)


@pytest.mark.parametrize("step", [2, 3])
def test_save_that_reads_back_otherwise_fails_and_replaces_nothing(tmp_path: Path, step: int) -> None:
    _save(tmp_path, 2)
    before = _tree(tmp_path)
    with pytest.raises(
        SaveFailed, match=rf"step-0000000{step}: .*optimizer\.safetensors is not what manifest\.json says"
    ):
        _save(tmp_path, step, seed=1, files=Corrupting())
    assert _tree(tmp_path) == before
    assert _names(tmp_path) == ["step-00000002"]


def test_folder_without_fsync_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112 - a link to the folder
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert _save(tmp_path / "checkpoints", 1).is_dir()


def test_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match=r"file/checkpoints/step-00000001.* MB are free"):
        _save(tmp_path / "file" / "checkpoints", 1)


# The same step again.


def test_equal_checkpoint_is_kept(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    assert _effects(lambda files: _save(tmp_path, 1, files=files)) == 0
    assert path.is_dir()


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_replaced(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = _save(tmp_path, 1)
    whole = _tree(path)
    damage(path / "model.safetensors")
    assert _save(tmp_path, 1) == path
    assert _tree(path) == whole
    assert _names(tmp_path) == ["step-00000001"]


def test_other_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    _save(tmp_path, 1, seed=0)
    path = _save(tmp_path, 1, seed=1)
    assert parse(read(path)).model["count"].item() == 2**40 + 1
    assert _names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("lasting", [False, True])
def test_fault_while_replacing_leaves_the_old_or_the_new_one(tmp_path: Path, lasting: bool) -> None:
    again = lambda files: _save(tmp_path, 1, seed=1, files=files)  # noqa: E731
    _save(tmp_path, 1, seed=0)
    for at in range(_effects(again)):
        shutil.rmtree(tmp_path)
        _save(tmp_path, 1, seed=0)
        with pytest.raises(SaveFailed):
            again(Breaking(at, lasting=lasting))
        _, files, passed = read_newest(tmp_path)
        assert parse(files).model["count"].item() - 2**40 in (0, 1)
        assert passed == []
        if not lasting:
            assert not [name for name in _names(tmp_path) if name.startswith(".tmp-")]
        again(Files())
        assert parse(read_newest(tmp_path)[1]).model["count"].item() == 2**40 + 1
        prune(tmp_path, keep=1)
        assert _names(tmp_path) == ["step-00000001"]


def test_prune_that_fails_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    for at in range(4):
        for step in (1, 2, 3):
            _save(tmp_path, step)
        with pytest.raises(SaveFailed, match=f"cannot remove old checkpoints in {tmp_path}"):
            prune(tmp_path, keep=1, files=Breaking(at))
        assert all(parse(read(path)).step for path in find(tmp_path))
        prune(tmp_path, keep=1)
        assert _names(tmp_path) == ["step-00000003"]


# What killed runs left.


def test_sweep_removes_what_is_temporary_and_nothing_else(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    (tmp_path / ".tmp-save-step-00000002").mkdir()
    (tmp_path / ".tmp-save-step-00000002" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-config.json").write_text("{")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / "step-00000001")
    (tmp_path / "mine").mkdir()
    swept = sweep(tmp_path)
    assert [path.name for path in swept] == [".tmp-config.json", ".tmp-link", ".tmp-save-step-00000002"]
    assert _names(tmp_path) == ["mine", "step-00000001"]
    assert sweep(tmp_path) == sweep(tmp_path / "missing") == []
    assert len(read(tmp_path / "step-00000001")) == 3


@pytest.mark.parametrize(("arrived", "seed"), [(True, 1), (False, 0)])
def test_sweep_ends_a_replacement_that_was_cut_off(tmp_path: Path, arrived: bool, seed: int) -> None:
    older = _save(tmp_path, 5, seed=0).rename(tmp_path / "aside")
    newer = _save(tmp_path, 5, seed=1)
    older.rename(tmp_path / "step-00000005.old")
    if not arrived:
        _empty(newer / "model.safetensors")
    sweep(tmp_path)
    assert _names(tmp_path) == ["step-00000005"]
    assert parse(read(newer)).model["count"].item() == 2**40 + seed


def test_sweep_that_is_refused_says_where(tmp_path: Path) -> None:
    (tmp_path / ".tmp-save-step-00000002").mkdir()
    (tmp_path / ".tmp-save-step-00000002" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(SaveFailed, match=f"cannot remove what a killed run left in {tmp_path}: No space"):
        sweep(tmp_path, files=Breaking(0))
