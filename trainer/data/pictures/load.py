"""Data sets of picture files: `folder` and `list`, from settings to sources.

Which files there are is found in `folders.py` and `lists.py`, they are read in `images.py` and `decode.py`.
"""

from __future__ import annotations

from functools import partial

from trainer.codes import SettingError
from trainer.config import Config
from trainer.data.pictures.folders import scan_folders
from trainer.data.pictures.images import MEAN, STD, ImageSource
from trainer.data.pictures.index import Pictures
from trainer.data.pictures.lists import read_lists
from trainer.data.sets import DataSet, fingerprint

IMAGE_SIZE = 224


def load_pictures(config: Config) -> DataSet:
    """Find the files of --dataset folder or list.

    Raises:
        SettingError: a setting that it needs is missing.
        DataError: the files are not what they must be.
    """
    found = _find(config)
    side = config.image_size or IMAGE_SIZE
    source = partial(ImageSource, size=side, min_crop=config.min_crop, max_pixels=config.max_pixels)
    return DataSet(
        name=config.dataset,
        train=source(found.train, augment=config.augment == "auto"),
        test=source(found.test, augment=False),
        classes=len(found.classes),
        shape=(3, side, side),
        mean=MEAN,
        std=STD,
        shift=0,
        fingerprint=fingerprint([found.train.digest(), found.test.digest(), *found.classes]),
        in_memory=False,
        class_names=found.classes,
        facts=(*found.facts, f"pictures are read as {side} x {side} RGB"),
        notes=found.notes,
    )


def _find(config: Config) -> Pictures:
    if config.dataset == "list":
        return read_lists(
            config.train_list,
            config.test_list,
            root=config.data_dir,
            names=config.class_names,
            num_classes=config.num_classes,
        )
    if config.data_dir is None:
        raise SettingError("--data-dir is not set; --dataset folder needs the folder that holds train/ and val/")
    return scan_folders(config.data_dir, allow_empty=config.empty_classes == "allow")
