"""What guards a run's folder: one writer at a time, and no restarts for ever; and the list of its checkpoints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from trainer import checkpoint, log
from trainer.codes import CheckpointError, NoProgress, PeerLost

HOLDER = """
import sys, time
from pathlib import Path
from trainer.checkpoint import hold
with hold(Path(sys.argv[1]), wait_seconds=0):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds tmp_path."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_run_is_told_who_holds_the_folder(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with (
        pytest.raises(
            PeerLost, match=rf"is held by process {holder.pid} on host \S+ since 20.*Z; waited 0.3 s"
        ) as caught,
        checkpoint.hold(tmp_path, wait_seconds=0.3),
    ):
        pass
    assert "--run-name" in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_holder_that_ends_while_we_wait_lets_go(holder: subprocess.Popen[str], number: int, tmp_path: Path) -> None:
    holder.send_signal(number)
    with checkpoint.hold(tmp_path, wait_seconds=30):
        holder.wait()
    with checkpoint.hold(tmp_path, wait_seconds=0):
        pass


def test_file_of_the_lock_is_for_the_group(tmp_path: Path) -> None:
    with checkpoint.hold(tmp_path, wait_seconds=0):
        assert (tmp_path / ".lock").stat().st_mode & 0o060 == 0o060


def test_sixth_start_without_a_new_checkpoint_gives_up(tmp_path: Path) -> None:
    assert [checkpoint.count_start(tmp_path, step=0, most=5) for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(
        NoProgress, match=r"5 starts of .* have ended at step 0 without a new checkpoint.*--max-starts is 5"
    ):
        checkpoint.count_start(tmp_path, step=0, most=5)
    assert checkpoint.count_start(tmp_path, step=10, most=5) == 1  # it has moved on


def test_starts_that_were_stopped_do_not_count(tmp_path: Path) -> None:
    for _ in range(12):
        assert checkpoint.count_start(tmp_path, step=0, most=5) == 1
        checkpoint.take_back(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"step": "x", "starts": 1}'])
def test_count_that_cannot_be_read_begins_anew_with_a_warning(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("text")
    (tmp_path / "starts.json").write_text(content)
    assert checkpoint.count_start(tmp_path, step=0, most=5) == 1
    assert re.search(r"warning .*starts.json cannot be read", capsys.readouterr().err)


def save(run: Path, step: int, **state: object) -> Path:
    model = {"weight": torch.full((3,), float(step))}
    return checkpoint.save(run / "checkpoints", step=step, model=model, optimizer={}, state=state)


def test_listing_tells_step_size_validity_and_the_best(tmp_path: Path) -> None:
    for step in (5, 10, 99_999_999, 100_000_000):
        path = save(tmp_path, step, best={"step": 10, "accuracy": 0.9, "loss": 0.3})
    (path / "model.safetensors").write_bytes(b"")
    rows = checkpoint.listing(tmp_path)
    assert [row.step for row in rows] == [100_000_000, 99_999_999, 10, 5]
    assert [row.is_valid for row in rows] == [False, True, True, True]
    assert [row.best for row in rows] == [False, False, True, False]
    assert "model.safetensors" in rows[0].fault
    assert all(row.size > 100 for row in rows)
    with pytest.raises(CheckpointError, match="holds no checkpoints"):
        checkpoint.listing(tmp_path / "other")
