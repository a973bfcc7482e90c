"""The lines of the pages that take a launcher are lines of the table, and so are run as they stand."""

from __future__ import annotations

from tests.docs.pages import CASES, LAUNCHER_BLOCKS
from tests.launchers.rows import ROWS


def test_lines_of_the_page_are_lines_of_the_table():
    table = {row.line.format(node=node, port="") for row in ROWS for node in range(row.typed)}
    lines = {command for block in LAUNCHER_BLOCKS for command, _ in block.commands}
    assert lines
    assert lines <= table
    assert [shown for block in LAUNCHER_BLOCKS for _, shown in block.commands if shown] == []


def test_no_line_of_the_page_is_left_to_both_suites():
    for block in LAUNCHER_BLOCKS:
        assert [command for command, _ in block.commands if not CASES[command].by_launchers] == []
