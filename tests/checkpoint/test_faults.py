"""Checkpoints and a world that breaks: every kind of damage to a file, and a fault at every file effect."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import MANIFEST, Files, SaveFailed, find, parse, prune, read, read_newest, save
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
    with pytest.raises(CheckpointError, match=name) as caught:
        read(newest)
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

    def write(self, path: Path, data: bytes) -> None:
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
    # The folder and its parent's sync, the temporary one, four files each written and synced, the temporary synced, renamed, the
    # parent synced.
    assert _effects(lambda files: _save(tmp_path / "checkpoints", 2, files=files)) == 2 + 1 + 4 * 2 + 3


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
