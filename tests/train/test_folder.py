"""A run's folder and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from trainer.codes import CheckpointError, PeerLost, SettingError, Stopped
from trainer.config import build
from trainer.group import alone
from trainer.train import folder as folders


def test_a_new_run_has_a_dated_name_and_two_in_one_second_do_not_mix(tmp_path):
    config = build({"runs_dir": tmp_path, "dataset": "pkg.mod:make"})
    first, second = folders.open_folder(config, sources={}), folders.open_folder(config, sources={})
    assert first != second
    assert first.name.endswith("-pkg.mod-make-cnn")
    assert folders.read_json(first / "config.json")["lr"] == {"value": 0.2, "source": "default"}


def test_a_named_run_is_reopened_with_the_same_experiment_and_new_operation_settings(tmp_path):
    settings = {"runs_dir": tmp_path, "run_name": "a"}
    run = folders.open_folder(build(settings), sources={})
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert folders.open_folder(build(settings | {"workers": 3}), sources={"workers": "command line"}) == run
    assert folders.read_json(run / "config.json")["workers"] == {"value": 3, "source": "command line"}


def test_another_experiment_is_refused_by_name_with_both_values(tmp_path):
    settings = {"runs_dir": tmp_path, "run_name": "a"}
    run = folders.open_folder(build(settings), sources={})
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(SettingError, match=r"--lr is 0\.5, but .* was made with 0\.2"):
        folders.open_folder(build(settings | {"lr": 0.5}), sources={})
    assert folders.read_json(run / "config.json")["lr"]["value"] == 0.2


def test_resume_never_does_not_touch_a_run_that_has_checkpoints(tmp_path):
    settings = {"runs_dir": tmp_path, "run_name": "a", "resume": "never"}
    run = folders.open_folder(build(settings), sources={})
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(SettingError, match="--resume is never, but .* has checkpoints"):
        folders.open_folder(build(settings), sources={})


def test_a_folder_that_cannot_be_written_is_named_with_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"file/a cannot be written \(Not a directory, as uid \d+\)"):
        folders.open_folder(build({"runs_dir": tmp_path / "file", "run_name": "a"}), sources={})


def test_a_finished_run_is_left_as_it_is(tmp_path):
    settings = {"runs_dir": tmp_path, "run_name": "a"}
    run = folders.open_folder(build(settings), sources={})
    folders.write_summary(run, {"steps": 1})
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert folders.open_folder(build(settings | {"workers": 3}), sources={}) == run
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_all_differences_are_told_at_once(tmp_path):
    settings = {"runs_dir": tmp_path, "run_name": "a"}
    (folders.open_folder(build(settings), sources={}) / "checkpoints").mkdir()
    with pytest.raises(
        SettingError, match=r"--seed is 3, but .* made with 0; --steps is 9, but .* made with \(unset\)"
    ):
        folders.open_folder(build(settings | {"seed": 3, "steps": 9}), sources={})


def test_a_config_of_another_shape_is_one_line(tmp_path):
    settings = {"runs_dir": tmp_path, "run_name": "a"}
    run = folders.open_folder(build(settings), sources={})
    (run / "checkpoints").mkdir()
    (run / "config.json").write_text('{"seed": 0}')
    with pytest.raises(CheckpointError, match=r"config\.json is not what a run writes there"):
        folders.open_folder(build(settings), sources={})


def test_a_summary_means_finished(tmp_path):
    run = folders.open_folder(build({"runs_dir": tmp_path}), sources={})
    assert not folders.is_finished(run)
    folders.write_summary(run, {"steps": 1})
    assert folders.is_finished(run)
    assert [path.name for path in run.iterdir() if path.name.startswith(".tmp")] == []


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_a_damaged_json_file_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        folders.read_json(path)


HOLDER = """
import sys, time
from pathlib import Path
from trainer.checkpoint import hold
with hold(Path(sys.argv[1]), wait_seconds=0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_run_holds_is_not_opened(tmp_path, monkeypatch):
    config = build({"runs_dir": tmp_path, "run_name": "held", "grace": 0.0})
    monkeypatch.setattr(folders, "_MORE_THAN_GRACE", 0.3)
    opened = folders.opened(config, sources={}, group=alone(torch.device("cpu")))
    (tmp_path / "held").mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "held")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PeerLost, match=f"is held by process {other.pid}"), opened:
            pass
        other.kill()
    assert not (tmp_path / "held" / "config.json").exists()
    with folders.opened(config, sources={}, group=alone(torch.device("cpu"))) as folder:
        assert folder.stat().st_mode & 0o070 == 0o070
        assert (folder / "config.json").exists()


def test_a_stop_ends_the_wait_for_a_folder_that_is_held(tmp_path):
    config = build({"runs_dir": tmp_path, "run_name": "held"})
    (tmp_path / "held").mkdir()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "held")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        opened = folders.opened(config, sources={}, group=alone(torch.device("cpu")), stop=lambda: signal.SIGTERM)
        with pytest.raises(Stopped), opened:
            pass
        other.kill()


def test_a_run_whose_folder_was_removed_while_it_ran_is_opened_again(tmp_path):
    settings = {"runs_dir": tmp_path, "run_name": "a"}
    run = folders.open_folder(build(settings), sources={})
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)  # by a save after that
    (run / "config.json").unlink()
    assert folders.open_folder(build(settings | {"workers": 3}), sources={}) == run
    assert (run / "config.json").exists()
