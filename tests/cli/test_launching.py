"""How ranks are started: what in the working folder they must not take for us, and what all of them must agree on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SMALL = ("--steps", "2", "--limit-train", "32", "--limit-test", "8", "--global-batch-size", "8", "--run-name", "job")

DATA = """
import os
import numpy as np

def uneven(split, config):
    count = 40 + (int(os.environ.get("RANK", "0")) if split == "SPLIT" else 0)
    return np.zeros((count, 8, 8), np.uint8), np.arange(count) % 4
"""


def test_a_file_in_the_working_folder_is_not_run_in_our_place(tmp_path, trainer_env):
    (tmp_path / "trainer.py").write_text("print('not the trainer')")
    command = [sys.executable, "-P", "-m", "trainer", "train", *SMALL]
    result = subprocess.run(
        command, cwd=tmp_path, env=trainer_env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "runs" / "job" / "summary.json").read_text())["steps"] == 2


@pytest.mark.parametrize("split", ["train", "test"])
def test_data_that_differ_between_ranks_end_all_of_them_before_the_first_step(run_trainer, tmp_path, split):
    (tmp_path / "mine.py").write_text(DATA.replace("SPLIT", split))
    result = run_trainer(
        "train", "--dataset", "mine:uneven", "--steps", "2", "--global-batch-size", "8", "--nproc-per-node", "2"
    )
    assert result.returncode == 3
    assert "rank 1: the data differ between ranks: here 4" in result.stderr
    assert "Traceback" not in result.stderr
