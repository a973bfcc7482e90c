"""Runs that are broken on purpose: whole jobs of real processes, which leave none behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.conftest import Job, free_port, job_env, new_job

__all__ = ["free_port", "job_env", "new_job"]  # fixtures, which pytest finds here


@pytest.fixture
def job(tmp_path: Path, job_env: dict[str, str]) -> Iterator[Job]:
    """Give one job; that a process of it is left when the test ends is a failure."""
    made = Job(tmp_path / "job", job_env)
    yield made
    left = made.left()
    made.clean_up()
    assert not left
