"""The defaults learn: whole runs, judged by accuracy and step count, never by time."""

from __future__ import annotations

import json

import pytest

#: Both defaults use every CPU that the tests may use; their results do not depend on it within the bounds below.
THREADS = {"OMP_NUM_THREADS": ""}


def summary(folder):
    return json.loads((folder / "runs" / "job" / "summary.json").read_text())


def test_the_default_run_reads_glyphs(run_trainer, tmp_path):
    result = run_trainer("train", "--run-name", "job", env=THREADS)
    assert result.returncode == 0, result.stderr
    found = summary(tmp_path)
    assert (found["steps"], found["samples"]) == (938, 938 * 256)  # ceil(4 x 60,000 / 256)
    assert found["evaluation"]["samples"] == 10_000
    assert found["evaluation"]["accuracy"] >= 0.98
    assert "test accuracy" in result.stdout


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_final_weights_read_99_of_100_mnist_digits(run_trainer, tmp_path, test_data, seed):
    options = ("--dataset", "mnist", "--data-dir", test_data / "mnist", "--seed", str(seed))
    result = run_trainer("train", "--run-name", "job", *options, env=THREADS)
    assert result.returncode == 0, result.stderr
    found = summary(tmp_path)
    assert (found["steps"], found["evaluation"]["samples"]) == (938, 10_000)
    assert found["evaluation"]["accuracy"] >= 0.99
    # The weights on disk are the ones that were scored.
    again = run_trainer("eval", "runs/job", "--data-dir", test_data / "mnist", "--log-format", "json", env=THREADS)
    assert again.returncode == 0, again.stderr
    scores = [json.loads(line) for line in again.stdout.splitlines() if '"eval_accuracy"' in line]
    assert [score["eval_accuracy"] for score in scores] == [found["evaluation"]["accuracy"]]
