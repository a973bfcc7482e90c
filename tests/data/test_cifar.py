"""CIFAR's files are read as Python 2 and Python 3 write them, what is wrong with one is said in a line, and no code in one is ever called."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.codes import DataError
from trainer.data import cifar
from trainer.data.cifar import KINDS, read_class_names, read_splits

NAMES = list(KINDS)


def pixels(count: int, first: int) -> np.ndarray[Any, Any]:
    return (np.arange(count * 3072, dtype=np.int64) * 7 + first).astype(np.uint8).reshape(count, 3072)


def content(name: str) -> dict[str, dict[str, Any]]:
    """Return what each file of a small data set says: 3 pictures a file, labels that no two files share."""
    kind = KINDS[name]
    files: dict[str, dict[str, Any]] = {kind.meta: {kind.names: [f"class {number}" for number in range(kind.classes)]}}
    for number, file in enumerate(kind.files[:-1]):
        labels = [number, kind.classes - 1 - number, number]
        files[file] = {
            "batch_label": "a batch",
            kind.labels: labels,
            "data": pixels(3, number),
            "filenames": ["a.png"] * 3,
        }
    return files


def write(folder: Path, name: str, encode: Callable[[Any], bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, value in content(name).items():
        (folder / file).write_bytes(encode(value))
    return folder


def python_3(value: Any) -> bytes:
    return pickle.dumps(value, protocol=2)


def python_2(value: Any) -> bytes:
    """Write what cPickle of Python 2 writes in protocol 2: texts and the array's bytes as its own kind of str."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value: Any) -> bytes:
    if isinstance(value, str | bytes):
        raw = value if isinstance(value, bytes) else value.encode()
        return b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + struct.pack("<i", len(raw)) + raw
    if isinstance(value, int):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_opcodes(key) + _opcodes(item) for key, item in value.items()) + b"u"
    rows, columns = value.shape
    dtype = (
        b"cnumpy\ndtype\n"
        + _opcodes("u1")
        + b"K\x00K\x01\x87R(K\x03"
        + _opcodes("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    state = (
        b"(K\x01" + _opcodes(rows) + _opcodes(columns) + b"\x86" + dtype + b"\x89" + _opcodes(value.tobytes()) + b"t"
    )
    return b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R" + state + b"b"


@pytest.mark.parametrize("encode", [python_2, python_3])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("below", [False, True])
def test_both_splits_are_read(tmp_path: Path, name: str, encode: Callable[[Any], bytes], below: bool) -> None:
    kind = KINDS[name]
    write(tmp_path / kind.subfolder if below else tmp_path, name, encode)
    splits = read_splits(tmp_path, name=name)
    count = len(kind.files) - 2  # without test and meta
    images, labels = splits["train"]
    assert (images.dtype, images.shape, labels.dtype, len(labels)) == (
        np.uint8,
        (3 * count, 3, 32, 32),
        np.int64,
        3 * count,
    )
    assert np.array_equal(images.reshape(-1, 3072), np.concatenate([pixels(3, number) for number in range(count)]))
    assert labels[:3].tolist() == [0, kind.classes - 1, 0]
    assert splits["test"][1].tolist() == [count, kind.classes - 1 - count, count]
    assert np.array_equal(splits["test"][0].reshape(-1, 3072), pixels(3, count))
    assert read_class_names(tmp_path, name=name) == tuple(f"class {number}" for number in range(kind.classes))


def test_what_python_2_writes_here_is_what_pickle_reads() -> None:
    entry = pickle.loads(python_2({"data": pixels(2, 5), "labels": [1, 300], "text": "a"}), encoding="latin1")
    assert np.array_equal(entry.pop("data"), pixels(2, 5))
    assert entry == {"labels": [1, 300], "text": "a"}


def test_arrays_in_column_order_and_text_protocol_are_read(tmp_path: Path) -> None:
    write(tmp_path, "cifar100", lambda value: pickle.dumps(value, protocol=0))
    images = pixels(3, 9)
    entry = {"fine_labels": [1, 2, 3], "data": np.asfortranarray(images)}
    (tmp_path / "test").write_bytes(pickle.dumps(entry, protocol=2))
    assert np.array_equal(read_splits(tmp_path, name="cifar100")["test"][0].reshape(-1, 3072), images)


@pytest.mark.parametrize("name", NAMES)
def test_missing_files_are_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    with pytest.raises(DataError, match=f"{tmp_path} holds none of the files; expected .*{kind.files[0]}.*--download"):
        read_splits(tmp_path, name=name)
    write(tmp_path, name, python_3)
    (tmp_path / kind.files[0]).unlink()
    (tmp_path / kind.meta).unlink()
    with pytest.raises(DataError, match=f"holds no {kind.files[0]} and no {kind.meta}; expected"):
        read_splits(tmp_path, name=name)


def change(folder: Path, **values: Any) -> Path:
    """Write a small cifar10 whose data_batch_2 has other values, None: none."""
    entry = content("cifar10")["data_batch_2"] | values
    write(folder, "cifar10", python_3)
    (folder / "data_batch_2").write_bytes(python_3({key: value for key, value in entry.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"labels": [1, 10, 2]}, "data_batch_2: label 1 is 10; allowed: 0 to 9"),
        ({"labels": [1, 2, -1]}, "data_batch_2: label 2 is -1; allowed: 0 to 9"),
        ({"labels": [1.5, 2, 1]}, "data_batch_2: label 0 is 1.5; allowed: 0 to 9"),
        ({"labels": [2**70, 2, 1]}, "data_batch_2: label 0 is 1180591620717411303424; allowed"),
        ({"labels": ["dog", 2, 1]}, "data_batch_2: label 0 is str; allowed"),
        ({"labels": [1, 2]}, "data_batch_2 is cut, changed.*3 pictures, but 2 labels in 'labels'"),
        ({"labels": None}, "3 pictures, but no list of labels"),
        ({"data": None}, r"data_batch_2 is cut, changed.*no bytes \[n, 3072\].*--download"),
        ({"data": pixels(3, 0)[:, :3071]}, r"no bytes \[n, 3072\]"),
        ({"data": pixels(3, 0).astype(np.float32)}, r"no bytes \[n, 3072\]"),
        ({"data": pixels(3, 0).astype(object)}, r"no bytes \[n, 3072\]"),
        ({"data": pixels(1, 0)[0]}, r"no bytes \[n, 3072\]"),
        ({"data": [[1, 2]]}, r"no bytes \[n, 3072\]"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read_splits(change(tmp_path, **values), name="cifar10")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "written", [b"", b"\x1f\x8b\x08 no pickle", b"<html>404</html>", pickle.dumps([1, 2], 2), pickle.dumps(3, 2)]
)
def test_file_of_another_kind_is_named(tmp_path: Path, written: bytes) -> None:
    (change(tmp_path) / "test_batch").write_bytes(written)
    with pytest.raises(DataError, match="test_batch is cut, changed or of another kind") as caught:
        read_splits(tmp_path, name="cifar10")
    assert "\n" not in str(caught.value)


def test_cut_and_garbled_files_never_end_in_another_error(tmp_path: Path) -> None:
    whole = (change(tmp_path) / "test_batch").read_bytes()
    for size in [*range(0, 400, 3), *range(400, len(whole), 1000), len(whole) - 1]:
        (tmp_path / "test_batch").write_bytes(whole[:size])
        with pytest.raises(DataError, match="test_batch"):
            read_splits(tmp_path, name="cifar10")
    for place in [*range(400), *range(len(whole) - 200, len(whole))]:
        garbled = bytearray(whole)
        garbled[place] ^= 0x15
        (tmp_path / "test_batch").write_bytes(garbled)
        with contextlib.suppress(DataError):  # it may still be a file of the kind
            read_splits(tmp_path, name="cifar10")


@pytest.mark.parametrize("names", [None, ["cat"] * 9, [1] * 10, "abcdefghij"])
def test_wrong_class_names_are_an_error(tmp_path: Path, names: Any) -> None:
    (change(tmp_path) / "batches.meta").write_bytes(python_3({"label_names": names}))
    with pytest.raises(DataError, match="batches.meta is cut, changed.*'label_names' are not 10 names"):
        read_class_names(tmp_path, name="cifar10")


class Call:
    """Pickle as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_call_in_a_file_is_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    made = tmp_path / "made"
    calls = [Call(os.system, f"touch {made}"), Call(eval, f"open({str(made)!r}, 'w')"), Call(os.mkdir, str(made))]
    for call in calls:
        for entry in (call, content("cifar10")["test_batch"] | {"filenames": call}):
            (change(tmp_path / "set") / "test_batch").write_bytes(pickle.dumps(entry, protocol))
            with pytest.raises(DataError, match="test_batch names code, .*: refused, and not called") as caught:
                read_splits(tmp_path / "set", name="cifar10")
            assert "\n" not in str(caught.value)
            assert not made.exists()


@pytest.mark.parametrize(
    "named",
    [
        b"cnumpy.core.multiarray\nscalar\n.",
        b"c_codecs\ndecode\n.",
        b"\x80\x04\x8c\x07_codecs\x8c\x12encode.__globals__\x93.",
        b"cnumpy\nload\n.",
        b"cnumpy\nndarray.tofile\n.",
    ],
)
def test_other_names_of_the_same_modules_are_refused(tmp_path: Path, named: bytes) -> None:
    (change(tmp_path) / "test_batch").write_bytes(named)
    with pytest.raises(DataError, match="test_batch names code"):
        read_splits(tmp_path, name="cifar10")


def test_a_bomb_in_another_codec_is_not_unpacked(tmp_path: Path) -> None:
    (change(tmp_path) / "test_batch").write_bytes(b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.")
    with pytest.raises(DataError, match=r"test_batch is cut, changed or of another kind \(ValueError\)"):
        read_splits(tmp_path, name="cifar10")
    assert cifar.STAND_INS.keys() == {
        ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
    }  # fmt: skip
