"""Which part of a picture a sample shows is drawn from its seed alone, and lies where torchvision's own transforms would have it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

from trainer import data
from trainer.data.pictures.decode import decode
from trainer.data.pictures.images import ASPECT, MEAN, STD, ImageSource, middle, random_view, uniforms
from trainer.data.pictures.index import build_index
from trainer.data.sets import BadSample

ROOT = Path(__file__).resolve().parents[3]
SIDE = 32
MANY = uniforms(np.arange(4000, dtype=np.uint64) * np.uint64(2**52 + 1)).tolist()

#: What the first three draw from a picture of 375 x 500, and a digest of the first thousand.
GOLDEN = [(104, 228, 220, 170, True), (41, 70, 323, 347, False), (46, 134, 131, 166, False)]
GOLDEN_1000 = "39d3f09dc59fae62"

#: Heights and widths, of which some are smaller than any sample and some much longer than wide.
SIZES = [(40, 60), (60, 40), (33, 97), (20, 20), (1, 1), (1, 30), (2, 500), (300, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a picture of each size, alternately as JPEG and PNG: noise on a gradient."""
    root = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number, (height, width) in enumerate(SIZES):
        down, right = np.mgrid[0:height, 0:width] / max(height, width)
        plain = np.stack([down, right, 1 - right], axis=2) * 200
        noisy = (plain + random.integers(0, 56, (height, width, 3))).astype(np.uint8)
        Image.fromarray(noisy).save(root / f"{number}.{'png' if number % 2 else 'jpg'}", quality=95)
    return root


def make_source(folder: Path, **changes: Any) -> ImageSource:
    names = sorted(path.name for path in folder.iterdir())
    index = build_index(folder, names=names, labels=[10 * number for number in range(len(names))])
    plain = {"size": SIDE, "augment": True, "min_crop": 0.08, "max_pixels": 10**6}
    return ImageSource(index, **plain | changes)


def ids(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def seeds(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def test_batch_has_the_promised_form(folder: Path) -> None:
    for augment in (True, False):
        source = make_source(folder, augment=augment)
        assert len(source) == len(SIZES)
        images, labels = source.fetch(ids(7, 0, 7), seeds=seeds(1, 2, 3))
        assert (images.dtype, images.shape, images.flags.c_contiguous) == (np.uint8, (3, 3, SIDE, SIDE), True)
        assert (labels.dtype, labels.tolist()) == (np.int64, [70, 0, 70])
        images, labels = source.fetch(ids(), seeds=seeds())
        assert (images.shape, labels.shape) == ((0, 3, SIDE, SIDE), (0,))


def test_view_is_a_function_of_the_seed_alone(folder: Path) -> None:
    source = make_source(folder)
    every, numbers = np.arange(len(SIZES)), seeds(*range(2**63, 2**63 + len(SIZES)))
    whole, _ = source.fetch(every, seeds=numbers)
    alone = [source.fetch(every[row : row + 1], seeds=numbers[row : row + 1])[0][0] for row in range(len(SIZES))]
    assert np.array_equal(whole, alone)
    others, _ = source.fetch(every, seeds=numbers + np.uint64(1))
    assert (whole != others).any(axis=(1, 2, 3)).sum() >= 5  # those of one or two pixels have one view


def test_without_seeds_the_views_are_the_same_at_each_call(folder: Path) -> None:
    source = make_source(folder)
    first, again = (source.fetch(ids(0, 0, 1))[0] for _ in range(2))
    assert np.array_equal(first, again)
    assert np.array_equal(first[0], first[1])


def test_pictures_do_not_hang_on_the_number_of_threads(folder: Path) -> None:
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for augment in (True, False):
            found.append(make_source(folder, augment=augment, size=224).fetch(ids(0, 7), seeds=seeds(1, 2))[0])
    torch.set_num_threads(before)
    assert np.array_equal(found[0:2], found[2:4])
    assert np.array_equal(found[0:2], found[4:6])


def test_batches_do_not_hang_on_the_number_of_workers(folder: Path) -> None:
    source = make_source(folder)
    dataset = data.DataSet(
        "own", source, source, 71, (3, SIDE, SIDE), MEAN, STD, shift=0, fingerprint="", in_memory=False
    )
    plain = {"seed": 3, "global_batch": 4, "rank": 0, "world": 1, "start": 0, "steps": 4, "pin": False}
    runs = []
    for workers in (0, 2):
        with data.train_batches(dataset, workers=workers, **plain) as batches:
            runs.append([(batch.error, batch.images.numpy().copy()) for batch in batches])
    for (error, images), (other_error, others) in zip(*runs, strict=True):
        assert error is other_error is None
        assert np.array_equal(images, others)


def test_views_are_those_of_old() -> None:
    views = [random_view(row, height=375, width=500, min_crop=0.08) for row in MANY[:3]]
    assert [tuple(view) for view in views] == GOLDEN
    text = repr([tuple(random_view(row, height=375, width=500, min_crop=0.08)) for row in MANY[:1000]])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN_1000


@pytest.mark.parametrize("min_crop", [0.08, 0.5, 1.0])
def test_views_lie_inside_and_have_the_allowed_area_and_aspect(min_crop: float) -> None:
    for height, width in ((375, 500), (500, 375), (224, 224)):
        for row in MANY[:500]:
            view = random_view(row, height=height, width=width, min_crop=min_crop)
            assert 0 <= view.top <= height - view.height
            assert 0 <= view.left <= width - view.width
            assert min_crop * 0.98 <= view.height * view.width / (height * width) <= 1
            assert ASPECT[0] * 0.98 <= view.width / view.height <= ASPECT[1] * 1.02


def test_views_are_spread_as_those_of_torchvision() -> None:
    torch.manual_seed(0)
    crop, picture = v2.RandomResizedCrop(8), torch.zeros(3, 375, 500, dtype=torch.uint8)
    theirs = [crop.make_params([picture]) for _ in range(len(MANY))]
    ours = [random_view(row, height=375, width=500, min_crop=0.08)._asdict() for row in MANY]
    for name in ("top", "left", "height", "width"):
        one, other = (
            np.quantile([view[name] for view in views], (0.1, 0.3, 0.5, 0.7, 0.9)) for views in (ours, theirs)
        )
        assert np.abs(one - other).max() < 15, name
    assert 0.46 < np.mean([view["mirrored"] for view in ours]) < 0.54


def test_view_that_finds_no_place_is_the_middle() -> None:
    for row in MANY[:50]:
        assert random_view(row, height=10, width=1000, min_crop=0.9)[:4] == (0, 493, 10, 13)
        assert random_view(row, height=1000, width=10, min_crop=0.9)[:4] == (493, 0, 13, 10)
        assert random_view(row, height=1, width=1, min_crop=0.08)[:4] == (0, 0, 1, 1)


def test_sample_shows_its_view(folder: Path) -> None:
    source, numbers = make_source(folder), seeds(*range(20))
    for number in (0, 7):
        images, _ = source.fetch(ids(*[number] * 20), seeds=numbers)
        with Image.open(source.index.path(number)) as file:
            picture = file.convert("RGB")
        for image, row in zip(images, uniforms(numbers).tolist(), strict=True):
            view = random_view(row, height=picture.height, width=picture.width, min_crop=0.08)
            box = (view.left, view.top, view.left + view.width, view.top + view.height)
            wanted = np.asarray(picture.crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR)).astype(int)
            wanted = wanted[:, ::-1] if view.mirrored else wanted
            assert np.abs(wanted.transpose(2, 0, 1) - image).mean() < 1


@pytest.mark.parametrize("size", [224, 32, 9])
def test_evaluation_takes_what_torchvision_takes(size: int, folder: Path) -> None:
    usual = v2.Compose([v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)])
    for number, (height, width) in enumerate(SIZES):
        picture = decode(make_source(folder).index.path(number), max_pixels=10**6)
        ours, theirs = middle(picture, size=size), usual(picture)
        assert ours.shape == (3, size, size)
        if max(height, width) <= 4 * min(height, width):  # of longer ones more is cut off, before they are resized
            assert torch.equal(ours, theirs)
        else:
            assert (ours.int() - theirs.int()).abs().float().mean() < 8


def test_evaluation_has_no_use_for_seeds(folder: Path) -> None:
    source = make_source(folder, augment=False)
    first, _ = source.fetch(ids(0, 7))
    again, _ = source.fetch(ids(0, 7), seeds=seeds(5, 6))
    assert np.array_equal(first, again)


def test_very_long_picture_costs_little_memory() -> None:
    strip = torch.arange(256, dtype=torch.uint8).repeat(3, 1, 40_000)  # resized as a whole: 8 GB
    assert middle(strip, size=224).shape == (3, 224, 224)
    assert middle(strip.transpose(1, 2), size=224).shape == (3, 224, 224)


def test_bad_sample_is_named(tmp_path: Path) -> None:
    (tmp_path / "a b.jpg").write_bytes(b"no picture")
    with pytest.raises(BadSample, match=r"the picture '.*/a b.jpg' cannot be read"):
        make_source(tmp_path).fetch(ids(0), seeds=seeds(1))
    Image.new("RGB", (1001, 1000)).save(tmp_path / "a b.jpg")
    with pytest.raises(BadSample, match="1001 x 1000 pixels are more than --max-pixels, 1,000,000"):
        make_source(tmp_path).fetch(ids(0), seeds=seeds(1))


def test_torchvision_is_imported_with_the_first_source_and_not_before() -> None:
    code = """
import sys
from pathlib import Path
import trainer.data.pictures.images as images
from trainer.data.pictures.index import build_index
assert "torchvision" not in sys.modules, "imported with the module"
images.ImageSource(build_index(Path(), names=[], labels=[]), 8, augment=True, min_crop=0.1, max_pixels=1)
assert "torchvision" in sys.modules, "left to every loader process"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})
