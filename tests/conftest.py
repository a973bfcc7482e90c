"""Fixtures and rules that every test shares: real trainer processes, a clean environment, what a skip means in CI.

Tests of one module live in the file that mirrors it, not here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: What a child process gets from outside; everything else in its environment is said below or by the test.
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "CUDA_VISIBLE_DEVICES", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

#: What a launcher, a scheduler or a user sets; none of it may reach a test.
LAUNCH_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "JOB_COMPLETION_INDEX"}
LAUNCH_PREFIXES = ("MASTER_", "PET_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "OMPI_", "PMI_", "MPI_", "MV2_")


class Run(Protocol):
    """Run the trainer to its end and return what it printed and its exit code."""

    def __call__(
        self, *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]: ...


class Start(Protocol):
    """Start the trainer in a session of its own; what is left of it when the test ends is killed."""

    def __call__(
        self, *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, **options: Any
    ) -> subprocess.Popen[str]: ...


def pytest_configure(config: pytest.Config) -> None:
    """Clean this process's environment, and hide the GPUs from tests that do not ask for one."""
    for name in list(os.environ):
        ours = name.startswith("TRAINER_") and not name.startswith("TRAINER_TEST_")
        if ours or name in LAUNCH_NAMES or name.startswith(LAUNCH_PREFIXES):
            del os.environ[name]
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are; torch is imported only when such a test is about to run."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    count, there = marker.kwargs.get("count", 1), torch.cuda.device_count()
    if there < count:
        pytest.skip(f"needs {count} GPUs, {there} here")


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure: a check that silently did not run is no check."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a skip is a failure in CI ({reason})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, report a skipped test as failed unless it needs a GPU."""
    report = yield
    if _in_ci() and item.get_closest_marker("gpu") is None:
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI, report a module that skips itself as failed."""
    report = yield
    if _in_ci():
        _fail_if_skipped(report)
    return report


def _folder_named_by(variable: str, holds: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: the folder of {holds}")
    return Path(value).resolve(strict=True)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder of the real data sets, which are not in the repository."""
    return _folder_named_by("TRAINER_TEST_DATA", "the test data sets")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache for the whole session, so that the glyphs are drawn once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def trainer_env(tmp_path: Path, cache_dir: Path) -> dict[str, str]:
    """Return the environment of a trainer process: nothing of the caller's but what any process needs."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    ours = {"HOME": tmp_path, "PYTHONPATH": ROOT, "TRAINER_CACHE_DIR": cache_dir, "OMP_NUM_THREADS": 1}
    ours |= {"TRAINER_METRICS_PORT": 0}  # tests run side by side, and one port is one run's
    return env | {name: str(value) for name, value in ours.items()}


@pytest.fixture
def start_trainer(tmp_path: Path, trainer_env: dict[str, str]) -> Iterator[Start]:
    """Give a function that starts `python -m trainer ARGS` in tmp_path; stdout and stderr are pipes of text."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trainer", *map(str, args)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            command, env=trainer_env | dict(env or {}), cwd=cwd or tmp_path, text=True, start_new_session=True,
            **(pipes | options),
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        _end(process)


@pytest.fixture
def run_trainer(start_trainer: Start) -> Run:
    """Give a function that runs `python -m trainer ARGS` in tmp_path to its end, as a real process."""

    def run(
        *args: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        process = start_trainer(*args, env=env, cwd=cwd)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            out, err = process.communicate()
            pytest.fail(f"trainer {args} did not end within {timeout:g} s\n--- stdout\n{out}\n--- stderr\n{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the process and of its session's group, and see it gone."""
    _kill_group(process.pid)
    process.wait(timeout=30)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            pipe.close()
    deadline = time.monotonic() + 30
    while left := _group_members(process.pid):
        assert time.monotonic() < deadline, f"processes {left} of the trainer outlived SIGKILL"
        time.sleep(0.05)


def _kill_group(group: int) -> None:
    if _group_members(group):
        os.killpg(group, signal.SIGKILL)


def _group_members(group: int) -> list[int]:
    """Return the pids in a process group that are not zombies."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        if int(pgrp) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members
