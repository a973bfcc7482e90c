"""What the trainer does when it is broken, as whole processes; test names carry the ids of the list, as in ../test_behaviour.py."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.conftest import Job, NewJob, messages, reach, saves_apart
from trainer import checkpoint

JSON = ("--log-format", "json", "--log-every", "1", "--workers", "0")
SMALL = (*JSON, "--limit-train", "64", "--limit-test", "20", "--global-batch-size", "8", "--max-restarts", "0")
ENDLESS = (*SMALL, "--steps", "1000000", "--eval-every", "1000000", "--checkpoint-every", "0")
TWO = ("--nproc-per-node", "2")
ALONE = ("--launcher", "none")

#: A model that does something at its n-th forward in training: named by two variables.
MODEL = """
import os, signal, torch

class Troubled(torch.nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(inputs, classes), 0
        self.trouble, self.at = os.environ["TRAINER_TEST_TROUBLE"], int(os.environ["TRAINER_TEST_AT"])
        self.ours = os.environ.get("RANK", "0") == os.environ.get("TRAINER_TEST_RANK", "0")

    def forward(self, x):
        self.calls += self.training
        logits = self.layer(x.flatten(1))
        if self.training and self.ours and self.calls == self.at:
            if self.trouble == "nan":
                return logits * float("nan")
            if self.trouble == "raise":
                raise KeyError("surprise")
            os.kill(os.getpid(), getattr(signal, self.trouble))
        return logits

def build(config, *, classes, shape):
    return Troubled(shape[0] * shape[1] * shape[2], classes)
"""


def troubled(job: Job, trouble: str, *, at: int, rank: int = 0) -> tuple[str, ...]:
    """Have the job's model meet a trouble at step `at` on one rank, and return the options for it."""
    (job.folder / "troubled.py").write_text(MODEL)
    job.env |= {"TRAINER_TEST_TROUBLE": trouble, "TRAINER_TEST_AT": str(at), "TRAINER_TEST_RANK": str(rank)}
    return ("--model", "troubled:build", "--lr", "0.01")


def digest(folder: Path) -> dict[str, tuple[str, int]]:
    """Return a digest and the time of change of every file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
    }


@pytest.mark.parametrize("as_pid_1", [False, True], ids=["", "as PID 1"])
def test_a01_sigterm_to_the_entrypoint(as_pid_1: bool, job: Job) -> None:
    if as_pid_1:
        process = start_as_pid_1(job, *ENDLESS, *TWO)
        reach(process, 3)
        (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGTERM)
    else:
        process = job.start(*ENDLESS, *TWO)
        reach(process, 3)
        process.send_signal(signal.SIGTERM)
    ended = job.outcome(process)
    assert (ended.code, ended.err) == (143, "")
    (step,) = job.saved_steps()
    assert step >= 3
    checkpoint.verify(checkpoint.find(ended.run / "checkpoints")[0])
    assert not job.left()


def start_as_pid_1(job: Job, *args: str) -> subprocess.Popen[str]:
    """Start the trainer as the first process of a process namespace of its own, as in a container without an init."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "trainer", "train", *args]
    process = subprocess.Popen(
        [*command, "--run-name", "job"], cwd=job.folder, env=job.env, stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    job.started.append(process)
    return process


def test_a02_full_disk(job: Job) -> None:
    """The first checkpoint fits, then a limit on the size of files stands for a full disk."""
    options = (*ENDLESS, *ALONE, "--checkpoint-every", "2", "--keep", "9")
    process = job.start(*options)
    reach(process, 5)
    before = digest(job.folder / "runs" / "job" / "checkpoints" / "step-00000002")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    ended = job.outcome(process)
    assert ended.code == 1
    *warnings, last = saves_apart(messages(ended.err))
    assert len(warnings) >= 3  # of --max-failed-saves; the last is also why it ends
    assert all("cannot save checkpoint" in line and "MB are free there" in line for line in (*warnings, last))
    assert str(Path("runs", "job", "checkpoints")) in last
    assert digest(ended.run / "checkpoints" / "step-00000002") == before
    assert not list(ended.run.rglob(".tmp-*"))


@pytest.mark.parametrize(("signalled", "at"), [(6, 7), (8, 8)], ids=["step 7", "epoch end"])
def test_a03_stop_and_resume(signalled: int, at: int, new_job: NewJob) -> None:
    """A signal in a step is agreed on in the next one, or at once where an evaluation is due."""
    fixed = (*SMALL, *ALONE, "--steps", "24")
    whole = new_job("whole")
    unbroken = whole.run(*fixed, *troubled(whole, "none", at=0))
    assert unbroken.code == 0, unbroken.err
    job = new_job("parts")
    first = job.run(*fixed, *troubled(job, "SIGTERM", at=signalled))
    assert (first.code, job.saved_steps()) == (143, [at])
    second = job.run(*fixed, *troubled(job, "none", at=0))
    assert second.code == 0, second.err
    assert second.received == unbroken.received
    rates = {line["step"]: line["learning_rate"] for line in unbroken.lines()}
    assert {line["step"]: line["learning_rate"] for line in second.lines()} == {
        step: rates[step] for step in range(at + 1, 25)
    }


Case = Callable[[Job], tuple[str, ...]]
CODES: dict[str, tuple[int, Case]] = {
    "finished": (0, lambda job: (*ALONE, "--steps", "2")),
    "an exception in the user's code": (1, lambda job: (*ALONE, *troubled(job, "raise", at=2))),
    "a wrong setting": (2, lambda job: (*ALONE, "--lr", "-1")),
    "no data": (3, lambda job: (*ALONE, "--dataset", "mnist", "--data-dir", str(job.folder))),
    "diverged": (4, lambda job: (*TWO, *troubled(job, "nan", at=2, rank=1))),
    "SIGINT": (130, lambda job: (*TWO, *troubled(job, "SIGINT", at=2, rank=1))),
    "SIGTERM": (143, lambda job: (*TWO, *troubled(job, "SIGTERM", at=2))),
    "SIGKILL of a rank": (137, lambda job: (*TWO, *troubled(job, "SIGKILL", at=2, rank=1))),
    "SIGABRT of a rank": (134, lambda job: (*TWO, *troubled(job, "SIGABRT", at=2))),
    "SIGSEGV of a rank": (139, lambda job: (*TWO, *troubled(job, "SIGSEGV", at=2, rank=1))),
    "no peer": (170, lambda job: ("--nnodes", "2", "--node-rank", "0", *LONELY)),
}
LONELY = ("--master-addr", "127.0.0.1", "--rendezvous-seconds", "2", "--nproc-per-node", "1")


@pytest.mark.parametrize("kind", CODES)
def test_a07_each_kind_of_end_has_its_code(kind: str, job: Job, free_port: int) -> None:
    """Code 5, of a run that makes no progress: test_starts.py. 170 of a hang and of a held folder: test_hangs.py, ../train."""
    code, options = CODES[kind]
    more = ("--master-port", str(free_port)) if code == 170 else ()
    ended = job.run(*ENDLESS, *options(job), *more)
    assert (ended.code if ended.code >= 0 else 128 - ended.code) == code, ended.err
    assert "Traceback" not in ended.err or code == 1
    assert not job.left()


UID = 54321


#: Another user, who may read everything, since the interpreter may be in root's home, but write nothing that is not theirs.
AS_STRANGER = (
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search", "--bounding-set=-all,+dac_read_search",
)  # fmt: skip


@pytest.fixture
def nobodys(job: Job) -> Job:
    """Give a job without HOME or a folder for drawn data, in a folder that only root may write."""
    del job.env["HOME"]
    del job.env["TRAINER_CACHE_DIR"]
    return job


def start_as_stranger(job: Job, *args: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*AS_STRANGER, sys.executable, "-m", "trainer", "train", *args], cwd=job.folder, env=job.env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    job.started.append(process)
    return process


def test_a12_a_user_without_home_or_name_trains_and_resumes(nobodys: Job) -> None:
    runs = nobodys.folder / "writable"
    runs.mkdir()
    shutil.chown(runs, UID, UID)
    options = (*SMALL, *TWO, "--steps", "4", "--runs-dir", str(runs), "--run-name", "r")
    ended = nobodys.outcome(start_as_stranger(nobodys, *options))
    assert ended.code == 0, ended.err
    assert (runs / "r" / "summary.json").stat().st_uid == UID
    assert not list(nobodys.folder.rglob("~"))


def test_a12_a_folder_that_is_roots_is_2_with_path_and_uid(nobodys: Job) -> None:
    process = start_as_stranger(nobodys, *SMALL, *TWO, "--steps", "4", "--run-name", "r")
    _, err = process.communicate(timeout=15)
    assert process.returncode == 2
    (line,) = messages(err)
    assert "the run folder runs/r cannot be written" in line
    assert f"uid {UID}" in line
    assert not (nobodys.folder / "~").exists()


def test_a17_divergence_ends_all_ranks_before_a_bad_state_is_saved(job: Job) -> None:
    options = troubled(job, "nan", at=6, rank=1)
    ended = job.run(*ENDLESS, *TWO, *options, "--checkpoint-every", "1", "--keep", "100")
    assert ended.code == 4
    (line,) = saves_apart(messages(ended.err))
    assert line.startswith("the loss is not finite at step 6")
    assert 1 <= len(job.saved_steps()) <= job.saved_steps()[-1] <= 5
    for path in checkpoint.find(ended.run / "checkpoints"):
        loaded = checkpoint.parse(checkpoint.read(path))
        assert all(tensor.isfinite().all() for tensor in (*loaded.model.values(), *loaded.optimizer.values()))


def test_a17_a_learning_rate_of_1e30(job: Job) -> None:
    ended = job.run(*SMALL, *TWO, "--steps", "40", "--checkpoint-every", "1", "--lr", "1e30")
    assert ended.code == 4
    assert all("not finite at step" in line for line in messages(ended.err)[:1])
    for path in checkpoint.find(ended.run / "checkpoints"):
        checkpoint.verify(path)


def test_a22_the_highest_number_counts_and_a_finished_run_stays_as_it_is(job: Job) -> None:
    fixed = (*SMALL, *ALONE, "--steps", "100001", "--eval-every", "1000000", "--checkpoint-every", "0", "--keep", "9")
    assert job.run(*fixed, *troubled(job, "SIGTERM", at=8)).code == 143
    folder = job.folder / "runs" / "job" / "checkpoints"
    loaded = checkpoint.parse(checkpoint.read(folder / "step-00000009"))
    for step in (10, 99_999, 100_000):
        checkpoint.save(folder, step=step, model=loaded.model, optimizer=loaded.optimizer, state=loaded.state)
    for age, path in enumerate(reversed(checkpoint.find(folder))):
        os.utime(path, (2e9 - age, 2e9 - age))  # the oldest by number is the newest by time
    for junk in ("step-", "step-x", "step-00200000-copy", "lost+found"):
        (folder / junk).mkdir()
    (folder / "step-00300000").write_text("no folder")
    ended = job.run(*fixed, *troubled(job, "none", at=0))
    assert ended.code == 0, ended.err
    assert "resumed at step 100000" in messages(ended.out)
    assert ended.summary["steps"] == 100_001

    before = digest(ended.run)
    again = job.run(*fixed, *troubled(job, "none", at=0))
    assert again.code == 0
    assert any("is finished: nothing to do" in line for line in messages(again.out))
    assert digest(ended.run) == before
