"""Class folders become labels and samples in one order; what is left out is counted, what is wrong is one line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from trainer.codes import DataError
from trainer.data.pictures.folders import scan_folders
from trainer.data.pictures.index import Index, Pictures

Nobody = Callable[[], AbstractContextManager[None]]


def make(root: Path, *names: str) -> Path:
    """Make files with different contents, and folders where a name ends in a slash."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make(tmp_path / "data", "train/bee/1.jpg", "train/ant/2.jpg", "val/ant/3.jpg", "val/bee/4.jpg")


def scan(root: Path) -> Pictures:
    return scan_folders(root, allow_empty=False)


def names(index: Index) -> list[str]:
    return [index.name(number) for number in range(len(index))]


# --- what is a picture, and which label it has


def test_real_folders_are_found(test_data: Path) -> None:
    root = test_data / "hymenoptera_256"
    found = scan(root)
    assert (len(found.train), len(found.test), found.classes, found.notes) == (244, 153, ("ants", "bees"), ())
    assert found.train.name(0) == "train/ants/0013035.jpg"
    assert found.facts == (
        f"{root}/train/: 244 pictures in 2 classes",
        f"{root}/val/: 153 pictures in 2 classes",
        "2 classes: 0 is 'ants', 1 is 'bees'",
    )
    assert found.test.labels.sum() == len(list((root / "val/bees").iterdir()))


def test_awkward_files_are_taken_by_suffix_and_the_rest_is_counted(test_data: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(test_data / "awkward", tmp_path / split / "one")
    found = scan(tmp_path)
    files = [path for path in (tmp_path / "train").rglob("*") if path.is_file()]
    assert len(found.train) == len(files) - 3
    assert "train/one/names/with space.jpg" in names(found.train)
    assert "train/one/UPPER.JPEG" in names(found.train)
    ignored = "3 other files ('one/._apple_double.jpg', 'one/README.md', 'one/Thumbs.db') ignored"
    assert found.facts[0].endswith(ignored)
    assert any("pictures are in train/ and in val/" in note for note in found.notes)


def test_hidden_and_foreign_entries_are_no_classes_and_no_pictures(root: Path) -> None:
    plain = scan(root)
    make(root, *(f"{split}/{name}" for split in ("train", "val") for name in (
        ".ipynb_checkpoints/1.jpg", "ant/.ipynb_checkpoints/2-checkpoint.jpg", "ant/._2.jpg", "bee/Thumbs.db", "stray.jpg",
        "__MACOSX/ant/._2.jpg", "ant/@eaDir/2.jpg/thumb.jpg",
    )))  # fmt: skip
    os.mkfifo(root / "train/ant/pipe.jpg")
    found = scan(root)
    assert (found.train.digest(), found.test.digest()) == (plain.train.digest(), plain.test.digest())
    assert found.classes == ("ant", "bee")
    assert found.facts[0] == (
        f"{root}/train/: 2 pictures in 2 classes; 8 other files ('.ipynb_checkpoints', '__MACOSX', 'ant/._2.jpg', "
        "'ant/.ipynb_checkpoints', 'ant/@eaDir', ...) ignored"
    )


def test_order_is_that_of_the_bytes_and_nested_folders_belong_to_their_class(tmp_path: Path) -> None:
    order = [
        "train/Z/b.jpg",
        "train/a/B.jpg",
        "train/a/a-1.jpg",
        "train/a/a.jpg",
        "train/a/a/9.jpg",
        "train/a/b.jpg",
        "train/é/1.jpg",
    ]
    make(tmp_path, *reversed(order), "val/Z/x.jpg", "val/a/deep/er/y.jpg", "val/é/z.jpg")
    found = scan(tmp_path)
    assert names(found.train) == order
    assert found.train.labels.tolist() == [0, 1, 1, 1, 1, 1, 2]
    assert names(found.test)[1] == "val/a/deep/er/y.jpg"
    assert found.classes == ("Z", "a", "é")


def test_names_that_are_no_utf8_are_found_again(root: Path) -> None:
    folder = os.fsencode(root / "train") + b"/caf\xe9"
    os.mkdir(folder)  # noqa: PTH102
    with open(folder + b"/\xff\n.jpg", "wb"):  # noqa: PTH123
        pass
    found = scan(root)
    assert found.classes == ("ant", "bee", "caf\\xe9")
    assert found.train.path(2).is_file()
    assert found.notes == ("1 of 3 classes has no test picture: 'caf\\\\xe9'",)


# --- links


def test_links_are_followed_and_circles_end(root: Path, tmp_path: Path) -> None:
    make(tmp_path / "far", "wasps/w.jpg", "more/m.jpg")
    (root / "train/wasp").symlink_to(tmp_path / "far/wasps")
    (root / "train/ant/more").symlink_to(tmp_path / "far/more")
    (root / "train/ant/linked.jpg").symlink_to(tmp_path / "far/more/m.jpg")
    for place, target in (("ant/self", "."), ("ant/up", ".."), ("ant/top", "../.."), ("bee/loop", "loop")):
        (root / "train" / place).symlink_to(target)
    (tmp_path / "far/more/back").symlink_to(root / "train/ant")
    (root / "val/wasp").mkdir()
    found = scan(root)
    assert names(found.train) == [
        "train/ant/2.jpg", "train/ant/linked.jpg", "train/ant/more/m.jpg", "train/bee/1.jpg", "train/wasp/w.jpg",
    ]  # fmt: skip
    assert found.notes == (
        "1 picture is twice in train/ or in val/ (first: 'train/ant/linked.jpg' and 'train/ant/more/m.jpg')",
        "1 of 3 classes has no test picture: 'wasp'",
    )


def test_links_that_lead_nowhere_are_noted(root: Path) -> None:
    for name in ("x.jpg", "y.jpg"):
        (root / "train/ant" / name).symlink_to("gone.jpg")
    (root / "train/ant/z.jpg").symlink_to("z.jpg")
    assert scan(root).notes == (
        f"{root}/train/: 3 links to pictures lead nowhere: 'ant/x.jpg', 'ant/y.jpg', 'ant/z.jpg'",
    )


# --- pictures that are there twice


def test_copies_in_train_and_val_are_noted_but_namesakes_are_not(root: Path) -> None:
    make(root, "train/ant/3.jpg", "train/ant/5.jpg")  # 3.jpg is another picture than val's
    assert scan(root).notes == ()
    shutil.copy(root / "train/ant/5.jpg", root / "val/ant/5.jpg")
    os.link(root / "train/bee/1.jpg", root / "val/ant/other.jpg")
    assert scan(root).notes == (
        "2 pictures are in train/ and in val/ (first: 'train/ant/5.jpg' and 'val/ant/5.jpg')",
    )  # fmt: skip


def test_of_many_possible_doubles_a_part_is_looked_at(root: Path) -> None:
    for number in range(600):
        os.link(root / "train/ant/2.jpg", root / f"val/ant/copy{number}.jpg")
    assert (
        scan(root).notes[0].startswith("at least 500 pictures are in train/ and in val/ (first: 'train/ant/2.jpg' and ")
    )


# --- what is wrong


def test_a_class_that_only_val_has_is_named(root: Path) -> None:
    make(root, "val/Bee/", "val/wasp/x.jpg")
    with pytest.raises(
        DataError, match=r"/val/ has 2 classes that .*/train/ has not: 'Bee', 'wasp'; .*/train/ has 'ant', 'bee'$"
    ):
        scan(root)


def test_an_empty_class_is_refused_by_name_or_allowed(root: Path) -> None:
    make(root, "train/wasp/picture.heic", "train/hornet/", "val/ant/x.jpg")
    with pytest.raises(DataError) as caught:
        scan(root)
    assert str(caught.value) == (
        f"{root}/train/ has 2 classes without pictures: 'hornet', 'wasp'; 1 other file ('wasp/picture.heic') left out; "
        "remove the folder, add pictures, or set --empty-classes allow"
    )
    found = scan_folders(root, allow_empty=True)
    assert found.classes == ("ant", "bee", "hornet", "wasp")
    assert found.train.labels.tolist() == [0, 1]
    assert found.notes[0] == "2 of 4 classes have no training picture: 'hornet', 'wasp'"


def test_a_thousand_empty_classes_are_one_short_line(root: Path) -> None:
    make(root, *(f"train/x{number:04d}/" for number in range(1000)))
    with pytest.raises(DataError, match="1,000 classes without pictures: 'x0000', .* and 995 more; 0 other files"):
        scan(root)
    notes = scan_folders(root, allow_empty=True).notes
    assert [note[:36] for note in notes] == [
        "1,000 of 1,002 classes have no train",
        "1,000 of 1,002 classes have no test ",
    ]


def test_one_class_is_noted(tmp_path: Path) -> None:
    found = scan(make(tmp_path, "train/only/1.jpg", "val/only/2.jpg"))
    assert found.notes == (
        "all training pictures are of one class, 'only': there is nothing to learn, accuracy means nothing",
    )


@pytest.mark.parametrize(
    ("there", "given", "words"),
    [
        ([], "no", r"--data-dir: folder '.*/no' cannot be listed: No such file or directory; expected train/ and val/"),
        (["set.zip"], "set.zip", r"set.zip' cannot be listed: Not a directory"),
        (["a/"], "a", r"/a has no train/ and no val/ but no folder; expected train/ and val/ in it, with a folder for each class$"),
        (["ants/1.jpg", "bees/2.jpg"], "", r"has no train/ and no val/ but 'ants/', 'bees/'; expected"),
        (["training/a/1.jpg", "val/a/1.jpg"], "", r"has no train/ but 'training/', 'val/'; expected"),
        (["train/a/1.jpg", "test/a/1.jpg"], "", r"has no val/ but 'test/', 'train/'; expected"),
        (["in/train/a/1.jpg", "in/val/a/1.jpg"], "", r"has no train/ and no val/ but 'in/'; --data-dir .*/in has both; expected"),
        (["train/a/1.jpg", "val/a/1.jpg"], "train", r"/train has no train/ and no val/ but 'a/'; --data-dir .* has both"),
        (["train/", "val/"], "", r"/train/ has no class folder but nothing; put the pictures of each class into a folder"),
        (["train/1.jpg", "val/"], "", r"/train/ has no class folder but 1 file \('1.jpg'\); put"),
        (["train/a/1.txt", "val/a/1.jpg"], "", r"/train/ has no picture in its class folders but 1 other file \('a/1.txt'\); pictures"),
        (["train/a/1.jpg", "val/a/"], "", r"/val/ has no picture in its class folders but 0 other files; pictures end in .bmp .gif"),
        (["train/a/1.jpg", "val/"], "", r"/val/ has no picture in its class folders"),
    ],
)  # fmt: skip
def test_a_wrong_layout_says_what_is_there(tmp_path: Path, there: list[str], given: str, words: str) -> None:
    make(tmp_path, *there)
    for allow_empty in (False, True):
        with pytest.raises(DataError, match=words) as caught:
            scan_folders(tmp_path / given, allow_empty=allow_empty)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("closed", [".", "train", "val", "train/ant"])
def test_a_folder_that_cannot_be_listed_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, as_nobody: Nobody, closed: str
) -> None:
    monkeypatch.chdir(root)  # so that the rights of the folders above do not matter
    (root / closed).chmod(0o111)
    with (
        as_nobody(),
        pytest.raises(DataError, match=rf"folder '\.?/?{closed}' cannot be listed: Permission denied"),
    ):
        scan(Path())
