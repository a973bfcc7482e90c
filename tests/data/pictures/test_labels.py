"""A word is a label by its number or by its name; what only looks like one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.codes import DataError, SettingError
from trainer.data.pictures.labels import find_meaning


def test_numbers_reach_to_the_highest_or_to_num_classes() -> None:
    assert find_meaning(["0", "2"], origin="list").classes == ("0", "1", "2")
    meaning = find_meaning(["0", "2"], origin="list", num_classes=2)
    assert meaning.classes == ("0", "1")
    assert [meaning.label(word) for word in ("0", "1", "2", "01", "cat")] == [0, 1, -1, 1, -1]


def test_names_are_sorted_and_num_classes_adds_unnamed_ones() -> None:
    meaning = find_meaning(["wasp", "bee", "n0001"], origin="list", num_classes=4)
    assert meaning.classes == ("bee", "n0001", "wasp", "3")
    assert [meaning.label(word) for word in ("wasp", "bee", "Bee", "0")] == [2, 0, -1, -1]
    with pytest.raises(DataError, match=r"^list has 3 class names, but --num-classes is 2: 'bee', 'n0001', 'wasp'$"):
        find_meaning(["wasp", "bee", "n0001"], origin="list", num_classes=2)


@pytest.mark.parametrize(
    "word", ["1.0", "nan", "1e3", "+1", "1_0", "-0", "-1", "٣", "1000000", "9" * 5000, "inf", "x/y", "a.JPG"]
)
def test_what_only_looks_like_a_number_or_a_name_is_no_label(word: str) -> None:
    for others in (["0", "1"], ["cat", "dog"]):
        meaning = find_meaning([*others, word], origin="list")
        assert len(meaning.classes) == 2
        assert meaning.label(word) == -1
        assert len(meaning.fault(word)[0]) < 130


def test_a_fault_says_what_is_allowed_and_where_that_comes_from() -> None:
    assert find_meaning(["0", "1"], origin="LIST").fault("2") == (
        "label '2'", "allowed: a whole number from 0 to 1 (as in LIST; --num-classes can say more)"
    )  # fmt: skip
    assert find_meaning(["b", "a"], origin="LIST").fault("c") == (
        "label 'c'",
        "allowed: one of the names 'a', 'b' (as in LIST)",
    )


# --- a file of names


def test_named_classes_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes(b"\xef\xbb\xbfwasp\r\n red ant \r\nbee\r\n\r\n")
    meaning = find_meaning(["bee", "wasp"], origin="list", names=path, num_classes=3)
    assert meaning.classes == ("wasp", "red ant", "bee")
    assert [meaning.label(word) for word in ("bee", "red ant", "2", "3", "ant")] == [2, 1, 2, -1, -1]
    assert meaning.fault("ant") == (
        "label 'ant'", f"allowed: a whole number from 0 to 2 or one of the names 'wasp', 'red ant', 'bee' (--class-names {path})"
    )  # fmt: skip
    with pytest.raises(
        SettingError, match=r"--num-classes is 4, but --class-names .*names.txt has 3 names; leave --num-classes out"
    ):
        find_meaning(["bee"], origin="list", names=path, num_classes=4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no names in it"),
        ("\n \n", "no names in it"),
        ("a\n\nb\n", "line 2: no name; each class has one line, in the order of the labels"),
        ("a\nb\na\n", "line 3: 'a' is also on line 1"),
    ],
)
def test_names_that_leave_a_label_open_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "names.txt"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        find_meaning(["a"], origin="list", names=path)
    assert str(caught.value) == f"--class-names {path}: {words}"
