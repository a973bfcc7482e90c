"""Read the four IDX files of MNIST and of Fashion-MNIST, plain or gzipped; nothing is downloaded or written."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from trainer.codes import DataError
from trainer.data.files import find_files
from trainer.data.sets import I64, U8

#: split -> pictures, labels
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CLASSES = 10


def read_splits(folder: Path, *, subfolder: str) -> dict[str, tuple[U8, I64]]:
    """Read both splits as pictures [n, 1, h, w] and labels [n].

    Args:
        folder: holds the files, or holds them in `subfolder`, like MNIST/raw.

    Raises:
        DataError: a file is missing, cut, of another kind, or does not fit the others.
    """
    names = [name for pair in FILES.values() for name in pair]
    paths = find_files(names, folder=folder, subfolder=subfolder, endings=("", ".gz"))
    splits = {}
    for split, (images_name, labels_name) in FILES.items():
        images = _read(paths[images_name], dimensions=3)[:, None]
        labels = _read(paths[labels_name], dimensions=1)
        if len(images) != len(labels):
            raise DataError(
                f"{paths[images_name]} has {len(images)} pictures, {paths[labels_name]} {len(labels)} labels"
            )
        bad = np.flatnonzero(labels >= CLASSES)
        if bad.size:
            raise DataError(f"{paths[labels_name]}: label {bad[0]} is {labels[bad[0]]}; allowed: 0 to {CLASSES - 1}")
        splits[split] = images, labels.astype(np.int64)
    shapes = {split: images.shape[2:] for split, (images, _) in splits.items()}
    if shapes["train"] != shapes["test"]:
        raise DataError(f"{folder}: the pictures are {shapes['train']} for training, {shapes['test']} for testing")
    return splits


def _read(path: Path, *, dimensions: int) -> U8:
    """Read one file: two zero bytes, type 8 (unsigned byte), the number of dimensions, each one's size, then the values."""
    content = _content(path)
    magic = bytes((0, 0, 8, dimensions))
    start = 4 * (1 + dimensions)
    if content[:4] != magic or len(content) < start:
        raise DataError(
            f"{path} begins with {content[:4].hex() or 'nothing'}; expected {magic.hex()}: not this kind of IDX file"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) - start != size:
        sizes = "x".join(map(str, shape))
        raise DataError(
            f"{path} has {len(content) - start} bytes after its header; expected {size} ({sizes}): cut, or changed"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is cut, or no gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
