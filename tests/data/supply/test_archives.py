"""Archives are unpacked whole or not at all, nothing leaves the folder or overwrites, and what is wrong with one is said in a line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.codes import DataError, SettingError
from trainer.data.supply.archives import finish, is_unfinished, is_unpacked, unpack

FILES = {
    "train/cat/1.jpg": b"one",
    "train/cat/2.jpg": b"two" * 1000,
    "train/dög/3.jpg": b"",
    "val/cat/4.jpg": os.urandom(70_000),
    "classes.txt": b"cat\n",
}


def write_zip(path: Path, files: Mapping[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


def write_tar(
    path: Path, files: Mapping[str, bytes], mode: str = "w", entries: tuple[tarfile.TarInfo, ...] = ()
) -> Path:
    with tarfile.open(path, mode) as file:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for entry in entries:
            file.addfile(entry)
    return path


def entry(name: str, kind: bytes, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info


def tree(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, what the unpacking itself leaves left out."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


def is_clean(folder: Path) -> bool:
    """Tell whether no trace of an unpacking is there, whole or not."""
    return not [path.name for path in folder.iterdir() if path.name.startswith(".unpack")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


MAKERS: dict[str, Callable[[Path], Path]] = {
    "deflated": lambda path: write_zip(path, FILES),
    "stored": lambda path: write_zip(path, FILES, zipfile.ZIP_STORED),
    "lzma": lambda path: write_zip(path, FILES, zipfile.ZIP_LZMA),
    "tar": lambda path: write_tar(path, FILES),
    "gz": lambda path: write_tar(path, FILES, "w:gz"),
    "bz2": lambda path: write_tar(path, FILES, "w:bz2"),
    "xz": lambda path: write_tar(path, FILES, "w:xz"),
}
each_kind = pytest.mark.parametrize("kind", MAKERS)


@each_kind
def test_kind_is_told_by_content_and_the_second_call_does_nothing(tmp_path: Path, folder: Path, kind: str) -> None:
    archive = MAKERS[kind](tmp_path / "pictures.data")
    assert not is_unpacked(archive, folder)
    assert unpack(archive, folder)
    assert tree(folder) == FILES
    assert is_unpacked(archive, folder)
    assert not is_unfinished(folder)
    assert not unpack(archive, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".unpacked-pictures.data.json",
        "classes.txt",
        "train",
        "val",
    ]


def test_marker_says_what_was_unpacked(tmp_path: Path, folder: Path) -> None:
    archive = MAKERS["gz"](tmp_path / "a.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    unpack(archive, folder, sha256=digest.upper())
    marker = json.loads((folder / ".unpacked-a.tar.gz.json").read_text())
    assert marker.pop("unpacked").endswith("Z")
    assert marker == {
        "archive": "a.tar.gz", "size": archive.stat().st_size, "mtime_ns": archive.stat().st_mtime_ns, "sha256": digest,
        "entries": ["classes.txt", "train", "val"],
    }  # fmt: skip


def test_rights_in_the_archive_have_no_say(tmp_path: Path, folder: Path) -> None:
    run_me = entry("run", tarfile.REGTYPE, mode=0o6777)
    unpack(write_tar(tmp_path / "a.tar", FILES, entries=(run_me, entry("shut", tarfile.DIRTYPE, mode=0))), folder)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((folder / "run").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((folder / "shut").stat().st_mode) == 0o777 & ~umask


# --- the same archive, another one, none


def test_archive_may_be_gone_once_it_is_unpacked(tmp_path: Path, folder: Path) -> None:
    archive = MAKERS["tar"](tmp_path / "a.tar")
    unpack(archive, folder)
    archive.unlink()
    assert not unpack(archive, folder)


def test_changed_archive_of_the_same_name_does_not_overwrite(tmp_path: Path, folder: Path) -> None:
    archive = MAKERS["tar"](tmp_path / "a.tar")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    unpack(archive, folder, sha256=digest)
    os.utime(archive, (1, 1))
    assert not unpack(archive, folder, sha256=digest)  # a copy of the same content
    with pytest.raises(
        SettingError, match=r"classes.txt|train is already there, and the archive has it too: move it away"
    ):
        unpack(archive, folder)
    assert tree(folder) == FILES


def test_sha256_asked_for_later_is_checked_then(tmp_path: Path, folder: Path) -> None:
    archive = MAKERS["tar"](tmp_path / "a.tar")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    unpack(archive, folder)
    with pytest.raises(DataError, match=f"a.tar has sha256 {digest}; --archive-sha256 is {'0' * 64}"):
        unpack(archive, folder, sha256="0" * 64)
    assert not is_unpacked(archive, folder, sha256=digest)
    assert unpack(archive, folder, sha256=digest)
    assert is_unpacked(archive, folder, sha256=digest)
    assert not unpack(archive, folder, sha256=digest)
    assert not unpack(archive, folder)


def test_wrong_sha256_is_found_before_anything_is_written(tmp_path: Path, folder: Path) -> None:
    archive = MAKERS["tar"](tmp_path / "a.tar")
    with pytest.raises(DataError, match=r"another file, or a damaged copy"):
        unpack(archive, folder, sha256="0" * 64)
    assert not list(folder.iterdir())


def test_data_that_were_removed_are_unpacked_again(tmp_path: Path, folder: Path) -> None:
    archive = MAKERS["tar"](tmp_path / "a.tar")
    unpack(archive, folder)
    for name in ("train", "val"):
        shutil.rmtree(folder / name)
    (folder / "classes.txt").unlink()
    assert unpack(archive, folder)
    assert tree(folder) == FILES


@pytest.mark.parametrize("garbled", ["", "{", "[]", '{"archive": 1}'])
def test_garbled_marker_counts_as_none(tmp_path: Path, folder: Path, garbled: str) -> None:
    archive = MAKERS["tar"](tmp_path / "a.tar")
    (folder / ".unpacked-a.tar.json").write_text(garbled)
    assert unpack(archive, folder)
    assert is_unpacked(archive, folder)


def test_archive_that_cannot_be_opened_is_a_setting_error(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(SettingError, match=rf"--archive {tmp_path}/none.zip cannot be read as uid \d+: No such file"):
        unpack(tmp_path / "none.zip", folder)
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SettingError, match=f"--archive {path} is no file"):
            unpack(path, folder)


def test_two_archives_share_a_folder(tmp_path: Path, folder: Path) -> None:
    first, second = write_tar(tmp_path / "a.tar", {"train/1": b"1"}), write_tar(tmp_path / "b.tar", {"val/2": b"2"})
    assert unpack(first, folder)
    assert unpack(second, folder)
    assert not unpack(first, folder)
    assert tree(folder) == {"train/1": b"1", "val/2": b"2"}


# --- what is there is left alone


@each_kind
@pytest.mark.parametrize("there", ["folder", "file", "broken link"])
def test_what_is_there_is_never_overwritten(tmp_path: Path, folder: Path, kind: str, there: str) -> None:
    mine = folder / "val"
    {"folder": mine.mkdir, "file": mine.touch, "broken link": lambda: mine.symlink_to("nowhere")}[there]()
    with pytest.raises(SettingError, match=f"{mine} is already there"):
        unpack(MAKERS[kind](tmp_path / "a"), folder)
    assert [path.name for path in folder.iterdir()] == ["val"]
    assert not mine.is_dir() or not list(mine.iterdir())


def test_what_is_there_is_found_before_the_rest_is_read(tmp_path: Path, folder: Path) -> None:
    (folder / "train").mkdir()
    archive = MAKERS["tar"](tmp_path / "a.tar")
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(SettingError, match="train is already there"):
        unpack(archive, folder)


def test_what_is_there_is_found_below_folders_that_are_left_out(tmp_path: Path, folder: Path) -> None:
    (folder / "val").mkdir()
    with pytest.raises(SettingError, match="val is already there"):
        unpack(write_zip(tmp_path / "a.zip", WRAPPED), folder, landmarks=("train", "val"))
    assert [path.name for path in folder.iterdir()] == ["val"]


def test_other_files_stay(tmp_path: Path, folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    unpack(MAKERS["stored"](tmp_path / "a.zip"), folder)
    assert tree(folder) == FILES | {"notes.txt": b"mine"}


# --- where the files are in the archive


WRAPPED = {f"pictures/v1/{name}": content for name, content in FILES.items()}


def test_folders_around_the_landmarks_are_left_out(tmp_path: Path, folder: Path) -> None:
    extra = {"__MACOSX/pictures/._v1": b"junk"}
    unpack(write_zip(tmp_path / "a.zip", WRAPPED | extra), folder, landmarks=("train", "val"))
    assert tree(folder) == FILES


@pytest.mark.parametrize("landmarks", [(), ("images",)])
def test_without_a_landmark_all_folders_stay(tmp_path: Path, folder: Path, landmarks: tuple[str, ...]) -> None:
    unpack(write_zip(tmp_path / "a.zip", WRAPPED), folder, landmarks=landmarks)
    assert tree(folder) == WRAPPED


def test_landmark_at_the_top_stays(tmp_path: Path, folder: Path) -> None:
    unpack(write_zip(tmp_path / "a.zip", {"train/train/1": b""}), folder, landmarks=("train", "val"))
    assert tree(folder) == {"train/train/1": b""}


def test_names_are_taken_with_dots_and_backslashes_made_plain(tmp_path: Path, folder: Path) -> None:
    unpack(write_tar(tmp_path / "a.tar", {"./train//1": b"1"}, entries=(entry("./", tarfile.DIRTYPE),)), folder)
    unpack(write_zip(tmp_path / "b.zip", {"val\\a\\2": b"2"}), folder)
    assert tree(folder) == {"train/1": b"1", "val/a/2": b"2"}


# --- members that are refused


def refused(archive: Path, folder: Path, words: str) -> None:
    """See that nothing of the archive is put into place, nor anywhere else."""
    before = sorted(archive.parent.rglob("*"))
    with pytest.raises(DataError, match=words) as caught:
        unpack(archive, folder)
    assert "\n" not in str(caught.value)
    assert sorted(archive.parent.rglob("*")) == before
    assert is_clean(folder)


@pytest.mark.parametrize("write", [write_zip, write_tar])
@pytest.mark.parametrize("name", ["/etc/evil", "../evil", "train/../../evil", "train/..", "//evil"])
def test_names_outside_of_the_folder_are_refused(tmp_path: Path, folder: Path, write: Any, name: str) -> None:
    refused(
        write(tmp_path / "a", FILES | {name: b"evil"}),
        folder,
        f"a: its member '{name}' lies outside of the folder; refused",
    )


def test_backslashes_do_not_lead_out(tmp_path: Path, folder: Path) -> None:
    refused(write_zip(tmp_path / "a", {"..\\evil": b""}), folder, "lies outside of the folder")


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (entry("train/link", tarfile.SYMTYPE, "/etc/passwd"), "'train/link' points outside of the folder, to '/etc/passwd'"),
        (entry("train/link", tarfile.SYMTYPE, "../../evil"), "'train/link' points outside of the folder"),
        (entry("link", tarfile.SYMTYPE, "train/../../data/classes.txt"), "'link' points outside"),
        (entry("link", tarfile.LNKTYPE, "../evil"), "'link' points outside"),
        (entry("link", tarfile.LNKTYPE, "/etc/passwd"), "'link' points outside"),
        (entry("link", tarfile.SYMTYPE, "train"), "'link' is a link to something that is no file of the archive"),
        (entry("link", tarfile.SYMTYPE, "nothing"), "'link' is a link to something that is no file of the archive"),
        (entry("link", tarfile.SYMTYPE, "link"), "'link' is a link to something that is no file of the archive"),
        (entry("classes.txt", tarfile.SYMTYPE, "train/cat/1.jpg"), "'classes.txt' is there twice"),
        (entry("null", tarfile.CHRTYPE), "'null' is a device, a pipe"),
        (entry("disk", tarfile.BLKTYPE), "'disk' is a device, a pipe"),
        (entry("pipe", tarfile.FIFOTYPE), "'pipe' is a device, a pipe"),
        (entry("train/cat/1.jpg", tarfile.REGTYPE), "'train/cat/1.jpg' is there twice"),
        (entry("./train/cat//1.jpg", tarfile.REGTYPE), "is there twice"),
        (entry("train/cat", tarfile.REGTYPE), "'train/cat' is there twice"),
        (entry("train/cat/1.jpg", tarfile.DIRTYPE), "'train/cat/1.jpg' is there twice"),
        (entry("classes.txt/below/it", tarfile.REGTYPE), "'classes.txt/below/it' is there twice"),
    ],
)  # fmt: skip
def test_tar_members_that_are_refused(tmp_path: Path, folder: Path, member: tarfile.TarInfo, words: str) -> None:
    refused(write_tar(tmp_path / "a.tar", FILES, entries=(member,)), folder, words)


def test_nothing_is_written_through_a_link(tmp_path: Path, folder: Path) -> None:
    """The link is refused for what it points to, and the file below it would collide, in either order."""
    (tmp_path / "out").mkdir()
    way_out = entry("val", tarfile.SYMTYPE, "../out")
    file = entry("val/evil", tarfile.REGTYPE)
    refused(write_tar(tmp_path / "a.tar", {}, entries=(way_out, file)), folder, "points outside")
    inside = entry("val", tarfile.SYMTYPE, "train")
    refused(
        write_tar(tmp_path / "b.tar", FILES, entries=(inside, file)), folder, "no file of the archive|is there twice"
    )


def test_links_inside_become_the_files_they_point_to(tmp_path: Path, folder: Path) -> None:
    early = (entry("first", tarfile.SYMTYPE, "./train/../late"), entry("train/second", tarfile.SYMTYPE, "cat/1.jpg"))
    archive = write_tar(tmp_path / "a.tar", {}, entries=early)
    with tarfile.open(archive, "a") as file:
        for name, content in (FILES | {"late": b"late"}).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        file.addfile(entry("val/third", tarfile.LNKTYPE, "train/second"))
    unpack(archive, folder)
    assert tree(folder) == FILES | {"late": b"late", "first": b"late", "train/second": b"one", "val/third": b"one"}
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_in_a_zip_are_refused(tmp_path: Path, folder: Path, kind: int) -> None:
    info = zipfile.ZipInfo("link")
    info.create_system, info.external_attr = 3, (kind | 0o644) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("train/1", b"1")
        file.writestr(info, "/etc/passwd")
    refused(tmp_path / "a.zip", folder, "'link' is a link or a device")


def test_duplicates_in_a_zip_are_refused(tmp_path: Path, folder: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("train/1", b"1")
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("train/1", b"2")
    refused(tmp_path / "a.zip", folder, "'train/1' is there twice")


def test_zip_with_a_password_is_refused(tmp_path: Path, folder: Path) -> None:
    archive = write_zip(tmp_path / "a.zip", {"train/1": b"1"})
    content = bytearray(archive.read_bytes())
    for head, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(head) + flags] |= 1
    archive.write_bytes(content)
    refused(archive, folder, "'train/1' needs a password")


# --- archives that are damaged


@each_kind
def test_cut_anywhere_is_found(tmp_path: Path, folder: Path, kind: str) -> None:
    whole = MAKERS[kind](tmp_path / "whole").read_bytes()
    end = len(whole)
    if kind == "tar":
        end -= len(whole) - len(whole.rstrip(b"\0")) - 600  # of its last zeros, some may be missing
        end -= end % 512
    for size in {*range(0, end, max(1, end // 40)), *range(0, end, 1024 if kind == "tar" else end), end - 8, end - 1}:
        (tmp_path / "a").write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=r"/a is damaged, cut, or of an unknown kind \(.*\); copy it again"
        ) as caught:
            unpack(tmp_path / "a", folder)
        assert "\n" not in str(caught.value)
        assert not list(folder.iterdir())


@each_kind
def test_changed_bytes_are_found_where_there_is_a_checksum(tmp_path: Path, folder: Path, kind: str) -> None:
    whole = MAKERS[kind](tmp_path / "whole").read_bytes()
    place = whole.index(FILES["val/cat/4.jpg"][:100]) if kind in ("stored", "tar") else len(whole) // 2
    garbled = bytearray(whole)
    garbled[place] ^= 1
    (tmp_path / "a").write_bytes(garbled)
    if kind == "tar":  # nothing in it would tell
        assert unpack(tmp_path / "a", folder)
        return
    with pytest.raises(DataError, match="/a is damaged"):
        unpack(tmp_path / "a", folder)
    assert not list(folder.iterdir())


def test_changed_header_in_the_middle_of_a_tar_is_found(tmp_path: Path, folder: Path) -> None:
    archive = write_tar(tmp_path / "a.tar", FILES)
    content = bytearray(archive.read_bytes())
    content[content.index(b"val/cat/4.jpg")] ^= 1
    archive.write_bytes(content)
    refused(archive, folder, "a.tar is damaged, cut")


def test_more_after_the_end_is_found(tmp_path: Path, folder: Path) -> None:
    archive = write_tar(tmp_path / "a.tar", FILES)
    archive.write_bytes(archive.read_bytes() * 2)
    refused(archive, folder, "a.tar goes on after its end mark")


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"PK\3\4", b"\x1f\x8b", os.urandom(2000), b"\0" * 2000])
def test_what_is_no_archive_is_said(tmp_path: Path, folder: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    refused(tmp_path / "a", folder, r"/a is damaged, cut, or of an unknown kind|/a holds no files")


@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_empty_archive_is_an_error(tmp_path: Path, folder: Path, write: Any) -> None:
    refused(write(tmp_path / "a", {}), folder, "/a holds no files")


def test_archive_larger_than_the_disk_is_refused_with_both_sizes(tmp_path: Path, folder: Path) -> None:
    huge = entry("train/2", tarfile.REGTYPE)
    huge.size = 10**18
    archive = write_tar(tmp_path / "a.tar", {"train/1": b"1"})
    content = archive.read_bytes()[:1024] + huge.tobuf() + b"data"
    archive.write_bytes(content)
    refused(
        archive, folder, rf"a.tar needs 1000000000\.0 GB or more, unpacked; {folder} has \d+\.\d [GMk]B free: make room"
    )


# --- after a kill (test_prepare.py kills at every moment)


def test_unfinished_work_is_finished_without_the_archive(tmp_path: Path, folder: Path) -> None:
    archive = MAKERS["tar"](tmp_path / "a.tar")
    unpack(archive, folder)
    ready = folder / ".unpacked"
    (ready / "entries").mkdir(parents=True)
    (folder / "val").rename(ready / "entries" / "val")
    (folder / ".unpacked-a.tar.json").rename(ready / "marker.json")
    assert is_unfinished(folder)
    assert not is_unpacked(archive, folder)
    finish(folder)
    assert tree(folder) == FILES
    assert not unpack(archive, folder)


def test_rests_of_a_kill_are_not_taken_for_data(tmp_path: Path, folder: Path) -> None:
    (folder / ".unpacking" / "content" / "train").mkdir(parents=True)
    (folder / ".unpacking" / "content" / "train" / "half").write_bytes(b"ha")
    unpack(MAKERS["tar"](tmp_path / "a.tar"), folder)
    assert tree(folder) == FILES
    assert not (folder / ".unpacking").exists()


def test_what_this_program_keeps_in_a_folder_is_left_out_of_it(tmp_path: Path, folder: Path) -> None:
    own = {".prepare.lock": b"", ".unpacked/x": b"1", ".unpacked-a.zip.json": b"{}", ".fetching/part": b"2"}
    archive = write_zip(tmp_path / "again.zip", {**own, "train/a/0.png": b"3"})
    assert unpack(archive, folder)
    assert (folder / "train/a/0.png").read_bytes() == b"3"
    assert not (folder / ".prepare.lock").exists()
    assert not unpack(archive, folder)


def test_archive_with_the_longest_name_has_a_marker(tmp_path: Path, folder: Path) -> None:
    archive = write_zip(tmp_path / f"{'a' * 251}.zip", {"x": b"1"})
    assert unpack(archive, folder)
    assert not unpack(archive, folder)
