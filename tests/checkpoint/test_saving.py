"""Checkpoints come back to the bit, the newest valid one is found, and old ones go; faults are in the file beside."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

from trainer.checkpoint import (
    MANIFEST,
    best_step,
    find,
    parse,
    prune,
    read,
    read_newest,
    resolve,
    save,
    weights_digest,
)
from trainer.codes import CheckpointError, SettingError

PARTS = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def _tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "conv.weight": torch.randn(4, 3, 2, 2, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "double": torch.randn(2, dtype=torch.float64, generator=generator),
        "count": torch.tensor(2**40 + seed),
        "mask": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "none": torch.empty(0, 3),
    }


def _save(folder: Path, step: int, seed: int = 0, **more: Any) -> Path:
    optimizer = {"step/conv.weight": torch.tensor(float(step))}
    return save(folder, step=step, model=_tensors(seed), optimizer=optimizer, state={"best": 0.5}, **more)


def _raw(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_is_exact_to_the_bit(tmp_path: Path) -> None:
    path = _save(tmp_path / "checkpoints", 500)
    loaded = parse(read(path))
    assert path.name == "step-00000500"
    assert _names(path) == sorted(PARTS)
    assert {name: _raw(tensor) for name, tensor in loaded.model.items()} == {
        name: _raw(tensor) for name, tensor in _tensors().items()
    }
    assert loaded.optimizer["step/conv.weight"].shape == ()
    assert (loaded.step, loaded.state, loaded.optimizer["step/conv.weight"].item()) == (500, {"best": 0.5}, 500.0)


def test_loaded_tensors_can_be_written_to(tmp_path: Path) -> None:
    loaded = parse(read(_save(tmp_path, 1)))
    loaded.model["conv.weight"].add_(1)
    assert torch.equal(loaded.model["conv.weight"], _tensors()["conv.weight"] + 1)


def test_memory_order_and_shared_memory_do_not_matter(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 5, 5)
    model = {
        "last": weight.to(memory_format=torch.channels_last),
        "tied": weight,
        "view": weight[1:, ::2],
        "wide": torch.ones(1).expand(6),
        "trained": nn.Parameter(weight),
    }
    loaded = parse(read(save(tmp_path, step=1, model=model, optimizer={}, state={})))
    assert loaded.optimizer == {}
    assert {name: _raw(tensor) for name, tensor in loaded.model.items()} == {
        name: _raw(tensor.detach()) for name, tensor in model.items()
    }


def test_manifest_holds_what_sha256sum_and_ls_would_say(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["version"] == 1
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        name: (path / name).stat().st_size for name in PARTS if name != MANIFEST
    }


def test_folders_can_be_written_and_files_read_by_their_group(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        path = _save(tmp_path / "run" / "checkpoints", 1)
    finally:
        os.umask(old)
    assert {folder.stat().st_mode & 0o077 for folder in (path, path.parent, path.parent.parent)} == {0o070}
    assert {file.stat().st_mode & 0o077 for file in path.iterdir()} == {0o040}


def test_files_are_what_the_safetensors_library_reads_tensors_where_they_should_lie(tmp_path: Path) -> None:
    path = save(tmp_path, step=1, model=_tensors(), optimizer={"ünï": torch.ones(3)}, state={}) / "model.safetensors"
    with safetensors.safe_open(path, framework="pt") as file:
        assert {name: _raw(file.get_tensor(name)) for name in file.keys()} == {  # noqa: SIM118 - it is no mapping
            name: _raw(tensor) for name, tensor in _tensors().items()
        }
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    for name, place in json.loads(data[8 : 8 + length]).items():
        assert place["data_offsets"][0] % _tensors()[name].element_size() == 0


NAMES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 int64 int32 int16 int8 bool"


@pytest.mark.parametrize("name", [*NAMES.split(), "uint64", "uint32", "uint16", "uint8"])
def test_every_type_comes_back(tmp_path: Path, name: str) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, name))
    loaded = parse(read(save(tmp_path, step=1, model={"a": tensor, "b": tensor[0]}, optimizer={}, state={})))
    assert {name: _raw(value) for name, value in loaded.model.items()} == {"a": _raw(tensor), "b": _raw(tensor[0])}


def test_type_that_no_checkpoint_holds_is_named(tmp_path: Path) -> None:
    tensors = {"angle": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(SettingError, match=r"tensor 'angle' is torch\.complex128, which a checkpoint cannot hold"):
        save(tmp_path, step=1, model=tensors, optimizer={}, state={})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_weights_with_a_wrappers_prefix_are_never_saved(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(AssertionError, match="unwrapped"):
        save(tmp_path, step=1, model={f"{prefix}weight": torch.ones(1)}, optimizer={}, state={})


# Which checkpoint is the newest.


def test_newest_goes_by_number_whatever_the_times_and_the_other_names(tmp_path: Path) -> None:
    steps = [9, 10, 99_999, 100_000, 99_999_999, 100_000_000]
    for age, step in enumerate(steps):
        path = _save(tmp_path, step)
        os.utime(path, (1e9 - age * 1000, 1e9 - age * 1000))
    for junk in ("step-", "step-abc", "step--5", "step-00000007-copy", ".tmp-save-step-00000300", "latest", "step-٣"):
        (tmp_path / junk).mkdir()
    (tmp_path / "step-00000400").write_text("a file, not a folder")
    (tmp_path / ("step-" + "9" * 200)).mkdir()
    assert [int(path.name.removeprefix("step-")) for path in find(tmp_path)] == steps[::-1]
    newest, files, passed = read_newest(tmp_path)
    assert newest == tmp_path / "step-100000000"
    assert parse(files).step == 100_000_000
    assert passed == []


def test_numbers_without_zeros_in_front_count_too(tmp_path: Path) -> None:
    _save(tmp_path, 9).rename(tmp_path / "step-9")
    _save(tmp_path, 10).rename(tmp_path / "step-10")
    assert [path.name for path in find(tmp_path)] == ["step-10", "step-9"]


def test_without_checkpoints_there_is_no_newest(tmp_path: Path) -> None:
    assert read_newest(tmp_path / "missing") == (None, {}, [])
    assert read_newest(tmp_path) == (None, {}, [])


# Removing old ones.


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (9, 10, 99_999, 100_000):
        _save(tmp_path, step)
    assert [path.name for path in prune(tmp_path, keep=2)] == ["step-00000010", "step-00000009"]
    assert _names(tmp_path) == ["step-00099999", "step-00100000"]
    assert prune(tmp_path, keep=2) == []


@pytest.mark.parametrize(("best", "left"), [(1, [1, 3, 4]), (4, [3, 4]), (7, [3, 4]), (None, [3, 4])])
def test_prune_keeps_the_best_beside_the_newest(tmp_path: Path, best: int | None, left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step)
    prune(tmp_path, keep=2, best=best)
    assert _names(tmp_path) == [f"step-{step:08d}" for step in left]


def test_best_is_what_the_state_says() -> None:
    assert best_step({"best": {"step": 40, "accuracy": 0.5, "loss": 1.0}}) == 40
    assert [best_step(state) for state in ({}, {"best": None}, {"best": 0.5})] == [None, None, None]


def test_prune_removes_nothing_while_no_newer_one_is_valid(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step)
    for step in (3, 4):
        (tmp_path / f"step-0000000{step}" / "state.json").write_text("{}")
    assert prune(tmp_path, keep=2) == []
    assert len(find(tmp_path)) == 4
    assert [path.name for path in prune(tmp_path, keep=3)] == ["step-00000001"]


def test_prune_and_save_remove_what_a_dead_saver_left(tmp_path: Path) -> None:
    for clean in (lambda: prune(tmp_path, keep=3), lambda: _save(tmp_path, 2)):
        _save(tmp_path, 1)
        (tmp_path / ".tmp-save-step-00000002").mkdir()
        (tmp_path / ".tmp-save-step-00000002" / "model.safetensors").write_bytes(b"half")
        (tmp_path / ".tmp-gone-step-00000001").mkdir()
        clean()
        assert not [name for name in _names(tmp_path) if name.startswith(".tmp-")]


# What a path on the command line means.


def test_checkpoint_run_and_folder_of_checkpoints_are_all_understood(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    older, newest = _save(run / "checkpoints", 9), _save(run / "checkpoints", 10)
    copy = shutil.copytree(older, tmp_path / "mine")
    assert [resolve(path) for path in (older, run, run / "checkpoints", copy)] == [older, newest, newest, copy]
    (newest / "model.safetensors").write_bytes(b"")
    assert resolve(run) == older
    assert resolve(newest) == newest  # asked for by name: reading it says what is wrong


def test_path_without_a_checkpoint_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"holds no checkpoint; name a checkpoint's folder \(step-") as caught:
            resolve(path)
        assert str(path) in str(caught.value)


def test_run_whose_checkpoints_are_all_bad_names_the_damage(tmp_path: Path) -> None:
    (_save(tmp_path / "checkpoints", 1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        resolve(tmp_path)


# Digests of weights.


def test_digest_depends_on_every_name_type_shape_and_bit_and_on_nothing_else() -> None:
    plain = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0)}
    others = [
        {"a": torch.zeros(2, 3), "c": torch.tensor(1.0)},
        {"a": torch.zeros(3, 2), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.tensor(1.0)},
        {"a": -torch.zeros(2, 3), "b": torch.tensor(1.0)},
        {"a": torch.zeros(2, 3)},
    ]
    assert len({weights_digest(tensors) for tensors in (plain, *others)}) == 6
    same = {"b": torch.tensor(1.0, requires_grad=True), "a": torch.zeros(3, 2).t()}
    assert weights_digest(same) == weights_digest(plain)
    assert weights_digest({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert len(weights_digest(_tensors())) == 64
