"""What the trainer does with odd input and odd environments, as whole processes; test names carry the ids of the list.

Faults (signals, full disks, killed ranks) are in faults/; what a unit test can show is beside its module.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Run, Start

TINY = ("--limit-train", "64", "--limit-test", "20", "--global-batch-size", "8", "--log-every", "1", "--run-name", "r")
TWO = ("--nproc-per-node", "2")
ALONE = ("--launcher", "none")
JSON = ("--log-format", "json")

#: Models of a user's own. Files, not stdout, tell of what happens in a rank.
USER_MODELS = """
import os
import pathlib
import signal
import torch

def plain(config, *, classes, shape):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1] * shape[2], classes))

def tells_environment(config, *, classes, shape):
    names = ("NCCL_DEBUG", "OMP_NUM_THREADS", "WORLD_SIZE")
    pathlib.Path("rank-" + os.environ["RANK"]).write_text(" ".join(os.environ.get(name, "-") for name in names))
    return plain(config, classes=classes, shape=shape)

class Dies(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)

def dies_after_step_3(config, *, classes, shape):
    return Dies(plain(config, classes=classes, shape=shape))

class Crashes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        mine = "-".join(["value", "of", "a", "local"])
        raise KeyError("no such thing", len(mine), len(os.environ["DATABASE_PASSWORD"]))

def crashes(config, *, classes, shape):
    return Crashes()

def exits(config, *, classes, shape):
    raise SystemExit(0)
"""


@pytest.fixture
def user_models(tmp_path: Path) -> None:
    """Lay the user's models into the working folder."""
    (tmp_path / "mine.py").write_text(USER_MODELS)


def summary(folder: Path, name: str = "r") -> dict[str, Any]:
    """Return a run's receipt."""
    return json.loads((folder / "runs" / name / "summary.json").read_text())  # type: ignore[no-any-return]


def trace(folder: Path) -> dict[int, list[list[int]]]:
    """Return rows (step, sample, CRC32) by rank."""
    files = {int(path.stem.removeprefix("rank-")): path for path in folder.iterdir()}
    return {
        rank: [[int(cell) for cell in line.split(",")] for line in path.read_text().splitlines()]
        for rank, path in sorted(files.items())
    }


def steps_of(out: str) -> list[dict[str, Any]]:
    """Return the JSON lines that tell of a step's loss."""
    return [line for line in map(json.loads, out.splitlines()) if "learning_rate" in line]


def assert_refused(ended: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Assert the exit code, and that a line of the errors has all of the words, without any traceback."""
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if " error " in line]
    assert any(all(word in line for word in words) for line in lines), ended.stderr


@pytest.fixture
def busy_port() -> Iterator[int]:
    """Give a port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a04_every_test_sample_counts_once_with_1_2_and_3_ranks(run_trainer: Run, tmp_path: Path) -> None:
    assert run_trainer("train", *TINY, *ALONE, "--steps", "2", "--limit-test", "7").returncode == 0
    alone = summary(tmp_path)["evaluation"]
    assert alone["samples"] == 7
    for ranks in (2, 3):
        ended = run_trainer("eval", "runs/r", *JSON, "--nproc-per-node", str(ranks), "--eval-batch-size", "2")
        assert ended.returncode == 0, ended.stderr
        line = next(line for line in map(json.loads, ended.stdout.splitlines()) if "eval_samples" in line)
        assert line["eval_samples"] == 7
        assert line["eval_accuracy"] == alone["accuracy"]
        assert line["eval_loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_a06_order_and_ranks(run_trainer: Run, tmp_path: Path) -> None:
    """2 epochs of 64 samples in batches of 8: steps 0 to 7 are the first, 8 to 15 the second."""
    for name, options in {"two": TWO, "again": ALONE}.items():
        ended = run_trainer("train", *TINY, "--epochs", "2", *options, "--run-name", name, "--trace", name)
        assert ended.returncode == 0, ended.stderr
    ranks = trace(tmp_path / "two")
    assert list(ranks) == [0, 1]
    epochs = []
    for first in (0, 8):
        parts = [[row for row in rows if first <= row[0] < first + 8] for rows in ranks.values()]
        assert sorted(row[1] for part in parts for row in part) == list(range(64)), "each once: the ranks are disjoint"
        epochs.append([row[1] for part in parts for row in part])
    assert epochs[0] != epochs[1]
    received = sorted(row for rows in ranks.values() for row in rows)
    assert received == sorted(trace(tmp_path / "again")[0]), "the same seed repeats order and augmentation"
    pictures: dict[int, set[int]] = {}
    for _, sample, crc in received:
        pictures.setdefault(sample, set()).add(crc)
    shifted_anew = sum(len(crcs) == 2 for crcs in pictures.values())
    assert shifted_anew > 48, "a sample is augmented anew in each epoch (1 of 25 shifts by chance as before)"


def test_a08_settings_reach_the_ranks_from_every_source(run_trainer: Run, tmp_path: Path, user_models: None) -> None:
    (tmp_path / "first").write_text("TRAINER_LR=0.5\nTRAINER_SEED=5\nNCCL_DEBUG=WARN\nOMP_NUM_THREADS=9\n")
    (tmp_path / "second").write_text("TRAINER_LR=0.25\nTRAINER_DETERMINISTIC=yes\n")
    (tmp_path / ".env").write_text("TRAINER_STEPS=999\n")
    ended = run_trainer(
        "train", *TINY, *TWO, "--env-file", "first", "--env-file", "second", "--steps", "2",
        "--model", "mine:tells_environment", env={"TRAINER_SEED": "7", "TRAINER_STEPS": "3"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    saved = json.loads((tmp_path / "runs" / "r" / "config.json").read_text())
    assert saved["steps"] == {"value": 2, "source": "command line"}
    assert saved["seed"] == {"value": 7, "source": "environment variable TRAINER_SEED"}
    assert saved["lr"] == {"value": 0.25, "source": "second, line 1, TRAINER_LR"}
    assert saved["deterministic"] == {"value": True, "source": "second, line 2, TRAINER_DETERMINISTIC"}
    assert saved["momentum"] == {"value": 0.9, "source": "default"}
    # Other keys of a file are set for the ranks, and the environment's OMP_NUM_THREADS=1 wins over the file's.
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["WARN 1 2"] * 2


def test_a08_env_file_that_is_missing_is_told_before_anything_starts(run_trainer: Run, tmp_path: Path) -> None:
    ended = run_trainer("train", *TINY, "--env-file", "none.env")
    assert_refused(ended, 2, "none.env", "No such file")
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a09_rank_1_may_come_long_before_rank_0(start_trainer: Start, tmp_path: Path, free_port: int) -> None:
    address = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port))
    first = start_trainer("train", *TINY, *address, "--node-rank", "1", "--steps", "2")
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(timeout=8)
    second = start_trainer("train", *TINY, *address, "--node-rank", "0", "--steps", "2")
    for process in (second, first):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert summary(tmp_path)["topology"]["ranks"] == 2


def test_a09_unknown_host_is_named_when_the_limit_is_over(run_trainer: Run) -> None:
    address = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "no-such-host.invalid")
    ended = run_trainer("train", *TINY, *address, "--rendezvous-seconds", "3", timeout=60)
    assert_refused(ended, 170, "'no-such-host.invalid'", "does not resolve", "3 s", "--rendezvous-seconds")


def test_a09_ipv6_address_in_brackets_is_accepted(run_trainer: Run, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        ended = run_trainer("launch", "--master-addr", "[::1]")  # without IPv6 there is nothing to connect to
        assert "::1, any free port" in ended.stdout
        return
    ended = run_trainer("train", *TINY, *TWO, "--master-addr", "[::1]", "--steps", "2")
    assert ended.returncode == 0, ended.stderr
    assert summary(tmp_path)["topology"]["ranks"] == 2


def test_a10_no_sample_is_3(run_trainer: Run) -> None:
    assert_refused(run_trainer("train", *TINY, "--limit-train", "0"), 3, "glyphs", "--limit-train is 0")


@pytest.mark.parametrize("samples", [1, 7, 9], ids=["1 = world-1", "B-1", "B+1"])
def test_a10_few_samples_give_all_ranks_equal_steps(samples: int, run_trainer: Run, tmp_path: Path) -> None:
    ended = run_trainer("train", *TINY, *TWO, "--limit-train", str(samples), "--epochs", "2", "--trace", "trace")
    assert ended.returncode == 0, ended.stderr
    steps = math.ceil(2 * samples / 8)
    ranks = trace(tmp_path / "trace")
    assert [len(rows) for rows in ranks.values()] == [steps * 4] * 2
    assert {row[0] for row in ranks[0]} == {row[0] for row in ranks[1]} == set(range(steps))
    counts = [sum(row[1] == sample for rows in ranks.values() for row in rows) for sample in range(samples)]
    assert max(counts) - min(counts) <= 1, "the stream goes through all samples before it repeats one"


def test_a10_fewer_samples_per_step_than_ranks_is_2(run_trainer: Run) -> None:
    ended = run_trainer("train", *TINY, *TWO, "--global-batch-size", "1")
    assert_refused(ended, 2, "--global-batch-size is 1", "2 ranks")


@pytest.mark.parametrize("options", [(), ALONE], ids=["agent", "in place"])
@pytest.mark.parametrize(
    "asked", [("--device", "cuda"), ("--backend", "nccl", "--strategy", "ddp")], ids=["cuda", "nccl"]
)
def test_a11_no_gpu_is_told_with_the_builds_and_the_drivers_facts(
    asked: tuple[str, ...], options: tuple[str, ...], run_trainer: Run
) -> None:
    ended = run_trainer("train", *TINY, *asked, *options, env={"CUDA_VISIBLE_DEVICES": ""})
    assert_refused(ended, 2, asked[0], asked[1], "torch 2.", "NVIDIA driver")


def test_a11_auto_logs_choice_and_reason(run_trainer: Run, tmp_path: Path) -> None:
    ended = run_trainer("train", *TINY, *ALONE, "--steps", "1", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"single, cpu \(no GPU is visible: no NVIDIA driver\)", ended.stdout)
    assert summary(tmp_path)["topology"]["device"] == "cpu"


FAKE_NVML = """
class NVMLError(Exception): ...
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlDeviceGetCount(): return 6
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetName(handle): return "Paper GPU"
def nvmlSystemGetDriverVersion(): return "999.1"
"""


def test_a11_more_processes_than_devices(run_trainer: Run, tmp_path: Path) -> None:
    """As many as CUDA_VISIBLE_DEVICES shows; six physical GPUs are made of paper."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pynvml.py").write_text(FAKE_NVML)
    env = {"CUDA_VISIBLE_DEVICES": "1,2,3,4", "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{ROOT}"}
    assert "ranks       4 on this node" in run_trainer("launch", env=env).stdout
    for processes in (2, 4):
        ended = run_trainer("launch", "--nproc-per-node", str(processes), env=env)
        assert ended.returncode == 0
        assert f"ranks       {processes} on this node" in ended.stdout
        assert "devices     GPU-1, GPU-2, GPU-3, GPU-4" in ended.stdout
    for command in (("launch",), ("train", *TINY)):
        ended = run_trainer(*command, "--nproc-per-node", "5", env=env)
        assert_refused(
            ended, 2, "5 processes", "4 visible devices", "CUDA_VISIBLE_DEVICES=1,2,3,4", "--nproc-per-node 4"
        )
    assert not (tmp_path / "runs").exists()


def test_a19_quotes_and_unknown_variables_are_one_warning_each_for_all_ranks(run_trainer: Run, tmp_path: Path) -> None:
    env = {"TRAINER_STEPS": '"2"', "TRAINER_NORM": "'group'", "TRAINER_CHANNELS_LAST": '"on"', "TRAINER_STEP": "9"}
    ended = run_trainer("train", *TINY, *TWO, env=env)
    assert ended.returncode == 0, ended.stderr
    saved = json.loads((tmp_path / "runs" / "r" / "config.json").read_text())
    assert [saved[name]["value"] for name in ("steps", "norm", "channels_last")] == [2, "group", True]
    warnings = ended.stderr.splitlines()
    assert len(warnings) == 4, ended.stderr
    for name in env:
        assert sum(f"{name} " in line or f"{name}:" in line for line in warnings) == 1


def test_a20_boolean_that_is_none(run_trainer: Run, tmp_path: Path) -> None:
    ended = run_trainer("train", *TINY, env={"TRAINER_DETERMINISTIC": "maybe"})
    assert_refused(ended, 2, "TRAINER_DETERMINISTIC", "'maybe'", "true or false")
    assert not (tmp_path / "runs").exists()


def test_a23_two_runs_of_one_node_at_once(start_trainer: Start, tmp_path: Path) -> None:
    runs = [start_trainer("train", *TINY, *TWO, "--steps", "3", "--run-name", name) for name in ("a", "b")]
    for process in runs:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert [summary(tmp_path, name)["steps"] for name in ("a", "b")] == [3, 3]


def test_a23_busy_port_that_was_asked_for(run_trainer: Run, busy_port: int) -> None:
    ended = run_trainer("train", *TINY, *TWO, "--master-port", str(busy_port), timeout=60)
    assert_refused(ended, 2, f"port {busy_port}", "in use", "--master-port")
    assert ended.stderr.count("\n") == 1, "seen before any rank was started"


def on_one_cpu() -> None:
    """Allow the process that is about to start one CPU."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_a24_threads_and_workers_follow_the_allowed_cpus(start_trainer: Start, tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": ""}
    shown = start_trainer("launch", env=env, preexec_fn=on_one_cpu)
    assert "1 per rank, of 1 usable CPU" in shown.communicate(timeout=60)[0]
    options = ("--steps", "1", "--workers", "0", "--log-format", "json")
    process = start_trainer("train", *TINY, *options, env=env, preexec_fn=on_one_cpu)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "1 thread per rank" in out
    assert summary(tmp_path)["steps"] == 1


def test_a24_threads_that_the_user_sets_are_kept(run_trainer: Run, tmp_path: Path, user_models: None) -> None:
    env = {"OMP_NUM_THREADS": "3"}
    assert "3 per rank, of " in run_trainer("launch", env=env).stdout
    ended = run_trainer("train", *TINY, "--steps", "1", "--model", "mine:tells_environment", env=env)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "rank-0").read_text() == "- 3 1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*TWO, "--global-batch-size", "3"), ("--global-batch-size is 3", "ranks are 2")),
        ((*ALONE, "--device-batch-size", "1"), ("--global-batch-size is 8", "--device-batch-size is 1")),
    ],
    ids=["a rank's part", "a micro-batch"],
)
def test_a25_batchnorm_and_one_sample_is_refused_with_the_numbers(
    options: tuple[str, ...], words: tuple[str, ...], run_trainer: Run
) -> None:
    assert_refused(run_trainer("train", *TINY, *options), 2, "BatchNorm", *words)


def test_a25_sync_batchnorm_without_a_gpu(run_trainer: Run) -> None:
    assert_refused(run_trainer("train", *TINY, *ALONE, "--sync-batchnorm"), 2, "--sync-batchnorm", "GPU")


def test_a25_evaluation_is_complete_when_its_last_batch_has_one_sample(run_trainer: Run, tmp_path: Path) -> None:
    ended = run_trainer("train", *TINY, *ALONE, "--steps", "1", "--limit-test", "5", "--eval-batch-size", "4")
    assert ended.returncode == 0, ended.stderr
    assert summary(tmp_path)["evaluation"]["samples"] == 5


def test_a26_micro_batches_change_nothing_but_memory(run_trainer: Run, tmp_path: Path) -> None:
    """11 samples per step over 2 ranks are 6 and 5, in micro-batches of at most 4."""
    fixed = (*TINY, *JSON, "--steps", "4", "--global-batch-size", "11", "--norm", "group", "--clip-norm", "0.5")
    ways = {"whole": ALONE, "micro": (*ALONE, "--device-batch-size", "4"), "both": (*TWO, "--device-batch-size", "4")}
    rates, losses = {}, {}
    for name, options in ways.items():
        ended = run_trainer("train", *fixed, *options, "--run-name", name)
        assert ended.returncode == 0, ended.stderr
        lines = steps_of(ended.stdout)
        rates[name] = [line["learning_rate"] for line in lines]
        losses[name] = [line["loss"] for line in lines]
    assert rates["whole"] == rates["micro"] == rates["both"]
    assert len(rates["whole"]) == 4
    for name in ("micro", "both"):
        assert losses[name] == pytest.approx(losses["whole"], rel=1e-6)


def test_a27_pod_of_a_pytorchjob_starts_nodes_times_processes(run_trainer: Run, tmp_path: Path, free_port: int) -> None:
    """What the operator sets in the master's pod, with nprocPerNode 2 and no workers."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    env = {f"PET_{name}": value for name, value in address.items()} | address
    env |= {"RANK": "0", "PET_NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "2"}
    ended = run_trainer("train", *TINY, "--steps", "2", env=env)
    assert ended.returncode == 0, ended.stderr
    assert "PET_NPROC_PER_NODE" in ended.stdout
    assert summary(tmp_path)["topology"]["ranks"] == 2
    assert summary(tmp_path)["topology"]["launcher"] == "agent"


def test_a27_legacy_argument_before_the_command(run_trainer: Run, tmp_path: Path) -> None:
    """Both spellings, before and after: cli/test_options.py."""
    ended = run_trainer("--local-rank=0", "train", *TINY, "--steps", "1", env={"RANK": "0", "WORLD_SIZE": "1"})
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 of 1, local rank 0" in ended.stdout
    assert summary(tmp_path)["topology"]["launcher"] == "env"


def test_a27_half_set_variables_are_2_with_the_list(run_trainer: Run, tmp_path: Path) -> None:
    ended = run_trainer("train", *TINY, env={"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m"})
    assert_refused(ended, 2, "PET_NODE_RANK=1", "PET_MASTER_ADDR=m", "PET_NNODES")
    assert not (tmp_path / "runs").exists()


def test_a28_lines_of_the_steps_before_a_kill_are_there_once(run_trainer: Run, user_models: None) -> None:
    ended = run_trainer("train", *TINY, *TWO, "--model", "mine:dies_after_step_3", "--max-restarts", "0")
    assert ended.returncode == 137
    assert re.findall(r" step (\d+)/", ended.stdout) == ["1", "2", "3"]
    assert "killed by SIGKILL" in ended.stderr


def test_a28_crash_names_the_rank_and_shows_no_secret(run_trainer: Run, user_models: None) -> None:
    env = {"DATABASE_PASSWORD": "of-the-environment"}
    ended = run_trainer("train", *TINY, *TWO, "--model", "mine:crashes", "--max-restarts", "0", env=env)
    assert ended.returncode == 1
    assert "KeyError" in ended.stderr
    assert "in forward" in ended.stderr, "where it happened"
    errors = [line for line in ended.stderr.splitlines() if "unexpected" in line]
    assert errors
    assert all(re.search(r"\[rank [01]\]", line) for line in errors)
    for secret in ("of-the-environment", "value-of-a-local"):
        assert secret not in ended.stdout + ended.stderr


def test_user_code_that_exits_is_no_success(run_trainer: Run, user_models: None) -> None:
    ended = run_trainer("train", *TINY, "--model", "mine:exits")
    assert ended.returncode == 1
    assert "SystemExit: 0" in ended.stderr


def test_closed_streams_stop_nothing(start_trainer: Start, tmp_path: Path) -> None:
    closed = start_trainer("train", *TINY, *TWO, "--steps", "2", preexec_fn=lambda: os.closerange(0, 3))
    assert closed.wait(timeout=120) == 0
    assert summary(tmp_path)["steps"] == 2


def test_reader_that_goes_stops_nothing(start_trainer: Start, tmp_path: Path) -> None:
    """As in `trainer train | head -1`."""
    process = start_trainer("train", *TINY, "--steps", "3")
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert summary(tmp_path)["steps"] == 3


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--runs-dir", "file"), 2, ("file/r", "--runs-dir")),
        (("--runs-dir", "/proc/x"), 2, ("/proc/x/r", "--runs-dir")),
        (("--trace", "file"), 2, ("--trace", "file")),
        (("--resume", "nonsense"), 3, ("nonsense", "no checkpoint")),
        (("--model", "nosuch"), 2, ("--model is 'nosuch'", "resnet18")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_nonsense_is_refused_in_one_line(
    options: tuple[str, ...], code: int, words: tuple[str, ...], run_trainer: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(run_trainer("train", *TINY, *ALONE, "--steps", "1", *options), code, *words)


def test_run_folder_that_cannot_be_used_ends_all_ranks_alike(run_trainer: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run_trainer("train", *TINY, *TWO, "--runs-dir", "file")
    assert_refused(ended, 2, "file/r", f"uid {os.getuid()}")
    assert ended.stderr.count(" error ") == 1, "said once"
    assert signal.SIGTERM.name not in ended.stderr
