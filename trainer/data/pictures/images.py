"""Pictures from files as samples: which part of each is taken, at one size; training takes another part each time.

How a file becomes pixels is for `decode.py`; normalisation is done on the device, elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from trainer.data.order import draws
from trainer.data.pictures.decode import decode, jpeg_decoder
from trainer.data.pictures.index import Index
from trainer.data.sets import I64, U8, U64

#: Of ImageNet, per channel, in 0..1 units: what ready-made weights were trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

ASPECT = (3 / 4, 4 / 3)  # least and most width : height of a random view
TRIES = 10
NUMBERS = 4 * TRIES + 1  # random numbers that a view takes

RESIZED, TAKEN = 256, 224  # of the shorter side in an evaluation, and what is taken of its middle
MOST_RATIO = 4  # of long to short side; more is cut off before the resizing, as it could take any amount of memory


class View(NamedTuple):
    """Say which rectangle of a picture is taken, and whether it is mirrored."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool = False


@dataclass(frozen=True)
class ImageSource:
    """Serve the pictures of an index as RGB squares.

    Attributes:
        size: side of the squares.
        augment: take a random view of each, else the middle.
        min_crop: least part of a picture's area that a random view takes.
        max_pixels: a file with more is bad.
    """

    index: Index
    size: int
    augment: bool
    min_crop: float
    max_pixels: int

    def __post_init__(self) -> None:
        """Import the decoder here, once, so that loader processes are forked with it."""
        jpeg_decoder()

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.index)

    def fetch(self, ids: I64, *, seeds: U64 | None = None) -> tuple[U8, I64]:
        """Read the pictures `ids`; see `Source`. The seeds alone decide the random views."""
        images = np.empty((len(ids), 3, self.size, self.size), np.uint8)
        rows = torch.from_numpy(images)
        numbers = uniforms(draws(0, positions=ids, count=1)[:, 0] if seeds is None else seeds)
        for row, sample, chances in zip(rows, ids.tolist(), numbers, strict=True):
            picture = decode(self.index.path(sample), max_pixels=self.max_pixels)
            row.copy_(self._random(picture, chances) if self.augment else middle(picture, size=self.size))
        return images, self.index.labels[ids]

    def _random(self, picture: torch.Tensor, chances: NDArray[np.float64]) -> torch.Tensor:
        height, width = picture.shape[1:]
        view = random_view(chances.tolist(), height=height, width=width, min_crop=self.min_crop)
        taken = picture[:, view.top : view.top + view.height, view.left : view.left + view.width]
        square = _resized(taken, height=self.size, width=self.size)
        return square.flip(2) if view.mirrored else square


def uniforms(seeds: U64) -> NDArray[np.float64]:
    """Return [len(seeds), NUMBERS] random numbers, 0 <= number < 1, each row a function of its seed."""
    words = draws(0, positions=seeds.view(np.int64), count=NUMBERS)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def random_view(numbers: Sequence[float], *, height: int, width: int, min_crop: float) -> View:
    """Take a random part, `min_crop` to 1 of the area, and mirror it or not.

    Where no try fits into the picture it is the largest middle part that has an allowed aspect.

    Args:
        numbers: [NUMBERS], one row of `uniforms`.

    Source: Szegedy et al., "Going deeper with convolutions" (2014), section 6, as torchvision's RandomResizedCrop has it.
    """
    mirrored = numbers[-1] < 0.5
    low, high = (math.log(aspect) for aspect in ASPECT)
    for first in range(0, 4 * TRIES, 4):
        part, shape, down, right = numbers[first : first + 4]
        area = (min_crop + part * (1 - min_crop)) * height * width
        aspect = math.exp(low + shape * (high - low))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return View(int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide, mirrored)
    wide, tall = min(width, round(height * ASPECT[1])), min(height, round(width / ASPECT[0]))
    return View((height - tall) // 2, (width - wide) // 2, tall, wide, mirrored)


def middle(picture: torch.Tensor, *, size: int) -> torch.Tensor:
    """Resize until the shorter side is 256/224 of `size`, and take the square in the middle.

    Returns:
        uint8 [3, size, size], from [3, height, width].
    """
    picture = _cut(picture, height=MOST_RATIO * picture.shape[2], width=MOST_RATIO * picture.shape[1])
    height, width = picture.shape[1:]
    short = round(size * RESIZED / TAKEN)
    long = int(short * max(height, width) / min(height, width))
    tall, wide = (short, long) if height <= width else (long, short)
    return _cut(_resized(picture, height=tall, width=wide), height=size, width=size)


def _cut(picture: torch.Tensor, *, height: int, width: int) -> torch.Tensor:
    """Take the middle, at most height x width."""
    top, left = (
        max(0, round((have - want) / 2)) for have, want in zip(picture.shape[1:], (height, width), strict=True)
    )
    return picture[:, top : top + height, left : left + width]


def _resized(picture: torch.Tensor, *, height: int, width: int) -> torch.Tensor:
    """Resize bilinearly, over all pixels that fall on one; uint8 with channels innermost is torch's fastest case by far."""
    return F.interpolate(picture[None], (height, width), mode="bilinear", antialias=True)[0]
