"""Read the python files of CIFAR-10 and CIFAR-100, as they lie in their archives; nothing is downloaded or written.

They are pickles, which can name any function to be called. Here five names are known, stand-ins of our own take their place, and
every other name is refused: no code that a file names is ever found or called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.codes import DataError
from trainer.data.files import find_files
from trainer.data.sets import I64, U8

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Kind:
    """Say where one of the two data sets has what.

    Attributes:
        subfolder: that its archive unpacks to.
        splits: split -> files.
        meta: file of the class names.
        labels, names: keys of the labels and of the class names.
        classes: number of classes.
        mean, std: of the training pixels, per channel, in 0..1 units.
    """

    subfolder: str
    splits: dict[str, tuple[str, ...]]
    meta: str
    labels: str
    names: str
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of all files."""
        return (*self.splits["train"], *self.splits["test"], self.meta)


KINDS = {
    "cifar10": Kind(
        subfolder="cifar-10-batches-py",
        splits={"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
        meta="batches.meta",
        labels="labels",
        names="label_names",
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Kind(
        subfolder="cifar-100-python",
        splits={"train": ("train",), "test": ("test",)},
        meta="meta",
        labels="fine_labels",
        names="fine_label_names",
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def read_splits(folder: Path, *, name: str) -> dict[str, tuple[U8, I64]]:
    """Read both splits as pictures [n, 3, 32, 32] and labels [n]; of CIFAR-100 the fine ones.

    Args:
        folder: holds the files, or holds them in the subfolder that the archive unpacks to.
        name: a key of KINDS.

    Raises:
        DataError: a file is missing, cut, changed or of another kind, or names code.
    """
    kind = KINDS[name]
    paths = find_files(kind.files, folder=folder, subfolder=kind.subfolder)
    splits = {}
    for split, files in kind.splits.items():
        batches = [_read_batch(paths[file], kind) for file in files]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        splits[split] = images.reshape(-1, *SHAPE), labels
    return splits


def read_class_names(folder: Path, *, name: str) -> tuple[str, ...]:
    """Read the names of the classes, by label; of CIFAR-100 the fine ones. Arguments and errors as in `read_splits`."""
    kind = KINDS[name]
    path = find_files(kind.files, folder=folder, subfolder=kind.subfolder)[kind.meta]
    names = _read(path).get(kind.names)
    if not isinstance(names, list) or len(names) != kind.classes or not all(isinstance(item, str) for item in names):
        raise _changed(path, f"its {kind.names!r} are not {kind.classes} names")
    return tuple(names)


def _changed(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is cut, changed or of another kind ({why}); put the original there, "
        "or remove its folder and start with --download"
    )


def _read_batch(path: Path, kind: Kind) -> tuple[U8, I64]:
    """Read one file as pixels [n, 3072] and labels [n]."""
    entry = _read(path)
    array, labels = entry.get("data"), entry.get(kind.labels)
    pixels = array.values if isinstance(array, _Array) else None
    if pixels is None or pixels.shape[1:] != (PIXELS,):
        raise _changed(path, f"its 'data' are no bytes [n, {PIXELS}]")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        count = f"{len(labels)} labels" if isinstance(labels, list) else "no list of labels"
        raise _changed(path, f"{len(pixels)} pictures, but {count} in {kind.labels!r}")
    for number, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < kind.classes:
            shown = label if isinstance(label, int | float) else type(label).__name__
            raise DataError(f"{path}: label {number} is {shown}; allowed: 0 to {kind.classes - 1}")
    return pixels, np.array(labels, np.int64)


def _read(path: Path) -> dict[Any, Any]:
    try:
        entry = _Reader(path, path.read_bytes()).load()
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # garbled pickles end in nearly every type of error
        raise _changed(path, type(error).__name__) from error
    if not isinstance(entry, dict):
        raise _changed(path, f"{type(entry).__name__} instead of a dict")
    return entry


class _Array:
    """Stand in for numpy.ndarray, of bytes alone."""

    values: U8 | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, raw = state
        if kind.name != "u1":
            return
        content = raw.encode("latin1") if isinstance(raw, str) else raw  # a str where Python 2 wrote it
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")


class _Dtype:
    """Stand in for numpy.dtype: keep the name, u1 for bytes."""

    def __init__(self, name: str, *rest: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like: of no meaning for bytes


def _make_array(*rest: Any) -> _Array:
    return _Array()


def _encode(text: str, codec: str) -> bytes:
    # Python 3 writes bytes so, in protocol 2. Other codecs could be bombs.
    if codec not in ("latin1", "latin-1"):
        raise ValueError(codec)
    return text.encode("latin1")


#: What a file may name -> what it gets.
STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _make_array,
    ("numpy._core.multiarray", "_reconstruct"): _make_array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    """Read plain values and arrays of bytes; refuse all else."""

    def __init__(self, path: Path, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")  # the real files' texts are Python 2's
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for what the file names. Raises DataError where there is none."""
        stand_in = STAND_INS.get((module, name))
        if stand_in is None:
            raise DataError(
                f"{self.path} names code, {f'{module}.{name}'[:100]!r}: refused, and not called. "
                "It is no file of CIFAR; put the original there"
            )
        return stand_in
