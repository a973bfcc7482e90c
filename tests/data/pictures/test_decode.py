"""One motif is read alike from every format and mode, and every awkward file gets the answer that its row asks for."""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps

from trainer.data.pictures.decode import _by_pillow, _open, decode, jpeg_decoder
from trainer.data.sets import BadSample

Array = NDArray[Any]
CAP = 64_000_000

#: File of awkward/ -> (height, width) as it is upright, words of why it is bad, or None where a folder scan passes it over.
UNKNOWN, CUT = "no header of a JPEG, PNG", "image file is truncated"
AWKWARD: dict[str, tuple[int, int] | str | None] = {
    "cmyk.jpg": (100, 100),
    "gray.jpg": (128, 128),
    "gray_real.jpg": (128, 128),
    "progressive.jpg": (360, 480),
    "exif_orientation_3.jpg": (128, 128),
    "exif_orientation_6.jpg": (128, 128),
    "exif_invalid.jpg": (200, 200),
    "qtables_16bit.jpg": (128, 128),
    "junk_ff00_header.jpg": (225, 300),
    "gray16.png": (128, 128),
    "rgba16_apng.png": (64, 128),
    "gray16.tif": (64, 64),
    "palette_trns_interlaced.png": (150, 162),
    "onebit.png": (128, 128),
    "rgba.png": (150, 200),
    "gray_alpha.png": (128, 128),
    "animated.gif": (100, 100),
    "transparent.webp": (150, 200),
    "plain.bmp": (128, 128),
    "plain.tif": (128, 128),
    "png_named.jpg": (64, 64),
    "UPPER.JPEG": (128, 128),
    "n02951585_can_opener.JPEG": (392, 294),
    "n01728572_thunder_snake.JPEG": (333, 500),
    "truncated_real.jpg": CUT,
    "truncated_half.jpg": CUT,
    "missing_eoi.jpg": CUT,
    "header_only.jpg": CUT,
    "one_bitflip_silent.jpg": (128, 128),
    "truncated_real.png": CUT,
    "broken_stream.png": "unrecognized data stream",
    "bad_crc.png": (128, 128),
    "zero_bytes.jpg": "the file is empty",
    "text.jpg": UNKNOWN,
    "html_error.jpg": UNKNOWN,
    "._apple_double.jpg": None,
    "Thumbs.db": None,
    "bomb_20000x20000.png": "20000 x 20000 pixels are more than --max-pixels, 64,000,000",
    "bomb_warn_10000x10000.png": "10000 x 10000 pixels are more than --max-pixels, 64,000,000",
    "names/with space.jpg": (128, 128),
}
GOOD = [name for name, answer in AWKWARD.items() if isinstance(answer, tuple)]
BAD = {name: answer for name, answer in AWKWARD.items() if isinstance(answer, str)}

#: Files that show the picture of plain.bmp at its size -> allowed mean difference; gray ones are compared with its luminance.
SAME = {"plain.tif": 0.1, "bad_crc.png": 0.1, "UPPER.JPEG": 3, "names/with space.jpg": 3, "exif_orientation_3.jpg": 6}
SAME |= {"exif_orientation_6.jpg": 6, "qtables_16bit.jpg": 12}
GRAY = {"gray.jpg": 3, "gray_real.jpg": 3, "gray_alpha.png": 3}


@pytest.fixture(scope="module")
def awkward(test_data: Path) -> Path:
    return test_data / "awkward"


def read(path: Path, *, cap: int = CAP) -> Array:
    """Return [height, width, 3]."""
    return decode(path, max_pixels=cap).permute(1, 2, 0).numpy()


def apart(one: Array, other: Array) -> float:
    """Return the mean absolute difference."""
    assert one.shape == other.shape
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


def test_every_file_of_the_table_has_an_answer(awkward: Path) -> None:
    rows = re.findall(r"^\| (\S.*?) \|", (awkward / "README.md").read_text(), re.MULTILINE)
    assert sorted(AWKWARD) == sorted(set(rows) - {"file", "---"})


@pytest.mark.parametrize("name", GOOD)
def test_good_file_has_its_size_and_is_not_flat(name: str, awkward: Path) -> None:
    picture = decode(awkward / name, max_pixels=CAP)
    assert (picture.dtype, picture.shape) == (torch.uint8, (3, *AWKWARD[name]))  # type: ignore[misc]
    assert len(picture.unique()) > 1
    assert picture.float().mean() < 250


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_named_with_the_reason(name: str, awkward: Path) -> None:
    with pytest.raises(BadSample) as raised:
        decode(awkward / name, max_pixels=CAP)
    message = str(raised.value)
    assert message.startswith(f"the picture {str(awkward / name)!r} cannot be read: ")
    assert BAD[name] in message
    assert "\n" not in message


@pytest.mark.parametrize("name", SAME | GRAY)
def test_files_of_one_picture_look_alike(name: str, awkward: Path) -> None:
    original = Image.open(awkward / "plain.bmp")
    wanted = np.asarray(original.convert("L").convert("RGB") if name in GRAY else original)
    assert apart(read(awkward / name), wanted) <= (SAME | GRAY)[name]


def test_gray_16_bits_use_the_whole_range(awkward: Path) -> None:
    for name in ("gray16.png", "gray16.tif"):
        raw = np.asarray(Image.open(awkward / name)).astype(float)
        assert np.abs(read(awkward / name)[:, :, 0] - raw / 257).max() <= 0.5


def test_real_orientations(awkward: Path) -> None:
    for name in ("n02951585_can_opener.JPEG", "n01728572_thunder_snake.JPEG"):  # 6, and 0, which is none
        assert apart(read(awkward / name), np.asarray(ImageOps.exif_transpose(Image.open(awkward / name)))) < 0.5


def test_nothing_is_printed(awkward: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in GOOD:
        decode(awkward / name, max_pixels=CAP)
    for name in BAD:
        with pytest.raises(BadSample):
            decode(awkward / name, max_pixels=CAP)
    assert capfd.readouterr() == ("", "")


# One motif in many modes


def motif() -> Array:
    """Return a smooth picture, different in every corner, [48, 64, 3]; black and white are in it."""
    down, right = np.mgrid[0:48, 0:64]
    red, green, blue = right * 255 / 63, down * 255 / 47, 255 - (right + down) * 255 / 110
    return np.stack([red, green, blue], axis=2).round().astype(np.uint8)


COLOUR = motif()
GRAYS = np.asarray(Image.fromarray(COLOUR).convert("L"))
GRAY_RGB = np.repeat(GRAYS[:, :, None], 3, axis=2)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(pixels: Array, *, colour: int, bits: int, trns: bytes = b"", size: tuple[int, int] | None = None) -> bytes:
    """Write a PNG file of a kind that Pillow does not write; `size`, width and height, may be a lie."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    width, height = size or (pixels.shape[1], pixels.shape[0])
    rows = b"".join(b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in pixels)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))]
    parts += [(b"tRNS", trns)] if trns else []
    parts += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(data: bytes, *, width: int, height: int, bits: int, white_is_0: bool = False, kind: int = 1) -> bytes:
    """Write a gray TIFF file, uncompressed, in one strip."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: int(not white_is_0), 273: 8, 277: 1, 278: height}
    tags |= {279: len(data), 339: kind}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def without_adobe(data: bytes) -> bytes:
    """Cut the APP14 segment out of a JPEG file."""
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4]) :]


def modes() -> dict[str, tuple[bytes, Array, float]]:
    """Return by name a file, the picture that it shows, and the allowed mean difference."""
    rgb, gray = Image.fromarray(COLOUR), Image.fromarray(GRAYS)
    rgba, cmyk = rgb.convert("RGBA"), rgb.convert("CMYK")
    wide, wide_gray = COLOUR.astype(int) * 257, GRAYS.astype(np.uint16) * 257
    opaque = np.full((*GRAYS.shape, 1), 65535)
    inverted = Image.fromarray(255 - np.asarray(cmyk), "CMYK")
    sharp = {"quality": 98, "subsampling": 0}
    twelve_bits = np.repeat(GRAYS, 2, axis=1) >> 4  # a nibble more than a byte: 0xG, 0xGG
    packed = np.stack([GRAYS[:, ::2], (twelve_bits[:, ::4] << 4) | (GRAYS[:, 1::2] >> 4), GRAYS[:, 1::2] << 4], axis=2)
    sixteen = wide_gray.astype("<u2")
    size = {"width": 64, "height": 48}
    return {
        "jpeg": (saved(rgb, "JPEG", **sharp), COLOUR, 1.5),
        "jpeg progressive": (saved(rgb, "JPEG", progressive=True, **sharp), COLOUR, 1.5),
        "jpeg half colours": (saved(rgb, "JPEG", quality=98), COLOUR, 3),
        "jpeg L": (saved(gray, "JPEG", quality=98), GRAY_RGB, 1.5),
        "jpeg CMYK, Adobe's": (saved(cmyk, "JPEG", **sharp), COLOUR, 1.5),
        "jpeg CMYK, not inverted": (without_adobe(saved(inverted, "JPEG", **sharp)), COLOUR, 1.5),
        "png": (saved(rgb, "PNG"), COLOUR, 0),
        "png RGBA": (saved(rgba, "PNG"), COLOUR, 0),
        "png L": (saved(gray, "PNG"), GRAY_RGB, 0),
        "png LA": (saved(gray.convert("LA"), "PNG"), GRAY_RGB, 0),
        "png P": (saved(rgb.quantize(256), "PNG"), COLOUR, 8),
        "png 1": (saved(gray.convert("1", dither=Image.Dither.NONE), "PNG"), np.where(GRAY_RGB > 127, 255, 0), 0),
        "png I;16": (saved(Image.fromarray(wide_gray), "PNG"), GRAY_RGB, 0),
        "png RGB 16": (png(wide, colour=2, bits=16), COLOUR, 0),
        "png RGBA 16": (png(np.concatenate([wide, opaque], axis=2), colour=6, bits=16), COLOUR, 0),
        "png LA 16": (
            png(np.concatenate([wide[:, :, :1], opaque], axis=2), colour=4, bits=16),
            COLOUR[:, :, [0] * 3],
            0,
        ),
        "tiff": (saved(rgb, "TIFF", compression="tiff_lzw"), COLOUR, 0),
        "tiff CMYK": (saved(cmyk, "TIFF"), COLOUR, 0),
        "tiff I;16": (tiff(sixteen.tobytes(), bits=16, **size), GRAY_RGB, 0),
        "tiff I;16, white is 0": (tiff((65535 - sixteen).tobytes(), bits=16, white_is_0=True, **size), GRAY_RGB, 0),
        "tiff I;12": (tiff(packed.tobytes(), bits=12, **size), GRAY_RGB, 1),
        "bmp": (saved(rgb, "BMP"), COLOUR, 0),
        "gif": (saved(rgb.quantize(256), "GIF"), COLOUR, 8),
        "webp": (saved(rgb, "WEBP", lossless=True), COLOUR, 0),
        "webp RGBA": (saved(rgba, "WEBP", lossless=True, exact=True), COLOUR, 0),
        "ppm": (saved(rgb, "PPM"), COLOUR, 0),
        "pgm 16": (saved(Image.fromarray(wide_gray), "PPM"), GRAY_RGB, 0),
    }


MODES = modes()


@pytest.mark.parametrize("name", MODES)
def test_motif_looks_alike_in_every_mode(name: str, tmp_path: Path) -> None:
    data, wanted, tolerance = MODES[name]
    path = tmp_path / "no suffix says what it is"
    path.write_bytes(data)
    assert apart(read(path), wanted) <= tolerance


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_transparent_lies_on_white(tmp_path: Path) -> None:
    black = np.zeros((1, 4, 4), np.uint8)
    black[0, :, 3] = (0, 64, 128, 255)
    palette = Image.fromarray(np.arange(4, dtype=np.uint8)[None]).convert("P")
    palette.putpalette([0] * 12)
    wanted = [255, 191, 127, 0]
    files = {
        "RGBA": saved(Image.fromarray(black), "PNG"),
        "LA": saved(Image.fromarray(black).convert("LA"), "PNG"),
        "P": saved(palette, "PNG", transparency=bytes((0, 64, 128, 255))),
        "webp": saved(Image.fromarray(black), "WEBP", lossless=True, exact=True),
    }
    for name, data in files.items():
        assert read(write(tmp_path / name, data))[0, :, 1].tolist() == wanted, name
    keyed = np.array([[0, 257, 514, 65535]])
    files = {
        "gray": png(keyed // 257, colour=0, bits=8, trns=b"\0\2"),
        "gray 16": png(keyed, colour=0, bits=16, trns=b"\2\2"),
        "RGB": png(np.repeat(keyed[:, :, None], 3, axis=2) // 257, colour=2, bits=8, trns=b"\0\2" * 3),
    }
    for name, data in files.items():
        assert read(write(tmp_path / name, data))[0, :, 1].tolist() == [0, 1, 255, 255], name


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_orientation_is_applied(kind: str, tmp_path: Path) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = saved(Image.fromarray(COLOUR), kind, exif=exif, **options)
        wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        assert wanted.shape == ((64, 48, 3) if orientation in (5, 6, 7, 8) else (48, 64, 3))
        assert apart(read(write(tmp_path / "turned", data)), wanted) < 0.5, orientation


@pytest.mark.parametrize(
    "exif", [b"", b"MM", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff\x01\x12\0\2\0\0\0\1up\0\0"]
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_is_none(kind: str, exif: bytes, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", saved(Image.fromarray(COLOUR), kind))
    broken = write(tmp_path / "broken", saved(Image.fromarray(COLOUR), kind, exif=b"Exif\0\0" + exif))
    assert np.array_equal(read(broken), read(plain))


# Bad files


def noise(kind: str, **options: Any) -> bytes:
    return saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)), kind, **options)


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_cut_anywhere_is_bad(progressive: bool, tmp_path: Path) -> None:
    data = noise("JPEG", progressive=progressive)
    assert len(read(write(tmp_path / "whole", data))) == 40
    for length in {*range(1, len(data), 97), *range(len(data) - 4, len(data))}:
        for rest in (
            b"",
            bytes(len(data) - length),
        ):  # a file that was made at full size, and never filled, ends with zeros
            with pytest.raises(BadSample):
                read(write(tmp_path / "cut", data[:length] + rest))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "WEBP", "PPM", "GIF"])
def test_other_files_cut_in_their_pixels_are_bad(kind: str, tmp_path: Path) -> None:
    data = noise(kind)
    for length in (len(data) // 10, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(BadSample):
            read(write(tmp_path / "cut", data[:length]))


def test_pixels_without_a_known_scale_are_bad(tmp_path: Path) -> None:
    floats = saved(Image.fromarray(GRAYS.astype(np.float32) / 255), "TIFF")
    with pytest.raises(BadSample, match="its pixels are floats"):
        read(write(tmp_path / "floats", floats))
    numbers = saved(Image.fromarray(GRAYS.astype(np.int32)), "TIFF")
    with pytest.raises(BadSample, match="its pixels are 32-bit numbers"):
        read(write(tmp_path / "numbers", numbers))


def test_formats_that_run_programs_are_not_opened(tmp_path: Path) -> None:
    with pytest.raises(BadSample, match=UNKNOWN):
        read(write(tmp_path / "a.jpg", saved(Image.fromarray(COLOUR), "EPS")))


def test_cap_holds_before_memory_is_taken(tmp_path: Path) -> None:
    jpeg = bytearray(noise("JPEG"))
    size = jpeg.index(b"\xff\xc0") + 5
    jpeg[size : size + 4] = struct.pack(">HH", 65000, 65000)
    bomb = png(np.zeros((1, 1)), colour=0, bits=8, size=(65000, 65000))
    for data in (bytes(jpeg), bomb):
        with pytest.raises(BadSample, match="65000 x 65000 pixels are more than --max-pixels, 64,000,000"):
            read(write(tmp_path / "large", data))


def test_cap_is_exact_and_the_only_one(tmp_path: Path) -> None:
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF"):
        path = write(tmp_path / kind, noise(kind))
        assert len(read(path, cap=1600)) == 40
        with pytest.raises(BadSample, match="40 x 40 pixels are more than --max-pixels, 1,599"):
            read(path, cap=1599)
    cut = png(np.zeros((1, 1)), colour=0, bits=8, size=(13400, 13400))  # Pillow's own limit is a little less
    with pytest.raises(BadSample, match=CUT):
        read(write(tmp_path / "larger", cut), cap=10**9)


def test_settings_of_pillow_neither_matter_nor_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadSample, match=CUT):
        read(write(tmp_path / "cut", noise("PNG")[:-1000]))
    assert len(read(write(tmp_path / "whole", noise("PNG")))) == 40
    assert (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS) == (True, 100)


def test_files_that_cannot_be_opened_are_bad(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    reasons = {"gone": "No such file", "": "no regular file", "loop": "symbolic links", "a\0b": "null"}
    for name, reason in reasons.items():
        with pytest.raises(BadSample, match=reason):
            read(tmp_path / name)


def test_file_without_permission_is_bad(tmp_path: Path) -> None:
    path = write(tmp_path / "locked.png", noise("PNG"))
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(BadSample, match="Permission denied"):
            read(path)
    finally:
        os.seteuid(user)


def test_odd_names_are_told_on_one_printable_line(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\nb\xff\x1b[2J.jpg")
    with pytest.raises(BadSample) as raised:
        read(write(path, b"no picture"))
    assert str(raised.value).isprintable()
    assert r"a\nb\udcff\x1b[2J.jpg" in str(raised.value)


def test_both_decoders_of_jpeg_give_the_same_pixels(test_data: Path) -> None:
    assert jpeg_decoder() is not None, "this torchvision has no decoder: all goes to Pillow, correct but slower"
    for path in sorted((test_data / "imagenet-sample").iterdir())[:10]:
        assert apart(read(path), _by_pillow(_open(path.read_bytes()))) < 0.5


def test_a_pipe_is_bad_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(BadSample, match="no regular file"):
        read(tmp_path / "pipe.jpg")
