"""The glyphs are the same everywhere, hard enough to be worth learning, and their cache survives what happens to caches."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from trainer import data, log
from trainer.config import Config
from trainer.data import cache, glyphs
from trainer.data.sets import ArraySource, digest

ROOT = Path(__file__).resolve().parents[2]

# Stored once, and met with Pillow 10.1 to 13.0, FreeType 2.13.2 to 2.14.3, numpy 1.26 to 2.4.
GOLDEN = {"train": "a40a121c8f9e277a", "test": "cbb42edf3febf465"}
GOLDEN_RAMPS = "22d4862ad889dbf2"

LOAD = """
import sys
from pathlib import Path
from trainer import log
from trainer.data import cache
log.setup("text")
print("digests", *cache.glyph_sources(Path(sys.argv[1]))[1])
"""


@pytest.fixture(scope="module")
def drawn() -> dict[str, ArraySource]:
    return cache.glyph_sources(None)[0]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few pictures: what happens to a cache does not hang on their number."""
    monkeypatch.setattr(cache, "SPLITS", {"train": range(300), "test": range(300, 400)})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caplog see the trainer's lines, whatever an earlier test set up."""
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    caplog.set_level("INFO", logger=log.LOGGER.name)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def assert_same(found: dict[str, ArraySource], wanted: dict[str, ArraySource]) -> None:
    for split in ("train", "test"):
        assert np.array_equal(found[split].images, wanted[split].images)
        assert np.array_equal(found[split].labels, wanted[split].labels)


def start_loading(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", LOAD, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# --- the pictures


def test_sizes_classes_and_normalisation(cache_dir: Path) -> None:
    dataset = data.load(Config(dataset="glyphs"), cache_dir=cache_dir)
    assert (len(dataset.train), len(dataset.test), dataset.classes, dataset.shape) == (60_000, 10_000, 10, (1, 28, 28))
    images, labels = dataset.train.fetch(np.arange(60_000))
    assert (images.dtype, images.shape, type(images)) == (np.uint8, (60_000, 1, 28, 28), np.ndarray)
    assert np.bincount(labels).tolist() == [6000] * 10
    assert np.bincount(dataset.test.fetch(np.arange(10_000))[1]).tolist() == [1000] * 10
    assert images.mean() / 255 == pytest.approx(dataset.mean[0], abs=5e-4)
    assert images.std() / 255 == pytest.approx(dataset.std[0], abs=5e-4)
    assert dataset.shift == 2
    assert data.load(Config(dataset="glyphs", augment="none"), cache_dir=cache_dir).shift == 0
    assert data.load(Config(dataset="glyphs", limit_train=10), cache_dir=cache_dir).fingerprint == dataset.fingerprint


def test_content_is_the_stored_one(drawn: dict[str, ArraySource]) -> None:
    assert {split: digest(source.images)[:16] for split, source in drawn.items()} == GOLDEN


def test_arithmetic_is_the_stored_one() -> None:
    """Without Pillow: masters of plain ramps."""
    side = glyphs.LOOK.master
    ramps = np.arange(10 * 6 * side * side, dtype=np.int64).reshape(10, 6, side, side) % 253
    images, labels = glyphs.draw_split(range(100, 1300), masters=ramps.astype(np.uint8))
    assert digest(images)[:16] == GOLDEN_RAMPS
    assert labels[:3].tolist() == [0, 1, 2]


def test_a_picture_is_a_function_of_its_number(drawn: dict[str, ArraySource]) -> None:
    masters = glyphs.draw_masters()
    some = np.array([59_999, 7, 499, 500])
    assert np.array_equal(glyphs.draw_pictures(some, masters=masters), drawn["train"].images[some, 0])
    first_test = glyphs.draw_pictures(np.array([60_000]), masters=masters)
    assert np.array_equal(first_test, drawn["test"].images[0])


def test_testing_shows_nothing_of_training(drawn: dict[str, ArraySource]) -> None:
    assert not set(cache.SPLITS["train"]) & set(cache.SPLITS["test"])
    seen = {image.tobytes() for image in drawn["train"].images}
    assert len(seen) == 60_000
    assert not any(image.tobytes() in seen for image in drawn["test"].images)


def test_a_linear_model_learns_them_in_part(drawn: dict[str, ArraySource]) -> None:
    """Multinomial logistic regression on the raw pixels: neither hopeless nor enough."""
    count = 20_000
    inputs = {split: torch.from_numpy(drawn[split].images.reshape(-1, 784)) for split in drawn}
    pictures = inputs["train"][:count].float().div(255).sub(glyphs.MEAN).div(glyphs.STD)
    labels = torch.from_numpy(drawn["train"].labels[:count])
    weights = torch.zeros(784, 10, requires_grad=True)
    bias = torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=1e-3)
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(6):
        for ids in torch.randperm(count, generator=shuffle).split(256):
            optimizer.zero_grad()
            cross_entropy(pictures[ids] @ weights + bias, labels[ids]).backward()
            optimizer.step()
    with torch.no_grad():
        answers = (inputs["test"].float().div(255).sub(glyphs.MEAN).div(glyphs.STD) @ weights + bias).argmax(1)
    accuracy = (answers == torch.from_numpy(drawn["test"].labels)).float().mean().item()
    assert 0.60 <= accuracy <= 0.92


# --- the cache


def test_two_processes_at_once_draw_once(tmp_path: Path, drawn: dict[str, ArraySource]) -> None:
    processes = [start_loading(tmp_path / "new" / "cache") for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum("drawing them into" in output for output in outputs) == 1
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    folder = tmp_path / "new" / "cache" / cache.folder_name()
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, folder.with_suffix(".lock").name}
    assert_same(cache.glyph_sources(folder.parent)[0], drawn)


@pytest.mark.usefixtures("lines")
def test_killed_while_drawing_is_drawn_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / cache.folder_name()
    process = start_loading(tmp_path)
    while not folder.with_suffix(".partial").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert not folder.exists()
    _, digests = cache.glyph_sources(tmp_path)
    assert json.loads((folder / "digests.json").read_text()) == digests
    assert not folder.with_suffix(".partial").exists()
    assert not warnings_of(caplog)


def flip_a_byte(folder: Path) -> None:
    path = folder / "test-images.npy"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def cut(folder: Path) -> None:
    os.truncate(folder / "train-images.npy", 5000)


def empty(folder: Path) -> None:
    os.truncate(folder / "train-labels.npy", 0)


def lose_a_file(folder: Path) -> None:
    (folder / "test-labels.npy").unlink()


def garble_the_digests(folder: Path) -> None:
    (folder / "digests.json").write_text("{")


def swap_the_type(folder: Path) -> None:
    np.save(folder / "test-labels.npy", np.array([None, "a"], object), allow_pickle=True)


@pytest.mark.parametrize("damage", [flip_a_byte, cut, empty, lose_a_file, garble_the_digests, swap_the_type])
@pytest.mark.usefixtures("small", "lines")
def test_damaged_cache_is_drawn_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / cache.folder_name()
    wanted = cache.glyph_sources(None)[0]
    cache.glyph_sources(tmp_path)
    damage(folder)
    assert_same(cache.glyph_sources(tmp_path)[0], wanted)
    assert set(warnings_of(caplog)) == {f"glyphs: the cache {folder} is damaged; it is drawn again"}
    caplog.clear()
    assert_same(cache.glyph_sources(tmp_path)[0], wanted)
    assert not caplog.records


@pytest.mark.usefixtures("small", "lines")
def test_cache_is_shared_and_only_read(tmp_path: Path) -> None:
    cache.glyph_sources(tmp_path)
    folder = tmp_path / cache.folder_name()
    folder.with_suffix(".lock").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    source = cache.glyph_sources(tmp_path)[0]["train"]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # not even the lock is needed
    assert not source.images.flags.writeable
    assert isinstance(source.images.base, np.memmap)
    assert source.fetch(np.array([3]))[0].flags.writeable


@pytest.mark.usefixtures("small", "lines")
def test_no_writable_cache_draws_the_same_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    wanted, digests = cache.glyph_sources(tmp_path / "cache")
    caplog.clear()
    found = cache.glyph_sources(tmp_path / "file" / "cache")
    assert_same(found[0], wanted)
    assert found[1] == digests
    assert "drawn in memory at each start, see --cache-dir" in caplog.text
    assert str(tmp_path / "file" / "cache") in caplog.text
    assert not warnings_of(caplog)


@pytest.fixture
def little_space() -> Iterator[None]:
    """Let no file grow beyond 50,000 bytes, like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small", "lines", "little_space")
def test_full_disk_draws_in_memory_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_same(cache.glyph_sources(tmp_path)[0], cache.glyph_sources(None)[0])
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert "drawn in memory at each start" in caplog.text


@pytest.mark.usefixtures("small", "lines")
def test_lock_that_is_never_given_back_is_waited_for_and_then_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.2)
    lock = (tmp_path / cache.folder_name()).with_suffix(".lock")
    code = f"import filelock, time; held = filelock.FileLock({str(lock)!r}); held.acquire(); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert_same(cache.glyph_sources(tmp_path)[0], cache.glyph_sources(None)[0])
        holder.kill()
    assert "another process draws them" in caplog.text
    assert "its lock was held for more than 0.2 s" in caplog.text


@pytest.mark.usefixtures("small")
def test_another_look_is_another_folder_and_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = cache.glyph_sources(tmp_path)[1]
    look = glyphs.Look(noise=glyphs.LOOK.noise + 1)
    monkeypatch.setattr(glyphs, "LOOK", look)
    monkeypatch.setattr(cache, "LOOK", look)
    assert cache.glyph_sources(tmp_path)[1] != digests
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
