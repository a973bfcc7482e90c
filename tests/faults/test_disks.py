"""Disks that are full, small, read-only or gone: what is lost (nothing that was saved), what is said, and how the run ends."""

from __future__ import annotations

import hashlib
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import Job, messages, reach, wait_until
from trainer import checkpoint

FIXED = (
    "--log-format", "json", "--log-every", "1", "--workers", "0", "--limit-train", "64", "--limit-test", "20",
    "--global-batch-size", "8", "--nproc-per-node", "2", "--eval-every", "1000000", "--max-restarts", "0", "--keep", "2",
    "--model", "slow:build", "--lr", "0.01", "--checkpoint-every", "5",
)  # fmt: skip

#: Steps slow enough for a save between two that are due; a checkpoint has 1.2 MB.
SLOW = """
import time
import torch

class Slow(torch.nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, classes)
        self.register_buffer("ballast", torch.zeros(300_000))

    def forward(self, x):
        time.sleep(0.04 if self.training else 0)
        return self.layer(x.flatten(1))

def build(config, *, classes, shape):
    return Slow(shape[0] * shape[1] * shape[2], classes)
"""


@pytest.fixture
def slow(job: Job) -> Job:
    (job.folder / "slow.py").write_text(SLOW)
    return job


def check_lines(err: str) -> None:
    """Check that each line tells of a save that failed, or of the end of rank 0 for that; they come from several processes."""
    told_by = (
        r"(rank 0 ended: )?cannot save checkpoint runs/job/checkpoints/step-\d+: .*|rank 0 ended first, with code 1 .*"
    )
    assert [line for line in messages(err) if not re.fullmatch(told_by, line)] == []


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def limit_files(job: Job, process: subprocess.Popen[str], size: int) -> None:
    """Let no process of the run write a file beyond `size` bytes: what a full disk does, without one."""
    for pid in job.processes():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


NO_ROOM = (
    r"cannot save checkpoint runs/job/checkpoints/step-\d+: File too large; [\d.]+ MB are free there; make room, .*"
)


def test_space_that_comes_back_saves_the_run(slow: Job) -> None:
    process = slow.start(*FIXED, "--steps", "80", "--max-failed-saves", "100")
    reach(process, 12)
    wait_until(lambda: 10 in slow.saved_steps())
    limit_files(slow, process, 500_000)
    before = digests(slow.folder / "runs/job/checkpoints/step-00000010")
    reach(process, 32)
    assert 10 in slow.saved_steps()
    assert digests(slow.folder / "runs/job/checkpoints/step-00000010") == before
    limit_files(slow, process, resource.RLIM_INFINITY)
    ended = slow.outcome(process)
    assert ended.code == 0, ended.err
    assert len(messages(ended.err)) >= 2
    assert all(re.fullmatch(NO_ROOM, line) for line in messages(ended.err))
    assert slow.saved_steps()[-1] == 80
    assert not list(ended.run.rglob(".tmp-*"))


def test_the_last_save_fails_and_the_next_start_goes_on(slow: Job) -> None:
    process = slow.start(*FIXED, "--steps", "14", "--max-failed-saves", "100")
    wait_until(lambda: 10 in slow.saved_steps())
    limit_files(slow, process, 500_000)
    ended = slow.outcome(process)
    assert ended.code == 1
    failed = NO_ROOM.replace(r"step-\d+", "step-00000014")
    assert any(re.fullmatch(failed, line) for line in messages(ended.err)), ended.err
    check_lines(ended.err)
    assert slow.saved_steps()[-1] == 10
    again = slow.run(*FIXED, "--steps", "14")
    assert again.code == 0, again.err
    assert "resumed at step 10" in messages(again.out)


def test_a_stop_whose_save_fails_ends_with_1_and_not_as_a_good_stop(slow: Job) -> None:
    process = slow.start(*FIXED, "--steps", "1000000", "--max-failed-saves", "100")
    wait_until(lambda: 10 in slow.saved_steps())
    limit_files(slow, process, 500_000)
    process.send_signal(signal.SIGTERM)
    ended = slow.outcome(process)
    assert ended.code == 1
    check_lines(ended.err)
    failed = [int(step) for step in re.findall(r"step-(\d+): File too large", ended.err)]
    assert failed
    assert max(failed) > slow.saved_steps()[-1] >= 10
    checkpoint.verify(checkpoint.find(ended.run / "checkpoints")[0])
    assert not list(ended.run.rglob(".tmp-*"))


def in_namespace(job: Job, script: str, *args: str) -> subprocess.Popen[str]:
    """Run a shell script in a mount namespace of its own, where "$@" is the trainer; what it mounts goes with it."""
    trainer = [sys.executable, "-m", "trainer", "train", "--run-name", "job", *FIXED, *args]
    process = subprocess.Popen(
        ["unshare", "--mount", "bash", "-euc", script, "run", *trainer], cwd=job.folder, env=job.env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    job.started.append(process)
    return process


def test_a_small_file_system_that_is_full(slow: Job) -> None:
    """Room for two checkpoints of 1.2 MB, not for the third that is written before the oldest goes."""
    (slow.folder / "runs").mkdir()
    copy = 'mount -t tmpfs -o size=3m none runs; code=0; "$@" || code=$?; cp -a runs/job kept; exit $code'
    ended = slow.outcome(in_namespace(slow, copy, "--steps", "60", "--max-failed-saves", "3"))
    assert ended.code == 1
    check_lines(ended.err)
    full = r"cannot save checkpoint runs/job/checkpoints/step-\d+: No space left on device; 0\.\d MB are free there; .*"
    assert (
        sum(re.fullmatch(full, line) is not None for line in messages(ended.err)) == 4
    )  # the third is also why it ends
    saved = checkpoint.find(slow.folder / "kept" / "checkpoints")
    assert [path.name for path in saved] == ["step-00000010", "step-00000005"]
    for path in saved:
        checkpoint.verify(path)
    assert not list((slow.folder / "kept").rglob(".tmp-*"))


UNUSABLE = {
    "read-only": ("mount -t tmpfs -o ro none runs", "Read-only file system"),
    "full": ("mount -t tmpfs -o size=1m none runs; cat /dev/zero > runs/filler || true", "No space left on device"),
    "ulimit -f": ("ulimit -f 2", "File too large"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_folder_that_cannot_be_written_is_found_at_the_start(name: str, slow: Job) -> None:
    (slow.folder / "runs").mkdir()
    spoil, reason = UNUSABLE[name]
    ended = slow.outcome(in_namespace(slow, f'{{ {spoil}; }} 2>/dev/null; exec "$@"', "--steps", "20"))
    assert ended.code == 2, ended.err
    (line,) = messages(ended.err)
    assert line.startswith(f"the run folder runs/job cannot be written ({reason}, as uid 0)")


def test_a_folder_that_turns_read_only_ends_the_run_and_keeps_what_was_saved(slow: Job) -> None:
    (slow.folder / "runs/job/checkpoints").mkdir(parents=True)
    # A file system with a file open for writing does not turn read-only on request, so it is tried until no save is under way.
    turn = """mount -t tmpfs none runs/job/checkpoints
    (while ! { test -d runs/job/checkpoints/step-00000010 && mount -o remount,ro runs/job/checkpoints; }; do sleep 0.05; done) 2>/dev/null &
    code=0; "$@" || code=$?; cp -a runs/job/checkpoints kept; exit $code"""
    ended = slow.outcome(in_namespace(slow, turn, "--steps", "1000", "--max-failed-saves", "2"))
    assert ended.code == 1, ended.err
    check_lines(ended.err)
    assert sum("Read-only file system" in line for line in messages(ended.err)) >= 3
    saved = checkpoint.find(slow.folder / "kept")
    assert len(saved) == 2
    for path in saved:
        checkpoint.verify(path)


@pytest.mark.parametrize("what", ["runs/job", "runs/job/checkpoints"])
def test_a_folder_that_is_removed_during_the_run_is_made_again(what: str, slow: Job) -> None:
    process = slow.start(*FIXED, "--steps", "40")
    wait_until(lambda: 10 in slow.saved_steps())
    gone = slow.folder / "gone"
    (slow.folder / what).rename(gone)
    shutil.rmtree(gone)
    ended = slow.outcome(process)
    assert ended.code == 0, ended.err
    assert slow.saved_steps()[-1] == 40
    again = slow.run(*FIXED, "--steps", "40")
    assert again.code == 0, again.err
    assert again.summary["steps"] == 40
