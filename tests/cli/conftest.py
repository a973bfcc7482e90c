"""The command line in this process: its own environment, its own working folder, what it prints and its exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from trainer import log
from trainer.cli import main


@dataclass(frozen=True)
class Said:
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str

    def row(self, flag: str) -> tuple[str, str]:
        """Return value and source of one setting, from `trainer config`."""
        line = next(line for line in self.out.splitlines() if line.split()[0] == flag)
        value, source = line.removeprefix(flag).strip().split("  ", 1)
        return value, source.strip()


class Say(Protocol):
    """Run one command line."""

    def __call__(self, *args: str, env: Mapping[str, str] | None = None) -> Said: ...


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Give a function that runs `trainer ARGS` in an empty folder; the environment is put back at the end."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    logger = log.LOGGER.handlers[:], log.LOGGER.level, log.LOGGER.propagate

    def run(*args: str, env: Mapping[str, str] | None = None) -> Said:
        os.environ.clear()
        os.environ.update(before | {"COLUMNS": "80"} | dict(env or {}))
        capfd.readouterr()
        code = main(args)
        return Said(code, *capfd.readouterr())

    yield run
    os.environ.clear()
    os.environ.update(before)
    log.LOGGER.handlers[:], log.LOGGER.level, log.LOGGER.propagate = logger
