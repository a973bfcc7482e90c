"""Whole jobs of real processes: how they are started by each launcher, and what they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch

TIMEOUT_SECONDS = 200
PATIENCE_SECONDS = 100


@dataclass(frozen=True)
class Outcome:
    """What one job left: the highest exit code of its commands, what they printed, its run folder."""

    code: int
    out: str
    err: str
    run: Path
    trace: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The run's receipt."""
        return json.loads((self.run / "summary.json").read_text())

    @property
    def received(self) -> str:
        """Digest of what the model received: every (step, sample, CRC32), in sorted order."""
        lines = sorted(line for path in self.trace.iterdir() for line in path.read_text().splitlines())
        return f"{len(lines)} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"

    def lines(self) -> list[dict[str, Any]]:
        """The JSON log lines of stdout that tell of a step's loss."""
        records = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        return [record for record in records if "learning_rate" in record]

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """The model's and the optimizer's tensors of the checkpoint at `step`."""
        folder = self.run / "checkpoints" / f"step-{step:08d}"
        files = {name: safetensors.torch.load_file(folder / f"{name}.safetensors") for name in ("model", "optimizer")}
        return {f"{name}/{key}": value for name, tensors in files.items() for key, value in tensors.items()}


class Job:
    """Start commands in one folder, as one job that shares a run folder; its processes are found wherever they are in the tree."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        mark = ("TRAINER_TEST_MARK", uuid.uuid4().hex)
        self.folder, self.env, self.mark = folder, env | dict([mark]), "=".join(mark).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, *args: str, prefix: Sequence[str] = ("-m", "trainer"), env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start one command: `python PREFIX train ARGS` in the job's folder."""
        fixed = ["train", "--run-name", "job", "--trace", "trace"]
        process = subprocess.Popen(
            [sys.executable, *prefix, *fixed, *args],
            cwd=self.folder,
            env=self.env | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def outcome(self, *processes: subprocess.Popen[str]) -> Outcome:
        """Wait for the commands and collect what they left."""
        texts = [process.communicate(timeout=TIMEOUT_SECONDS) for process in processes]
        out, err = ("".join(text[side] for text in texts) for side in (0, 1))
        code = max(process.returncode for process in processes)
        return Outcome(code, out, err, self.folder / "runs" / "job", self.folder / "trace")

    def run(self, *args: str, prefix: Sequence[str] = ("-m", "trainer"), env: dict[str, str] | None = None) -> Outcome:
        """Run one command to its end."""
        return self.outcome(self.start(*args, prefix=prefix, env=env))

    def processes(self) -> dict[int, str]:
        """Return the command lines of the job's processes that still run, by process id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended while we looked
        return found

    def left(self) -> list[str]:
        """Return the command lines of the job's processes that still run."""
        return list(self.processes().values())

    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, oldest first."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("runs/job/checkpoints/step-*"))

    def clean_up(self) -> None:
        """Kill what is left of every command's process group."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


J = TypeVar("J", bound=Job)


@pytest.fixture(scope="session")
def job_env(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a job's processes."""
    kept = ("PATH", "LANG", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "CUDA_VISIBLE_DEVICES")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    home = tmp_path_factory.mktemp("home")
    root = Path(__file__).resolve().parent.parent.parent
    return env | {
        "HOME": str(home),
        "PYTHONPATH": str(root),
        "TRAINER_CACHE_DIR": str(cache_dir),
        "OMP_NUM_THREADS": "1",
        "TRAINER_METRICS_PORT": "0",  # tests run side by side, and one port is one run's
    }


@contextlib.contextmanager
def none_left(job: J) -> Iterator[J]:
    """Give a job; that a process of it is left at the end is a failure."""
    yield job
    left = job.left()
    job.clean_up()
    assert not left


@pytest.fixture
def new_job(tmp_path: Path, job_env: dict[str, str]):
    """Give a function that makes a job in a folder of its own; what its commands left running is killed at the end."""
    jobs: list[Job] = []

    def make(name: str = "job") -> Job:
        jobs.append(Job(tmp_path / name, job_env))
        return jobs[-1]

    yield make
    for job in jobs:
        job.clean_up()


NewJob = Callable[..., Job]


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_pid(agent: int, rank: int) -> int:
    """Return the process id of one rank under an agent."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    for pid in map(int, children):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"agent {agent} has no rank {rank} among {children}")


def wait_until(fulfilled: Callable[[], object], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Look again and again until it is so; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not fulfilled():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def reach(process: subprocess.Popen[str], step: int) -> None:
    """Read the JSON lines of rank 0 until a step is done; the job logs every step."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and "learning_rate" in line and json.loads(line)["step"] >= step:
            return
    raise AssertionError(f"the run ended before step {step}: {process.stderr and process.stderr.read()}")


def messages(text: str) -> list[str]:
    """Return the messages of a log in JSON; there must be no other line."""
    return [json.loads(line)["message"] for line in text.splitlines()]


def saves_apart(lines: Sequence[str]) -> list[str]:
    """Leave out the messages of steps that are not saved because a save is under way: steps are fast in tests."""
    return [line for line in lines if not re.fullmatch(r"step \d+ is not saved: .*", line)]
