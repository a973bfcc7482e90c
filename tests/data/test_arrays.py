"""Data sets by name, from IDX files, from noise and from the user's own function; what is wrong with one is said in one line."""

from __future__ import annotations

import gzip
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import data
from trainer.codes import DataError, SettingError
from trainer.config import Config
from trainer.data.idx import FILES
from trainer.data.sets import ArraySource, First

Write = Callable[[str], str]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Give a function that writes a module and returns its function `load` as a data set's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        name = f"own_{len(list(tmp_path.iterdir()))}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text("import numpy as np\nimport torch\n" + textwrap.dedent(code))
        return f"{name}:load"

    return write


def load(name: str, **settings: Any) -> data.DataSet:
    return data.load(Config(dataset=name, **settings), cache_dir=None)


# --- by name


@pytest.mark.parametrize("name", ["mnst", "", "a/b:c", "module:", ":function"])
def test_unknown_name_lists_the_names(name: str) -> None:
    with pytest.raises(
        SettingError, match=r"--dataset is .*glyphs, mnist, .*cifar100, folder, list, random.*package\.module:function"
    ):
        load(name)


def test_limits_keep_the_first_samples() -> None:
    dataset, whole = load("random", limit_train=3, limit_test=1), load("random")
    assert (len(dataset.train), len(dataset.test), len(whole.train), len(whole.test)) == (3, 1, 50_000, 10_000)
    ids = np.arange(3)
    assert np.array_equal(dataset.train.fetch(ids)[0], whole.train.fetch(ids)[0])
    assert dataset.fingerprint == whole.fingerprint
    assert len(load("random", limit_train=10**9).train) == 50_000


def test_no_training_sample_is_an_error() -> None:
    with pytest.raises(DataError, match="random: no sample to train on.*--limit-train is 0"):
        load("random", limit_train=0)


def test_a_limited_source_starts_over() -> None:
    source = First(ArraySource(np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1), np.arange(3)), 7)
    assert len(source) == 7
    assert source.fetch(np.array([6, 1, 3]))[1].tolist() == [0, 1, 0]


# --- random


def test_random_follows_the_seed_and_covers_all_classes() -> None:
    dataset = load("random", random_shape="2x5x7", random_classes=4)
    ids = np.arange(200)
    images, labels = dataset.train.fetch(ids)
    assert (dataset.shape, dataset.classes, images.shape, images.dtype) == ((2, 5, 7), 4, (200, 2, 5, 7), np.uint8)
    assert set(labels.tolist()) == {0, 1, 2, 3}
    again, other = load("random", random_shape="2x5x7"), load("random", random_shape="2x5x7", seed=1)
    assert np.array_equal(again.train.fetch(ids)[0], images)
    assert not np.array_equal(other.train.fetch(ids)[0], images)
    assert not np.array_equal(dataset.test.fetch(ids)[0], images)
    assert other.fingerprint != again.fingerprint
    assert abs(images.mean() / 255 - dataset.mean[0]) < 0.01
    assert abs(images.std() / 255 - dataset.std[0]) < 0.01


def test_big_random_pictures_stay_within_the_memory_meant_for_them() -> None:
    dataset = load("random", random_shape="3x512x512")
    different = {image.tobytes() for image in dataset.train.fetch(np.arange(100))[0]}
    assert len(different) == 2**26 // (3 * 512 * 512)


@pytest.mark.parametrize("shape", ["3x32", "3x32x32x1", "0x32x32", "3x-1x32", "axbxc", "", "3 x 32 x 32"])
def test_wrong_random_shape_is_named(shape: str) -> None:
    with pytest.raises(SettingError, match="--random-shape is .*allowed"):
        load("random", random_shape=shape)


# --- IDX files


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, *, packed: bool = False) -> dict[str, np.ndarray]:
    """Write a small set of four files, 5 training and 3 test pictures of 4x3, and return their content by name."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split, count in (("train", 5), ("test", 3)):
        images, labels = FILES[split]
        arrays[images] = rng.integers(0, 256, (count, 4, 3), dtype=np.uint8)
        arrays[labels] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(
    ("name", "place"),
    [("mnist", "."), ("mnist", "MNIST/raw"), ("fashion-mnist", "."), ("fashion-mnist", "FashionMNIST/raw")],
)
def test_idx_files_are_found_and_read(tmp_path: Path, name: str, place: str, packed: bool) -> None:
    arrays = write_idx(tmp_path / place, packed=packed)
    dataset = load(name, data_dir=tmp_path, max_shift=3)
    assert (dataset.shape, dataset.classes, dataset.shift, dataset.in_memory) == ((1, 4, 3), 10, 3, True)
    for split, source in (("train", dataset.train), ("test", dataset.test)):
        images, labels = source.fetch(np.arange(len(source)))
        assert np.array_equal(images[:, 0], arrays[FILES[split][0]])
        assert np.array_equal(labels, arrays[FILES[split][1]])
    assert load(name, data_dir=tmp_path, augment="none").shift == 0


def test_fingerprint_follows_the_content_and_not_the_packing(tmp_path: Path) -> None:
    arrays = write_idx(tmp_path / "plain")
    write_idx(tmp_path / "packed", packed=True)
    first = load("mnist", data_dir=tmp_path / "plain").fingerprint
    assert load("mnist", data_dir=tmp_path / "packed").fingerprint == first
    for name in arrays:
        folder = tmp_path / name
        write_idx(folder)
        changed = arrays[name].copy()
        changed.flat[0] = (changed.flat[0] + 1) % 10
        (folder / name).write_bytes(idx_bytes(changed))
        assert load("mnist", data_dir=folder).fingerprint != first


def test_missing_idx_files_are_listed_with_both_places(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / FILES["test"][1]).unlink()
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir=tmp_path)
    text = str(caught.value)
    assert f"holds no {FILES['test'][1]};" in text
    assert all(name in text for pair in FILES.values() for name in pair)
    assert str(tmp_path / "MNIST/raw") in text
    assert "\n" not in text


def test_data_dir_must_be_given() -> None:
    with pytest.raises(SettingError, match="--data-dir is not set.*mnist"):
        load("mnist")


LABELS, IMAGES = FILES["train"][1], FILES["train"][0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (IMAGES, b"", "begins with nothing; expected 00000803"),
        (IMAGES, b"\0\0\x08\x03\0\0", "begins with 00000803"),
        (IMAGES, idx_bytes(np.zeros(60, np.uint8)), "begins with 00000801; expected 00000803"),
        (
            IMAGES,
            idx_bytes(np.zeros((5, 4, 3), np.uint8))[:-1],
            r"has 59 bytes after its header; expected 60 \(5x4x3\)",
        ),
        (IMAGES, idx_bytes(np.zeros((5, 4, 3), np.uint8)) + b"\0", "has 61 bytes"),
        (IMAGES, idx_bytes(np.zeros((5, 3, 4), np.uint8)), r"\(3, 4\) for training, \(4, 3\) for testing"),
        (IMAGES, idx_bytes(np.zeros((6, 4, 3), np.uint8)), "has 6 pictures.*5 labels"),
        (LABELS, idx_bytes(np.array([1, 2, 10, 3, 4], np.uint8)), "label 2 is 10; allowed: 0 to 9"),
        (LABELS, b"<html>not found</html>", "begins with 3c68746d"),
    ],
)
def test_damaged_idx_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    write_idx(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load("mnist", data_dir=tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(bytes(1000))[:-9], gzip.compress(bytes(range(256)))[:-60]],
    ids=[
        "empty",
        "text",
        "no end",
        "half",
    ],  # the content holds the time of day, and every worker must collect the same
)
def test_damaged_gzip_file_is_named(tmp_path: Path, content: bytes) -> None:
    write_idx(tmp_path, packed=True)
    (tmp_path / f"{IMAGES}.gz").write_bytes(content)
    with pytest.raises(DataError, match=rf"{IMAGES}\.gz") as caught:
        load("mnist", data_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_real_mnist(test_data: Path) -> None:
    dataset = load("mnist", data_dir=test_data / "mnist")
    assert (len(dataset.train), len(dataset.test), dataset.shape) == (60_000, 10_000, (1, 28, 28))
    images, labels = dataset.train.fetch(np.arange(60_000))
    assert np.bincount(labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert (images.mean() / 255, images.std() / 255) == (
        pytest.approx(dataset.mean[0], abs=1e-4),
        pytest.approx(dataset.std[0], abs=1e-4),
    )


# --- the user's own


ARRAYS = """
def load(split, config):
    n = 6 if split == "train" else 4
    images = np.arange(n * 20, dtype=np.uint8).reshape(n, 5, 4)
    return images, np.arange(n) % 3
"""

ITEMS = """
class Items:
    classes = ["a", "b", "c"]
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, index):
        return torch.full((2, 5, 4), index, dtype=torch.uint8), index % 3
def load(split, config):
    return Items(6 if split == "train" else 4)
"""


def test_own_arrays(own: Write) -> None:
    dataset = load(own(ARRAYS))
    assert (len(dataset.train), len(dataset.test), dataset.shape, dataset.classes) == (6, 4, (1, 5, 4), 3)
    assert (dataset.in_memory, dataset.shift) == (True, 0)
    images, labels = dataset.train.fetch(np.array([5, 0]))
    assert images[1, 0].tolist() == np.arange(20).reshape(5, 4).tolist()
    assert labels.tolist() == [2, 0]
    assert dataset.mean[0] == pytest.approx(np.arange(120).mean() / 255, abs=1e-4)


def test_own_tensors_with_channels(own: Write) -> None:
    dataset = load(own("def load(split, config): return torch.zeros(4, 3, 6, 7, dtype=torch.uint8), torch.arange(4)"))
    assert (dataset.shape, dataset.classes, len(dataset.mean), dataset.std) == ((3, 6, 7), 4, 3, (0.0039,) * 3)


def test_own_items(own: Write) -> None:
    dataset = load(own(ITEMS))
    assert (len(dataset.train), len(dataset.test), dataset.shape, dataset.classes) == (6, 4, (2, 5, 4), 3)
    assert (dataset.in_memory, dataset.mean, dataset.std) == (False, (0.5, 0.5), (0.25, 0.25))
    images, labels = dataset.train.fetch(np.array([5, 0]))
    assert (images[0, 1, 2, 3], images[1, 1, 2, 3], labels.tolist()) == (5, 0, [2, 0])
    given = ITEMS.replace("classes =", "mean, std, fingerprint = (0.1, 0.2), (0.3, 0.4), 'v2'\n    classes =")
    other = load(own(given))
    assert (other.mean, other.std) == ((0.1, 0.2), (0.3, 0.4))
    assert other.fingerprint != dataset.fingerprint


def test_function_sees_the_split_and_the_settings(own: Write) -> None:
    code = "def load(split, config):\n    n = config.max_shift + len(split)\n    return np.zeros((n, 2, 2), np.uint8), np.zeros(n, int)"
    dataset = load(own(code), max_shift=10)
    assert (len(dataset.train), len(dataset.test)) == (15, 14)


def test_fingerprint_of_own_arrays_follows_every_part(own: Write) -> None:
    versions = [
        ARRAYS,
        ARRAYS.replace("return images,", "images[-1, -1, -1] += 1; return images,"),
        ARRAYS.replace("% 3", "// 2 % 3"),
        ARRAYS.replace("5, 4)", "4, 5)"),
        ARRAYS.replace("else 4", "else 3"),
    ]
    fingerprints = [load(own(code)).fingerprint for code in versions]
    assert len(set(fingerprints)) == len(versions)
    assert load(own(ARRAYS)).fingerprint == fingerprints[0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nothing_like_this", "cannot be imported: ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def other(): pass", "cannot be imported: AttributeError"),
        ("load = 3", "is no function but int"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("def broken(:", "cannot be imported: SyntaxError"),
    ],
)
def test_function_that_cannot_be_imported_is_a_setting_error(own: Write, code: str, words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        load(own(code))
    assert "\n" not in str(caught.value)


def test_module_that_does_not_exist_is_a_setting_error() -> None:
    with pytest.raises(SettingError, match="--dataset no_such.module:function cannot be imported"):
        load("no_such.module:function")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("1 / 0", "its function failed for 'train': ZeroDivisionError: division by zero"),
        ("None", "train: the function returned NoneType"),
        ("(1, 2, 3)", "train: the function returned 3 things"),
        ("(np.zeros((4, 2, 2)), np.zeros(4, int))", r"train: images are float64 \[4, 1, 2, 2\]"),
        (
            "(np.zeros((4, 28, 28, 3), np.uint8), np.zeros(4, int))",
            r"images are uint8 \[4, 28, 28, 3\].*1 to 4 channels",
        ),
        ("(np.zeros((4, 2), np.uint8), np.zeros(4, int))", r"images are uint8 \[4, 2\]"),
        ("(np.zeros((4, 0, 2), np.uint8), np.zeros(4, int))", r"images are uint8 \[4, 1, 0, 2\]"),
        ("(np.zeros((4, 2, 2), np.uint8), np.array([0, 1, 2**40, 2]))", "the label of sample 2 is 1099511627776"),
        ("(np.zeros((4, 2, 2), np.uint8), np.zeros(3, int))", r"labels are int64 \[3\]; expected whole numbers \[4\]"),
        ("(np.zeros((4, 2, 2), np.uint8), np.array([0, 1, 1.5, 2]))", "labels are float64"),
        ("(np.zeros((4, 2, 2), np.uint8), np.array(['', '1', '2', '3']))", "labels are <U1"),
        (
            "(np.zeros((4, 2, 2), np.uint8), np.array([0, -1, 1, 2]))",
            "train: the label of sample 1 is -1; allowed: 0 to 2",
        ),
        ("(np.zeros((4, 2, 2), np.uint8), np.array([0, 1, 2, -100]))", "the label of sample 3 is -100"),
        (
            "(np.zeros((4, 2, 2), np.uint8), np.full(4, 3 if split == 'test' else 2))",
            "test: the label of sample 0 is 3; allowed: 0 to 2",
        ),
        ("(np.zeros((4, 2, 2 + len(split)), np.uint8), np.zeros(4, int))", "test pictures are"),
        ("(np.zeros((0, 2, 2), np.uint8), np.zeros(0, int))", "no sample to train on; it has 0"),
    ],
)
def test_own_arrays_that_cannot_be_used(own: Write, result: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        load(own(f"def load(split, config): return {result}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('classes = ["a", "b", "c"]', "", "`classes` is None"),
        ('classes = ["a", "b", "c"]', "classes = 0", "`classes` is 0"),
        ("def __len__(self): return self.n", "", "the function returned Items"),
        ("self.n = n", "self.n = n; self.classes = n", "6 classes to train, 4 to test"),
        ("classes =", "mean = (0.5,)\n    classes =", "`mean` is .*expected 2 numbers"),
        ("classes =", "std = (0.5, 0)\n    classes =", "`std` is .*above 0"),
        ("classes =", "mean = 0.5\n    classes =", "cannot be used: TypeError"),
        ("classes =", "mean = (0.5, float('nan'))\n    classes =", "`mean` is .*expected 2 numbers"),
        ("return self.n", "return 1 // 0", "cannot be used: ZeroDivisionError"),
        ("return self.n", "return 0", "no sample to train on"),
        ("torch.uint8", "torch.float32", r"train: the picture of sample 0 is float32 \[2, 5, 4\]; expected uint8"),
    ],
)
def test_own_items_that_cannot_be_used(own: Write, old: str, new: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(own(ITEMS.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("index % 3", "index", "train: the label of sample 3 is 3; allowed: 0 to 2"),
        ("index % 3", "(index % 3 if index != 3 else -1)", "train: the label of sample 3 is -1"),
        ("index % 3", "(index % 3 if index != 3 else 1.5)", "train: sample 3 cannot be read: TypeError"),
        (
            "(2, 5, 4)",
            "(2, 5 + index // 3, 4)",
            r"the picture of sample 3 is uint8 \[2, 6, 4\]; expected uint8 \[2, 5, 4\]",
        ),
        ("return torch", "1 / (index - 3); return torch", "train: sample 3 cannot be read: ZeroDivisionError"),
    ],
)
def test_own_item_that_cannot_be_used_is_named(own: Write, old: str, new: str, words: str) -> None:
    dataset = load(own(ITEMS.replace(old, new)))
    dataset.train.fetch(np.array([0, 1, 2]))
    with pytest.raises(DataError, match=words):
        dataset.train.fetch(np.array([0, 3]))


def test_own_random_numbers_follow_the_seeds(own: Write) -> None:
    code = ITEMS.replace("torch.full((2, 5, 4), index, dtype=torch.uint8)", "self.noise()").replace(
        "classes =", "def noise(self):\n        import random\n        values = [random.random(), np.random.rand(), torch.rand(()).item()]\n"
        "        return np.uint8([int(256 * value) for value in values]).reshape(3, 1, 1)\n    classes =")  # fmt: skip
    source = load(own(code)).train
    ids, seeds = np.array([1, 2, 1]), np.array([5, 6, 7], np.uint64)
    first = source.fetch(ids, seeds=seeds)[0]
    assert np.array_equal(source.fetch(ids[::-1], seeds=seeds[::-1])[0], first[::-1])
    assert (first[0] != first[2]).all()
    assert np.array_equal(source.fetch(ids)[0][0], source.fetch(ids)[0][2])
