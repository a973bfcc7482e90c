"""Runs that are broken on purpose: whole jobs of real processes, which leave none behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Job, free_port, job_env, new_job, none_left

__all__ = ["free_port", "job_env", "new_job"]  # fixtures, which pytest finds here


@pytest.fixture
def job(tmp_path: Path, job_env: dict[str, str]) -> Iterator[Job]:
    """Give one job; that a process of it is left when the test ends is a failure."""
    with none_left(Job(tmp_path / "job", job_env)) as made:
        yield made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the lines that tests have to show: `record_property("shown", lines)`, which comes from any process of pytest."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    for report in reports:
        for lines in (value for name, value in report.user_properties if name == "shown"):
            terminalreporter.section(report.nodeid)
            for line in lines:
                terminalreporter.write_line(line)
