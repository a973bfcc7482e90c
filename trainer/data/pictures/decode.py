"""From a picture file to RGB pixels, by one set of rules wherever pictures are read.

What a file is, its first bytes say and not its name. Plain JPEG goes to torchvision's decoder, which takes four fifths of
Pillow's time and gives the same pixels; all else goes to Pillow. Pillow alone says that a file is bad, so that there is one
answer. Which part of a picture is used, and at what size, is for `images.py`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import stat
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageChops, ImageFile, UnidentifiedImageError

from trainer.data.sets import U8, BadSample

#: No others: Pillow would start Ghostscript for a PostScript file, and load forty modules to look for the rest.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

BACKGROUND = "white"  # under what is transparent

#: EXIF orientation -> whether rows and columns change places, and the axes that are reversed then.
TURNS: dict[object, tuple[bool, tuple[int, ...]]] = {
    2: (False, (2,)),
    3: (False, (1, 2)),
    4: (False, (1,)),
    5: (True, ()),
    6: (True, (2,)),
    7: (True, (1, 2)),
    8: (True, (1,)),
}
_ORIENTATION = 0x0112  # of EXIF
_BITS, _WHITE_IS_0 = 0x0102, 0x0106  # of TIFF

#: Of JPEG: how a file begins and ends; the markers of a frame (baseline, extended, progressive), of EXIF and XMP, of the data.
_START, _END, _START_OF_SCAN = b"\xff\xd8", b"\xff\xd9", b"\xff\xda"
_FRAMES, _TAGS, _SCAN = (0xC0, 0xC1, 0xC2), 0xE1, _START_OF_SCAN[1]


class _Unusable(Exception):
    """Say in our own words why a file is bad."""


def decode(path: Path, *, max_pixels: int) -> torch.Tensor:
    """Read a picture file.

    The first frame is taken, turned as EXIF says; 16 bits are scaled to 8; what is transparent is laid on white.

    Returns:
        uint8 [3, height, width], the channels innermost in memory.

    Raises:
        BadSample: it is no whole picture, has more than `max_pixels` pixels, or pixels with no known scale.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _Unusable("it is no regular file")  # reading a pipe would wait for ever
        data = path.read_bytes()
        with _own_rules():
            return _pixels(data, max_pixels=max_pixels)
    except Exception as error:  # of many kinds: broken files take Pillow's readers by surprise
        raise BadSample(f"the picture {str(path)!r} cannot be read: {_reason(error)}") from error


@functools.cache
def jpeg_decoder() -> Callable[..., torch.Tensor] | None:
    """Return torchvision's decoder of JPEG, or None where torchvision has none (it is to go in favour of torchcodec's).

    The import takes a second: call this before processes are forked that will decode.
    """
    try:
        from torchvision.io import decode_jpeg
    except ImportError:
        return None
    return decode_jpeg  # type: ignore[no-any-return]


@contextlib.contextmanager
def _own_rules() -> Iterator[None]:
    """Let Pillow neither warn (of bad EXIF), nor refuse what `max_pixels` allows, nor fill up what is cut off."""
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = before


def _pixels(data: bytes, *, max_pixels: int) -> torch.Tensor:
    if not data:
        raise _Unusable("the file is empty")
    header = _plain_jpeg(data)
    if header is not None:
        _check(header.width, header.height, max_pixels=max_pixels)
        pixels = _by_torchvision(data)
        if pixels is not None:
            return _upright(pixels, _open(data)) if header.tagged else pixels
    with _open(data) as image:
        _check(*image.size, max_pixels=max_pixels)
        pixels = torch.from_numpy(_by_pillow(image)).permute(2, 0, 1)
        if image.format in ("JPEG", "MPO") and data.rfind(_END) < data.rfind(_START_OF_SCAN):
            raise _Unusable("its end marker is missing")  # Pillow misses it only where nothing at all follows
        return _upright(pixels, image)


def _open(data: bytes) -> Image.Image:
    """Read the header alone."""
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _check(width: int, height: int, *, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise _Unusable(f"{width} x {height} pixels are more than --max-pixels, {max_pixels:,}")


class _Header(NamedTuple):
    width: int
    height: int
    tagged: bool  # may say how the picture is to be turned


def _plain_jpeg(data: bytes) -> _Header | None:
    """Read the header of a JPEG file with 8 bits, gray or colour, and nothing odd; of others return None.

    It is odd that segments do not touch each other: torchvision's decoder would print a line on stderr.
    """
    position, found, tagged = 2, None, False
    while data.startswith(_START) and data[position : position + 1] == b"\xff" and position + 10 <= len(data):
        marker, length, bits, height, width, channels = struct.unpack_from(">BHBHHB", data, position + 1)
        if marker == _SCAN:
            return _Header(*found, tagged) if found else None
        if marker in _FRAMES and bits == 8 and channels in (1, 3):
            found = width, height
        elif marker < _FRAMES[0]:
            return None
        tagged = tagged or marker == _TAGS
        position += 2 + length
    return None


def _by_torchvision(data: bytes) -> torch.Tensor | None:
    """Return the pixels, or None where it is for Pillow to decode, or to refuse."""
    decoder = jpeg_decoder()
    try:
        return decoder(torch.frombuffer(data, dtype=torch.uint8), mode="RGB") if decoder else None
    except Exception:  # noqa: BLE001  whatever it is, Pillow says whether the file is to blame
        return None


def _by_pillow(image: Image.Image) -> U8:
    """Return [height, width, 3]."""
    image.load()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        kind = "floats" if image.mode == "F" else "32-bit numbers"
        raise _Unusable(f"its pixels are {kind}, whose black and white are not known")
    if image.format == "JPEG" and image.mode == "CMYK" and "adobe" not in image.info:
        image = ImageChops.invert(image)  # Pillow takes every CMYK JPEG to be inverted, as Adobe's are
    if image.has_transparency_data:
        shown = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", shown.size, BACKGROUND), shown)
    return np.array(image.convert("RGB"))


def _from_16_bits(image: Image.Image) -> U8:
    """Scale the whole range to 0..255; Pillow's own conversion makes white of all that is above 255."""
    values = np.asarray(image).astype(np.uint32)
    tags = getattr(image, "tag_v2", {})
    top = np.uint32(2 ** tags.get(_BITS, (16,))[0] - 1)  # a TIFF file may have 12 bits
    if tags.get(_WHITE_IS_0) == 0:
        values = top - values
    gray = ((values * np.uint32(255) + top // 2) // top).astype(np.uint8)
    gray[values == image.info.get("transparency", -1)] = 255
    return np.repeat(gray[:, :, None], 3, axis=2)


def _upright(pixels: torch.Tensor, image: Image.Image) -> torch.Tensor:
    try:
        turn = TURNS.get(image.getexif().get(_ORIENTATION))
    except Exception:  # noqa: BLE001  EXIF that cannot be read is none
        turn = None
    if turn is None:
        return pixels
    swapped, reversed_axes = turn
    pixels = pixels.transpose(1, 2) if swapped else pixels
    return pixels.flip(reversed_axes).permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _reason(error: Exception) -> str:
    """Return one line."""
    if isinstance(error, UnidentifiedImageError):
        return f"it has no header of a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return next(iter(text.splitlines()), "") or type(error).__name__
