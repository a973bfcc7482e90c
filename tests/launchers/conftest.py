"""How a line is typed here: in a shell of its own, under a Slurm of our own. Prints the table of what the rows gave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import Outcome, job_env
from tests.docs.test_commands import write_script
from tests.launchers.slurm import find_program, running_slurm

__all__ = ["job_env"]

TIMEOUT_SECONDS = 200

#: How mpirun 4.1.4 ends when a daemon of its crashes at the start, which happens under load.
DAEMON_LOST = 213

#: In the environment of all that is started here, daemons too: so nothing of it can stay behind unseen.
MARK = "TRAINER_TEST_LAUNCHERS"

COLUMNS = ("launcher", "nodes", "ranks", "received", "evaluated", "final loss", "seconds", "typed")

#: For root, and for more ranks than CPUs. node0 and node1 are this machine: daemons that share it would bind their ranks to the
#: same core, and hwloc's shared memory makes those of Open MPI 4.1.4 crash now and then.
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_plm_rsh_agent": "here",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_rtc": "^hwloc",
}
REMOTE_SHELL = '#!/bin/sh\nshift  # the host\nexec sh -c "$*"\n'


def marked(value: str) -> list[int]:
    """Return the processes that carry this mark."""
    wanted, found = f"{MARK}={value}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # ended while we looked
    return found


def end_marked(value: str) -> list[str]:
    """Wait for the processes with this mark to end; kill those that do not and return their commands."""
    deadline = time.monotonic() + 20
    while left := marked(value):
        if time.monotonic() > deadline:
            return [_kill(pid) for pid in left]
        time.sleep(0.05)
    return []


def _kill(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return f"{pid}, which ended late"
    return command


@pytest.fixture(scope="session")
def shell_env(job_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a person's shell: `trainer`, `python` and `torchrun` are those of this Python."""
    tools = tmp_path_factory.mktemp("tools")
    write_script(tools / "trainer", "from trainer.cli import main")
    (tools / "here").write_text(REMOTE_SHELL)
    (tools / "here").chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), job_env["PATH"]])
    return job_env | {"PATH": path, "SHELL": "/bin/sh"}


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """A running Slurm: the variables that its commands need."""
    mark = {MARK: f"slurm-{os.getpid()}"}
    try:
        with running_slurm(mark) as variables:
            yield variables
    finally:
        left = end_marked(mark[MARK])
    assert not left, f"Slurm left running: {left}"


@pytest.fixture
def need(request: pytest.FixtureRequest) -> Callable[[Sequence[str]], dict[str, str]]:
    """Give a function that skips the test where a program is missing, and returns the variables that they need here."""

    def check(programs: Sequence[str]) -> dict[str, str]:
        missing = [name for name in programs if find_program(name) is None]
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}; `make test-launchers`, as root, installs them")
        variables = dict(OPENMPI) if "mpirun" in programs else {}
        return variables | (request.getfixturevalue("slurm") if "srun" in programs else {})

    return check


class Shell:
    """Type lines in one folder; they are one job, with one run folder."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self.env = folder, dict(env) | {MARK: str(folder)}
        self.started: list[tuple[subprocess.Popen[bytes], Path]] = []
        self.lines: list[tuple[str, Mapping[str, str] | None]] = []
        self.batch_env: dict[str, str] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def type(self, line: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a line; what it prints goes to files, which no process that stays behind can hold open."""
        output = self.folder / f"line-{len(self.started)}"
        env = self.env | dict(variables or {})
        if line.startswith("sbatch"):
            self.batch_env = env
        with output.with_suffix(".out").open("wb") as out, output.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                line, shell=True, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        self.started.append((process, output))
        self.lines.append((line, variables))
        return process

    def _code(self, number: int, *, again: int = 2) -> int:
        """Wait for a line's end; type it again where Open MPI's own daemon was lost, before any rank was there."""
        code = self.started[number][0].wait(timeout=TIMEOUT_SECONDS)
        if code != DAEMON_LOST or not again:
            return code
        self.type(*self.lines[number])
        return self._code(len(self.started) - 1, again=again - 1)

    def outcome(self) -> Outcome:
        """Wait for the lines and collect what they left; a batch script's output is in Slurm's file."""
        try:
            codes = [self._code(number) for number in range(len(self.started))]
        except subprocess.TimeoutExpired as error:
            printed = [path.read_text(errors="replace") for path in sorted(self.folder.glob("line-*"))]
            raise AssertionError("\n".join([str(error), *printed])) from error
        if self.batch_env:
            _wait_for_jobs(self.batch_env)
        files = [*self.folder.glob("line-*.out"), *self.folder.glob("slurm-*.out")]
        out = "".join(path.read_text(errors="replace") for path in sorted(files))
        err = "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("line-*.err")))
        return Outcome(max(codes), out, err, self.folder / "runs" / "job", self.folder / "trace")

    def close(self) -> list[str]:
        """Kill what has not ended, see that nothing stays behind, and return what did."""
        for process, _ in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return end_marked(str(self.folder))


def _wait_for_jobs(env: Mapping[str, str]) -> None:
    """Wait until Slurm has no job left. (`sbatch --wait` looks after 2, 10 and 42 s.)"""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while subprocess.run(["squeue", "--noheader"], env=env, capture_output=True, check=True).stdout:
        assert time.monotonic() < deadline, "a batch job does not end"
        time.sleep(0.1)


@pytest.fixture
def shell(tmp_path: Path, shell_env: dict[str, str]) -> Iterator[Shell]:
    """A shell in a folder of its own."""
    opened = Shell(tmp_path / "job", shell_env)
    yield opened
    left = opened.close()
    assert not left, f"left running: {left}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the rows gave, in the order of the table."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = dict(value for report in reports for name, value in getattr(report, "user_properties", []) if name == "row")
    if not rows:
        return
    cells = [COLUMNS, *(rows[number] for number in sorted(rows))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    terminalreporter.section("launchers")
    for row in cells:
        terminalreporter.write_line(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )
