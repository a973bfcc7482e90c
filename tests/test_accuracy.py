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


def test_a_small_network_learns_flowers_from_scratch(run_trainer, tmp_path, test_data):
    data = ("--dataset", "folder", "--data-dir", test_data / "flowers_160", "--image-size", "64", "--min-crop", "0.3")
    more = ("--epochs", "10", "--global-batch-size", "32", "--lr", "0.05", "--eval-every", "1000")
    result = run_trainer("train", "--run-name", "job", *data, *more, env=THREADS)
    assert result.returncode == 0, result.stderr
    found = summary(tmp_path)
    assert (found["steps"], found["evaluation"]["samples"]) == (157, 125)  # ceil(10 x 500 / 32)
    assert found["evaluation"]["accuracy"] >= 0.35  # chance is 0.2
    assert f"test accuracy  {100 * found['evaluation']['accuracy']:.2f} % of 125 samples" in result.stdout


@pytest.mark.parametrize(("dataset", "model"), [("folder", "resnet18"), ("list", "efficientnet_b0")])
def test_torchvision_models_train_on_ants_and_bees(dataset, model, run_trainer, tmp_path, test_data):
    lists = {"--train-list": "hymenoptera_train.txt", "--test-list": "hymenoptera_val.txt"}
    options = [part for flag, name in lists.items() for part in (flag, test_data / "lists" / name)]
    options = ["--data-dir", test_data / "hymenoptera_256", *(options if dataset == "list" else [])]
    more = ("--image-size", "64", "--steps", "8", "--global-batch-size", "32", "--optimizer", "adamw", "--lr", "0.001")
    result = run_trainer(
        "train", "--run-name", "job", "--dataset", dataset, *options, "--model", model, *more, env=THREADS
    )
    assert (result.returncode, result.stderr) == (0, "")
    found = summary(tmp_path)
    assert (found["steps"], found["evaluation"]["samples"]) == (8, 153)
    state = json.loads((tmp_path / "runs/job/checkpoints/step-00000008/state.json").read_text())
    assert state["classes"] == 2
    if dataset == "folder":
        assert state["names"] == ["ants", "bees"]
    again = run_trainer(
        "eval", "runs/job", "--log-format", "json", env=THREADS
    )  # where the data are is in the checkpoint
    scores = [json.loads(line) for line in again.stdout.splitlines() if '"eval_accuracy"' in line]
    assert [score["eval_accuracy"] for score in scores] == [found["evaluation"]["accuracy"]]
