"""The table of data sets: which names --dataset knows, and how each one is loaded.

What a data set is lives in `sets.py`; the reading and drawing in a file each.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

from trainer.codes import DataError, SettingError
from trainer.config import Config
from trainer.data import cache, cifar, glyphs, idx
from trainer.data.order import RANDOM, draws
from trainer.data.pictures.load import load_pictures
from trainer.data.sets import I64, U8, ArraySource, DataSet, First, Spread, digest, fingerprint
from trainer.data.user import load_user

NAMES = ("glyphs", "mnist", "fashion-mnist", "cifar10", "cifar100", "folder", "list", "random")

#: name -> folder that torchvision unpacks to, mean and standard deviation of the training pixels.
IDX_SETS = {"mnist": ("MNIST/raw", 0.1307, 0.3081), "fashion-mnist": ("FashionMNIST/raw", 0.2860, 0.3530)}

PICTURES = ("folder", "list")

RANDOM_SIZES = {"train": 50_000, "test": 10_000}
RANDOM_BYTES, MOST_RANDOM, RANDOM_CHUNK = 64 * 2**20, 4096, 64
MOST_RANDOM_BYTES = 64 * 2**20  # of one picture


def load(config: Config, *, cache_dir: Path | None) -> DataSet:
    """Load the data set that --dataset names, cut to --limit-train and --limit-test.

    In training, unless --augment is none, pictures of glyphs, mnist, fashion-mnist and CIFAR are shifted by up to --max-shift
    pixels, CIFAR's mirrored too; of picture files a random part is taken.

    Args:
        cache_dir: where drawn data may be kept, or None.

    Raises:
        SettingError: no such data set, or a setting that it needs is missing or wrong.
        DataError: its data cannot be used, or there is no sample to train on.
    """
    dataset = _fitted(_load_whole(config, cache_dir=cache_dir), config)
    train, test = _counts(dataset, config)
    if not train:
        raise DataError(
            f"data set {dataset.name}: no sample to train on; it has {len(dataset.train)}, --limit-train is {config.limit_train}"
        )
    part = Spread if config.dataset in PICTURES else First
    return dataclasses.replace(dataset, train=part(dataset.train, train), test=part(dataset.test, test))


def _fitted(dataset: DataSet, config: Config) -> DataSet:
    """Take --num-classes and --image-size into account, where the data set's own loading did not."""
    classes, side = config.num_classes or dataset.classes, config.image_size
    if classes < dataset.classes:
        raise SettingError(f"--num-classes is {classes}, but --dataset {dataset.name} has {dataset.classes} classes")
    resize = side if side is not None and dataset.shape[1:] != (side, side) else None
    return dataclasses.replace(dataset, classes=classes, resize=resize)


def _counts(dataset: DataSet, config: Config) -> tuple[int, int]:
    limits = ((dataset.train, config.limit_train), (dataset.test, config.limit_test))
    train, test = (len(source) if limit is None else min(limit, len(source)) for source, limit in limits)
    return train, test


def _load_whole(config: Config, *, cache_dir: Path | None) -> DataSet:
    if config.dataset == "glyphs":
        return _glyphs(config, cache_dir=cache_dir)
    if config.dataset in IDX_SETS:
        return _idx(config)
    if config.dataset in cifar.KINDS:
        return _cifar(config)
    if config.dataset in PICTURES:
        return load_pictures(config)
    if config.dataset == "random":
        return _random(config)
    if re.fullmatch(r"[\w.]+:\w+", config.dataset):
        return load_user(config)
    raise SettingError(
        f"--dataset is {config.dataset!r}; allowed: {', '.join(NAMES)}, or your own as package.module:function"
    )


def _shift(config: Config) -> int:
    return config.max_shift if config.augment == "auto" else 0


def _glyphs(config: Config, *, cache_dir: Path | None) -> DataSet:
    sources, digests = cache.glyph_sources(cache_dir)
    return DataSet(
        name=config.dataset,
        train=sources["train"],
        test=sources["test"],
        classes=glyphs.CLASSES,
        shape=(1, glyphs.SIDE, glyphs.SIDE),
        mean=(glyphs.MEAN,),
        std=(glyphs.STD,),
        shift=_shift(config),
        fingerprint=fingerprint(digests),
        in_memory=True,
    )


def _idx(config: Config) -> DataSet:
    subfolder, mean, std = IDX_SETS[config.dataset]
    splits = idx.read_splits(_folder(config, idx.FILES["train"][0]), subfolder=subfolder)
    return _in_memory(config, splits, classes=idx.CLASSES, mean=(mean,), std=(std,))


def _cifar(config: Config) -> DataSet:
    kind = cifar.KINDS[config.dataset]
    folder = _folder(config, kind.subfolder)
    splits = cifar.read_splits(folder, name=config.dataset)
    made = _in_memory(config, splits, classes=kind.classes, mean=kind.mean, std=kind.std)
    names = cifar.read_class_names(folder, name=config.dataset)
    return dataclasses.replace(made, flip=config.augment == "auto", class_names=names)


def _folder(config: Config, first: str) -> Path:
    if config.data_dir is None:
        raise SettingError(
            f"--data-dir is not set; --dataset {config.dataset} needs the folder that holds its files ({first} ...), "
            "or that --download puts them into"
        )
    return config.data_dir


def _in_memory(
    config: Config, splits: dict[str, tuple[U8, I64]], *, classes: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> DataSet:
    channels, height, width = splits["train"][0].shape[1:]
    return DataSet(
        name=config.dataset,
        train=ArraySource(*splits["train"]),
        test=ArraySource(*splits["test"]),
        classes=classes,
        shape=(channels, height, width),
        mean=mean,
        std=std,
        shift=_shift(config),
        fingerprint=fingerprint([digest(array) for arrays in splits.values() for array in arrays]),
        in_memory=True,
    )


def _random(config: Config) -> DataSet:
    """Draw noise, for measurements of speed.

    At most 4,096 different pictures in at most 64 MB per split are drawn and used over and over, each with a label of its own.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", config.random_shape)
    if match is None:
        raise SettingError(
            f"--random-shape is {config.random_shape!r}; allowed: channels x height x width, like 3x32x32"
        )
    channels, height, width = (int(number) for number in match.groups())
    if channels * height * width > MOST_RANDOM_BYTES:
        raise SettingError(
            f"--random-shape is {config.random_shape}; allowed: at most {MOST_RANDOM_BYTES} bytes a picture"
        )
    shape = (channels, height, width)
    train, test = (First(_noise(config, shape, split), size) for split, size in enumerate(RANDOM_SIZES.values()))
    return DataSet(
        name=config.dataset,
        train=train,
        test=test,
        classes=config.random_classes,
        shape=shape,
        mean=(0.5,) * channels,
        std=(0.2887,) * channels,  # of the uniform distribution: 1 / sqrt(12)
        shift=0,
        fingerprint=fingerprint([f"random {shape} {config.random_classes} {config.seed}"]),
        in_memory=True,
    )


def _noise(config: Config, shape: tuple[int, int, int], split: int) -> ArraySource:
    size = shape[0] * shape[1] * shape[2]
    count = max(1, min(MOST_RANDOM, RANDOM_BYTES // size))
    images = np.empty((count, *shape), np.uint8)
    labels = np.empty(count, np.int64)
    for start in range(0, count, RANDOM_CHUNK):
        rows = slice(start, min(start + RANDOM_CHUNK, count))
        numbers = np.arange(rows.start, rows.stop, dtype=np.int64) + split * MOST_RANDOM
        raw = draws(config.seed, positions=numbers, count=1 + -(-size // 8), purpose=RANDOM)
        labels[rows] = raw[:, 0] % np.uint64(config.random_classes)
        images[rows] = raw[:, 1:].astype("<u8").view(np.uint8)[:, :size].reshape(-1, *shape)
    return ArraySource(images, labels)
