"""Names and labels in arrays come back as they went in, and their digest knows every difference but the root."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from trainer.data.pictures.index import build_index, is_picture_name

NAMES = ["a.jpg", "", "red ants/été 蜂.jpg", os.fsdecode(b"caf\xe9.jpg"), "new\nline.jpg"]


def test_names_come_back_as_they_went_in() -> None:
    index = build_index(Path("/root"), names=NAMES, labels=[4, 0, 1, 2, 3])
    assert [index.name(number) for number in range(len(index))] == NAMES
    assert index.labels.tolist() == [4, 0, 1, 2, 3]
    assert index.path(2) == Path("/root/red ants/été 蜂.jpg")
    assert (index.names.dtype, index.ends.dtype, index.labels.dtype) == (np.uint8, np.int64, np.int64)


def test_an_absolute_name_is_its_own_path() -> None:
    assert build_index(Path("/root"), names=["/other/a.jpg"], labels=[0]).path(0) == Path("/other/a.jpg")


def test_bytes_and_text_are_the_same_name() -> None:
    by_bytes = build_index(Path("r"), names=map(os.fsencode, NAMES), labels=np.zeros(5, np.int64))
    assert by_bytes.digest() == build_index(Path("r"), names=NAMES, labels=[0] * 5).digest()


def test_the_digest_knows_names_order_borders_and_labels_but_not_the_root() -> None:
    def digest(names: list[str], labels: list[int], root: str = "r") -> str:
        return build_index(Path(root), names=names, labels=labels).digest()

    first = digest(["ab", "c"], [0, 1])
    assert digest(["ab", "c"], [0, 1], "elsewhere") == first
    others = [
        digest(["c", "ab"], [1, 0]),
        digest(["a", "bc"], [0, 1]),
        digest(["ab", "c"], [1, 0]),
        digest(["ab", "d"], [0, 1]),
    ]
    assert len({first, *others}) == 5


def test_an_empty_index_has_a_digest() -> None:
    index = build_index(Path("r"), names=[], labels=[])
    assert len(index) == 0
    assert len(index.digest()) == 64


@pytest.mark.parametrize("name", ["a.jpg", "UPPER.JPEG", "x.y.PnG", "a.webp", ".tif"])
def test_picture_names_are_known_in_any_case(name: str) -> None:
    assert is_picture_name(name.encode())


@pytest.mark.parametrize("name", ["Thumbs.db", "jpg", "a.jpg.txt", "a.jpg ", "", "a."])
def test_other_names_are_no_pictures(name: str) -> None:
    assert not is_picture_name(name.encode())
