"""Rows come out of text and CSV alike, and what is no row, or no text, is told in one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from trainer.codes import DataError
from trainer.data.pictures.rows import Row, read_rows
from trainer.data.pictures.wording import Faults


def read(path: Path, content: str | bytes) -> tuple[list[Row], str]:
    """Return the rows, and the faults in words."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    faults = Faults()
    _, rows = read_rows(path, flag="--train-list", faults=faults)
    return list(rows), str(faults)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return tmp_path / "list.txt"


@pytest.mark.parametrize(
    ("line", "path", "label"),
    [
        ("a b.jpg  7", "a b.jpg", "7"),
        ("a  b.jpg\t red ants ", "a  b.jpg", "red ants"),
        ("  a.jpg 7\t ", "a.jpg", "7"),
        ('"a b.jpg" red', "a b.jpg", "red"),
        ('" a ".jpg"" " 7', ' a ".jpg" ', "7"),
        ('"a.jpg" "red ants"', "a.jpg", "red ants"),
        ('a b.jpg "red ants"', "a b.jpg", "red ants"),
        ('ants/"quoted".jpg 0', 'ants/"quoted".jpg', "0"),
        ("./#ant.jpg 0", "#ant.jpg", "0"),
        ("./a/.//b.jpg 0", "a/b.jpg", "0"),
        ("a./b.jpg 0", "a./b.jpg", "0"),
        ("/x//y.jpg 0", "/x/y.jpg", "0"),
        ("../x.jpg 0", "../x.jpg", "0"),
        ("a\u3000b\u2028c\x0b.jpg 0", "a\u3000b\u2028c\x0b.jpg", "0"),
    ],
)
def test_a_line_is_a_path_and_a_label(text: Path, line: str, path: str, label: str) -> None:
    quoted = line.replace('" a ".jpg"" "', '" a "".jpg"" "')  # a quote inside quotes is doubled
    assert read(text, f"\n{quoted}\n") == ([(2, path, label)], "")


def test_lines_are_counted_as_an_editor_does(text: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        rows, _ = read(text, f"# head{end}a.jpg 0{end}{end}  # more{end}b.jpg 1")
        assert rows == [(2, "a.jpg", "0"), (5, "b.jpg", "1")]


@pytest.mark.parametrize("line", ['"a.jpg 0', '"a"b.jpg 0', '"" 0', '"a.jpg"', '"a.jpg"0', '"' * 101])
def test_quotes_that_do_not_enclose_the_path_are_named(text: Path, line: str) -> None:
    rows, faults = read(text, f"a.jpg 0\n{line}\n")
    assert rows == [(1, "a.jpg", "0")]
    assert faults.startswith("line 2: quotes that do not enclose the path: '\"")
    assert faults.endswith('expected `"path" label`')


@pytest.mark.parametrize("line", ["a.jpg", "0", "a.jpg,0", '0"', 'a.jpg"0"', "x" * 10_000_000])
def test_a_line_without_a_label_is_told_in_short(text: Path, line: str) -> None:
    rows, faults = read(text, f"{line}\nb.jpg 0\n")
    assert rows == [(2, "b.jpg", "0")]
    assert faults.startswith(f"line 1: no label: '{line[:100]}")
    assert faults.endswith("expected `path label` in each line, or CSV with a header like `path,label`")
    assert len(faults) < 250


def test_spaces_without_end_do_not_take_long(text: Path) -> None:
    for line in (f'a.jpg{" " * 10**6}"', f'"a{" " * 10**6}', f'"{"a" * 10**6}'):
        assert read(text, line)[0] == []


# --- CSV


@pytest.mark.parametrize(
    "header", ["a.jpg,0", "path", "name,label", "path,name", "path label", '"path,label', "id|label", "label;target"]
)
def test_a_csv_header_without_both_columns_is_refused_with_what_it_has(tmp_path: Path, header: str) -> None:
    path = tmp_path / "train.CSV"
    with pytest.raises(
        DataError,
        match=r"train.CSV, line 1: the header is '.*'; expected a column for the path \(path, image, .*\) and",
    ):
        read(path, f"{header}\nb.jpg,1\n")


def test_bad_cells_are_faults_of_their_line(tmp_path: Path) -> None:
    content = 'label,path\n0,a.jpg\n0,b, c.jpg\n0\n ,d.jpg\n1,\n\n1,"two\nlines.jpg"\n1,e.jpg\n'
    rows, faults = read(tmp_path / "train.csv", content)
    assert rows == [(2, "a.jpg", "0"), (8, "two\nlines.jpg", "1"), (10, "e.jpg", "1")]
    assert faults == (
        "line 3: 3 cells, the header has 2; line 4: 1 cells, the header has 2; line 5: no label; line 6: no path; "
        "a cell that has a ',' needs quotes"
    )


@pytest.mark.parametrize("row", ['"b.jpg,1', '"b"x.jpg,1', "x" * 200_000 + ",1"])
def test_what_csv_cannot_read_is_one_fault(tmp_path: Path, row: str) -> None:
    rows, faults = read(tmp_path / "train.csv", f"path,label\na.jpg,0\n{row}\nc.jpg,1\n")
    assert rows == [(2, "a.jpg", "0")]
    assert faults.startswith("line 3: no CSV from here on (")
    assert len(faults) < 120


# --- files that are no text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a.jpg 0\n".encode("utf-16"), "list.txt is UTF-16 text; save it as UTF-8"),
        ("a.jpg 0\n".encode("utf-16-le"), "list.txt, line 1: a zero byte; expected UTF-8 text: `path label`"),
        (b"a.jpg 0\nb.jpg 1\0\n", "list.txt, line 2: a zero byte"),
        (b"a.jpg 0\n\n\xe9t\xe9.jpg 1\n", "list.txt, line 3: byte 0xe9 is no UTF-8; save the file as UTF-8"),
        (b"\x1f\x8b\x08\xff", "list.txt, line 1: byte 0x8b is no UTF-8"),
    ],
)
def test_what_is_no_utf8_text_is_named_with_its_line(text: Path, content: bytes, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(text, content)
    assert str(caught.value).startswith(f"--train-list {text.parent}/{words}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "no.txt", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(DataError, match=rf"^--train-list {path} cannot be read: {words}"):
            read_rows(path, flag="--train-list", faults=Faults())


def test_a_list_may_come_out_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"\xef\xbb\xbfpath,label\na.jpg,0\n",))
    writer.start()
    _, rows = read_rows(pipe, flag="--train-list", faults=Faults())
    assert list(rows) == [(2, "a.jpg", "0")]
    writer.join()
