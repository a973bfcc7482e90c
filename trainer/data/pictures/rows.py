"""Read the rows of a list of pictures, which is text (`path label`) or CSV with a header.

What a label means, and whether the files are there, is for `lists.py` to say.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.codes import DataError
from trainer.data.pictures.wording import Faults, shown, some

#: A column of the first name that the header has.
PATH_COLUMNS = ("path", "image", "file", "filename", "image_path")
LABEL_COLUMNS = ("label", "class", "target", "category")
DELIMITERS = ",;\t"

FORM = "`path label` in each line, or CSV with a header like `path,label`"

#: line number, path, label
Row = tuple[int, str, str]

_BLANK = " \t"
_QUOTED = re.compile(r'"((?:[^"]++|"")++)"[ \t]++(.+)')


def read_text(path: Path, *, flag: str) -> io.TextIOWrapper:
    """Read a whole file and return its lines, each ended by one newline.

    The file is read once, so that it may be a pipe.

    Raises:
        DataError: it cannot be read, or is no UTF-8 text; the line names `flag`, the file and the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{flag} {path} cannot be read: {error.strerror}") from None
    where = f"{flag} {path}"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where} is UTF-16 text; save it as UTF-8")
    if (place := content.find(b"\0")) >= 0:
        raise DataError(f"{where}, line {_line(content, place)}: a zero byte; expected UTF-8 text: {FORM}")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line, byte = _line(content, error.start), content[error.start]
        raise DataError(f"{where}, line {line}: byte 0x{byte:02x} is no UTF-8; save the file as UTF-8") from None
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig")


def _line(content: bytes, place: int) -> int:
    return content.count(b"\n", 0, place) + 1


def read_rows(path: Path, *, flag: str, faults: Faults) -> tuple[str, Iterator[Row]]:
    """Open a list and return what it is, in words, and its rows.

    A row that has no path or no label is not returned, but added to `faults`.

    Raises:
        DataError: the file cannot be read, or a CSV file has no header that names both columns.
    """
    lines = read_text(path, flag=flag)
    first = next((line for line in lines if line.strip()), "")
    lines.seek(0)
    for delimiter in DELIMITERS:
        header = _cells(first, delimiter)
        path_column, label_column = _column(header, PATH_COLUMNS), _column(header, LABEL_COLUMNS)
        if path_column >= 0 and label_column >= 0:
            kind = f"CSV, columns {shown(header[path_column])} and {shown(header[label_column])}"
            return kind, _csv_rows(lines, delimiter, (path_column, label_column), faults)
    if path.suffix.lower() == ".csv" and first:
        raise DataError(
            f"{flag} {path}, line 1: the header is {some(_cells(first, ','))}; expected a column for the path "
            f"({', '.join(PATH_COLUMNS)}) and one for the label ({', '.join(LABEL_COLUMNS)})"
        )
    return "text", _text_rows(lines, faults)


def _cells(line: str, delimiter: str) -> list[str]:
    """Split a header; what csv cannot read is no header, but one cell."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return [line]


def _column(header: Sequence[str], names: Sequence[str]) -> int:
    """Return the place of the first of `names` that the header has, or -1."""
    cells = [cell.lower() for cell in header]
    return next((cells.index(name) for name in names if name in cells), -1)


def _csv_rows(lines: io.TextIOWrapper, delimiter: str, columns: tuple[int, int], faults: Faults) -> Iterator[Row]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    path_column, label_column = columns
    width = 0
    line = 1
    try:
        for cells in reader:
            if any(map(str.strip, cells)):
                if width == 0:
                    width = len(cells)  # the header
                elif len(cells) != width:
                    words = f"{len(cells)} cells, the header has {width}"
                    faults.add(line, words, remedy=f"a cell that has a {delimiter!r} needs quotes")
                elif cells[path_column] and (label := cells[label_column].strip()):
                    yield line, _clean(cells[path_column]), label
                else:
                    faults.add(line, f"no {'label' if cells[path_column] else 'path'}")
            line = reader.line_num + 1
    except csv.Error as error:
        faults.add(line, f"no CSV from here on ({error})")


def _text_rows(lines: io.TextIOWrapper, faults: Faults) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        line = line.strip(" \t\n")
        if not line or line[0] == "#":
            continue
        path, label = _split(line)
        if path and label:
            yield number, _clean(path), label
        elif line[0] == '"':
            faults.add(number, f"quotes that do not enclose the path: {shown(line)}", remedy='expected `"path" label`')
        else:
            faults.add(number, f"no label: {shown(line)}", remedy=f"expected {FORM}")


def _split(line: str) -> tuple[str, str]:
    """Split a line into path and label: at the last tab, else at the last space; quotes may enclose either of them."""
    if line[0] == '"':
        match = _QUOTED.fullmatch(line)
        path, label = (match[1].replace('""', '"'), match[2]) if match else ("", "")
    elif line[-1] == '"':
        start = line.rfind('"', 0, -1)
        path, label = (line[:start], line[start:]) if start > 0 and line[start - 1] in _BLANK else ("", "")
    else:
        path, _, label = line.rpartition("\t" if "\t" in line else " ")
    if label[:1] == '"' == label[-1:]:
        label = label[1:-1]
    return (path if line[0] == '"' else path.rstrip(_BLANK)), label.strip(_BLANK)


def _clean(path: str) -> str:
    """Drop what does not change the file: ./ and doubled slashes. What .. means, a link may change: it stays."""
    if "./" not in path and "//" not in path:
        return path
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return "/" * path.startswith("/") + "/".join(parts)
