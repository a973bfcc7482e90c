"""What two lists say becomes a data set, or one line that says which lines are wrong; the same list in another dress is the same set."""

from __future__ import annotations

import gc
import os
import re
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from trainer.codes import DataError, SettingError
from trainer.data.pictures.index import Pictures
from trainer.data.pictures.lists import read_lists

#: file of the test data -> the number of its samples, or what the error says; then what a note says.
ANSWERS: dict[str, tuple[int | str, str]] = {
    "hymenoptera_train.txt": (244, ""),
    "hymenoptera_val.txt": (153, ""),
    "plain.txt": (8, ""),
    "crlf.txt": (8, ""),
    "bom.txt": (8, ""),
    "bom_crlf.txt": (8, ""),
    "latin1.txt": (r"line 1: byte 0xe9 is no UTF-8", ""),
    "comments.txt": (8, ""),
    "hash_path.txt": (9, ""),
    "blank_lines.txt": (8, ""),
    "no_final_newline.txt": (8, ""),
    "tabs.txt": (8, ""),
    "spaces_unquoted.txt": (12, ""),
    "spaces_tab.txt": (12, ""),
    "spaces_quoted.txt": (12, ""),
    "comma.csv": (9, ""),
    "header.txt": (r"1 line is wrong: line 1: label 'label'; allowed: a whole number from 0 to 1 .*; only CSV has a header$", ""),
    "missing_file.txt": (r"2 lines are wrong: line 4: no file 'ants/not_there.jpg'; line 9: no file 'bees/also_missing.jpg'$", ""),
    "missing_all.txt": (r"0 of 8 pictures found below .*images, is --data-dir right\? \(line 1: 'wrong_root/ants/ant0.jpg'\)$", ""),
    "label_negative.txt": (r"1 line is wrong: line 3: label '-1'; allowed: a whole number from 0 to 1 \(--num-classes\)$", ""),
    "label_minus100.txt": (r"1 line is wrong: line 3: label '-100'; allowed: a whole number from 0 to 1", ""),
    "label_beyond.txt": (r"1 line is wrong: line 8: label '2'; allowed: a whole number from 0 to 1", ""),
    "label_gap.txt": (8, r"1 of 3 classes has no training picture: '1'"),
    "label_float.txt": (r"2 lines are wrong: line 3: label '0.0'; line 4: label '0.5'; allowed: a whole number", ""),
    "label_nonint.txt": (r"1 line is wrong: line 3: label 'ant'; allowed: a whole number from 0 to 1", ""),
    "label_names.txt": (8, ""),
    "label_missing.txt": (r"1 line is wrong: line 4: no label: 'ants/ant3.jpg'; expected `path label`", ""),
    "label_first.txt": (r"line 1: label 'ants/ant0.jpg' looks like a path; .*and 3 more; expected `path label`", ""),
    "duplicates.txt": (10, r"2 pictures listed more than once \(first: line 9, 'ants/ant0.jpg'\)"),
    "dot_slash.txt": (8, ""),
    "backslashes.txt": (r"0 of 8 pictures found .*line 1: 'ants\\\\ant0.jpg', write / for the backslashes\)$", ""),
    "not_image.txt": (9, ""),  # whether it is a picture is seen when it is read
    "one_class.txt": (4, r"all training pictures are of one class, '0'"),
    "empty.txt": (r"no samples", ""),
    "only_comments.txt": (r"no samples", ""),
    "one_row.txt": (1, ""),
    "uneven_7.txt": (7, ""),
}  # fmt: skip

COUNTS = {"label_gap.txt": 3, "label_names.txt": None}
SAME = ("crlf", "bom", "bom_crlf", "comments", "blank_lines", "no_final_newline", "tabs", "dot_slash", "label_names")

Write = Callable[..., Path]


@pytest.fixture
def lists(test_data: Path) -> Path:
    return test_data / "lists"


def read_shared(lists: Path, name: str) -> Pictures:
    if name.startswith("hymenoptera"):
        root, test = lists.parent / "hymenoptera_256", "hymenoptera_val.txt"
    else:
        root, test = lists / "images", name if name == "label_names.txt" else "plain.txt"
    return read_lists(lists / name, lists / test, root=root, names=None, num_classes=COUNTS.get(name, 2))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a.jpg to d.jpg in one folder."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name in "abcd":
        (folder / f"{name}.jpg").touch()
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes, name: str = "train.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def read(
    train: Path, root: Path, *, test: Path | None = None, names: Path | None = None, num_classes: int | None = None
) -> Pictures:
    return read_lists(train, test or train, root=root, names=names, num_classes=num_classes)


# --- the lists of the test data


def test_every_list_of_the_table_has_an_answer(lists: Path) -> None:
    rows = re.findall(r"^\| (\S+\.(?:txt|csv)) \|", (lists / "README.md").read_text(), flags=re.MULTILINE)
    assert (
        sorted(rows)
        == sorted(ANSWERS)
        == sorted(path.name for path in lists.iterdir() if path.suffix in (".txt", ".csv"))
    )


@pytest.mark.parametrize("name", ANSWERS)
def test_a_list_is_read_or_refused_as_its_table_says(lists: Path, name: str) -> None:
    answer, note = ANSWERS[name]
    if isinstance(answer, str):
        with pytest.raises(DataError, match=answer) as caught:
            read_shared(lists, name)
        assert str(caught.value).startswith(f"--train-list {lists / name}")
        assert "\n" not in str(caught.value)
        return
    found = read_shared(lists, name)
    assert len(found.train) == answer
    assert all(found.train.path(number).is_file() for number in range(answer))
    expected = [note] if note else []
    others = [
        text for text in found.notes if "also in" not in text and "test picture" not in text and name != "one_row.txt"
    ]
    assert all(any(re.search(pattern, text) for text in others) for pattern in expected)
    assert bool(others) == bool(expected) or name in ("label_gap.txt", "one_class.txt")


@pytest.mark.parametrize("name", SAME)
def test_the_same_list_in_another_form_is_the_same_data_set(lists: Path, name: str) -> None:
    plain = read_shared(lists, "plain.txt").train
    assert [plain.name(number) for number in (0, 7)] == ["ants/ant0.jpg", "bees/bee3.jpg"]
    assert plain.labels.tolist() == [0] * 4 + [1] * 4
    assert read_shared(lists, f"{name}.txt").train.digest() == plain.digest()


def test_spaces_survive_in_every_form(lists: Path) -> None:
    found = [read_shared(lists, f"spaces_{form}.txt").train for form in ("unquoted", "tab", "quoted")]
    assert found[0].name(1) == "red ants/ant  two  spaces.jpg"
    assert len({index.digest() for index in found}) == 1


# --- files and labels that do not fit


def test_missing_settings_are_named_together(root: Path, write: Write) -> None:
    with pytest.raises(SettingError, match=r"^--test-list and --data-dir not set; .*the folder that the paths"):
        read_lists(write("a.jpg 0"), None, root=None, names=None, num_classes=None)


def test_a_root_that_is_no_folder_is_named(root: Path, write: Write) -> None:
    path = write("a.jpg 0")
    for wrong, words in ((root / "no", "No such file"), (root / "a.jpg", "Not a directory")):
        with pytest.raises(DataError, match=rf"^--data-dir {wrong} cannot be listed: {words}"):
            read(path, wrong)


def test_faults_of_both_lists_come_in_one_line(root: Path, write: Write) -> None:
    train = write("a.jpg 0\nx.jpg 0\nb.jpg -1\n")
    test = write("a.jpg 0\nb.jpg 1\n", "test.txt")
    with pytest.raises(DataError) as caught:
        read(train, root, test=test)
    assert str(caught.value) == (
        f"--train-list {train}, pictures below {root}: 2 lines are wrong: line 2: no file 'x.jpg'; line 3: label '-1'; "
        f"allowed: a whole number from 0 to 0 (as in --train-list {train}; --num-classes can say more). "
        f"--test-list {test}, pictures below {root}: 1 line is wrong: line 2: label '1'; "
        f"allowed: a whole number from 0 to 0 (as in --train-list {train}; --num-classes can say more)"
    )
    assert len(read(write("a.jpg 0\n"), root, test=test, num_classes=2).classes) == 2


def test_the_test_list_is_not_blamed_for_a_training_list_without_labels(root: Path, write: Write) -> None:
    with pytest.raises(
        DataError, match=r"^--train-list [^.]*\.txt, .*line 1: label '-1'; allowed: a whole number from 0 to 1"
    ) as caught:
        read(write("a.jpg -1\n"), root, test=write("b.jpg 1\n", "test.txt"))
    assert "--test-list" not in str(caught.value).replace("as in --test-list", "")


def test_many_faults_stay_one_short_line_with_the_lowest_line_numbers(root: Path, write: Write) -> None:
    text = "a.jpg 0\n" + "".join(f"{'long' * 100}{number}.jpg 0\n" for number in range(1200)) + "b.jpg x\nc.jpg\n"
    with pytest.raises(DataError, match=r"1,202 lines are wrong: line 2: .*line 6: .*; and 1,197 more$") as caught:
        read(write(text), root, test=write("a.jpg 0\n", "test.txt"))
    assert len(str(caught.value)) < 1500


def test_folders_and_links_to_nothing_are_no_pictures(root: Path, write: Write) -> None:
    (root / "sub").mkdir()
    (root / "gone.jpg").symlink_to("nowhere.jpg")
    (root / "loop.jpg").symlink_to("loop.jpg")
    (root / "good.jpg").symlink_to("a.jpg")
    rows = ["good.jpg", "sub", "sub/", "gone.jpg", "loop.jpg", "a.jpg/b.jpg", f"{'x' * 5000}/b.jpg", "/a.jpg"]
    with pytest.raises(DataError, match=r"7 lines are wrong: line 2: no file 'sub'; line 3: .*line 6: .*; and 2 more"):
        read(write("".join(f"{row} 0\n" for row in rows)), root, test=write("a.jpg 0", "test.txt"))


def test_a_folder_that_cannot_be_listed_is_no_missing_file(
    root: Path, write: Write, monkeypatch: pytest.MonkeyPatch, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    monkeypatch.chdir(root.parent)  # so that the rights of the folders above do not matter
    root.parent.chmod(0o755)
    (root / "closed").mkdir(mode=0o111)
    write("a.jpg 0\nclosed/b.jpg 0\n")
    with as_nobody(), pytest.raises(DataError, match=r"^folder 'images/closed' cannot be listed: Permission denied$"):
        read(Path("train.txt"), Path("images"))


def test_absolute_paths_and_paths_out_of_the_root_are_taken(root: Path, write: Write, tmp_path: Path) -> None:
    (tmp_path / "out.jpg").touch()
    found = read(write(f"{root}/a.jpg 0\n../out.jpg 1\n.//b.jpg 0\n"), root).train
    assert [found.path(number).resolve() for number in range(3)] == [
        root / "a.jpg",
        tmp_path / "out.jpg",
        root / "b.jpg",
    ]
    assert found.name(2) == "b.jpg"


def test_a_backslash_is_a_character_where_the_file_has_it(root: Path, write: Write) -> None:
    (root / "odd\\name.jpg").touch()
    assert read(write("odd\\name.jpg 0\n"), root).train.name(0) == "odd\\name.jpg"
    with pytest.raises(DataError, match=r"line 2: no file 'sub\\\\a.jpg'; write / for the backslashes$"):
        read(write("a.jpg 0\nsub\\a.jpg 0\n"), root, test=write("a.jpg 0", "test.txt"))


# --- notes, facts, memory


def test_doubles_overlap_and_contradiction_are_noted(root: Path, write: Write) -> None:
    train, test = write("a.jpg 0\nb.jpg 1\na.jpg 1\n"), write("c.jpg 0\nb.jpg 0\nb.jpg 1\nd.jpg 1\n", "test.txt")
    assert read(train, root, test=test).notes == (
        f"--train-list {train}: 1 picture listed more than once (first: line 3, 'a.jpg')",
        f"--train-list {train}: 1 picture listed before with another label (first: line 3, 'a.jpg')",
        f"--test-list {test}: 2 pictures also in --train-list {train} (first: line 2, 'b.jpg')",
        f"--test-list {test}: 1 picture listed before with another label (first: line 2, 'b.jpg')",
    )


def test_a_thousand_empty_classes_are_one_note_per_list(root: Path, write: Write) -> None:
    found = read(write("a.jpg 0\nb.jpg 999\n"), root, test=write("c.jpg 0\n", "test.txt"))
    assert [note[:60] for note in found.notes] == [
        "998 of 1,000 classes have no training picture: '1', '2', '3'",
        "999 of 1,000 classes have no test picture: '1', '2', '3', '4",
    ]
    assert all(len(note) < 120 for note in found.notes)
    assert found.facts[2] == "1,000 classes, by number"


def test_facts_tell_form_count_and_meaning(root: Path, write: Write) -> None:
    train, test = write("path,class\na.jpg,wasp\nb.jpg,bee\n"), write("c.jpg bee\n", "test.txt")
    assert read(train, root, test=test).facts == (
        f"--train-list {train} (CSV, columns 'path' and 'class'): 2 pictures",
        f"--test-list {test} (text): 1 picture",
        "2 classes: 0 is 'bee', 1 is 'wasp'",
    )


def test_reading_a_long_list_leaves_only_arrays_behind(tmp_path: Path, root: Path, write: Write) -> None:
    count = 20_000
    names = [f"n{number:08d}.jpg" for number in range(count)]
    folder = tmp_path / "many"
    folder.mkdir()
    for name in names:
        os.link(root / "a.jpg", folder / name)
    train = write("".join(f"{name} {number % 10}\n" for number, name in enumerate(names)))
    test = write(f"{names[0]} 0\n", "test.txt")
    read(train, folder, test=test)  # what is imported or cached at the first call is not counted
    gc.collect()
    tracemalloc.start()
    objects = len(gc.get_objects())
    try:
        found = read(train, folder, test=test)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    arrays = sum(array.nbytes for array in (found.train.names, found.train.ends, found.train.labels))
    assert len(found.train) == count
    assert kept < 1.1 * arrays + 20_000
    assert len(gc.get_objects()) - objects < 100
    assert all(isinstance(part, np.ndarray) for part in (found.train.names, found.train.ends, found.train.labels))
