"""Augmentation of training pictures, drawn from (seed, stream position); normalisation is done on the device, elsewhere."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trainer.data.order import FLIP, SHIFT, draws


def shift_pictures(
    images: NDArray[np.uint8], *, seed: int, positions: NDArray[np.int64], shift: int
) -> NDArray[np.uint8]:
    """Shift each picture by up to `shift` pixels each way, with zeros where nothing was.

    Args:
        images: [n, c, h, w].
        positions: [n], the pictures' stream positions.
    """
    if not shift or not len(images):
        return images
    side = 2 * shift + 1
    down, right = np.divmod(
        draws(seed, positions=positions, count=1, purpose=SHIFT)[:, 0] % np.uint64(side * side), side
    )
    n, c, h, w = images.shape
    padded = np.zeros((n, c, h + 2 * shift, w + 2 * shift), np.uint8)
    padded[:, :, shift : shift + h, shift : shift + w] = images
    windows = sliding_window_view(padded, (h, w), axis=(2, 3))
    return np.ascontiguousarray(windows[np.arange(n), :, down.astype(np.int64), right.astype(np.int64)])


def flip_pictures(images: NDArray[np.uint8], *, seed: int, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Mirror half of the pictures [n, c, h, w], left to right."""
    mirrored = (draws(seed, positions=positions, count=1, purpose=FLIP)[:, 0] & np.uint64(1)).astype(bool)
    return np.where(mirrored[:, None, None, None], images[..., ::-1], images)
