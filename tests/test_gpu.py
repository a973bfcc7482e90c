"""What only a GPU can show; `make test-gpu` runs it. Drawn and random data alone, so that it runs on any machine."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

pytestmark = pytest.mark.gpu

SMALL = (
    "--limit-train",
    "5000",
    "--limit-test",
    "1000",
    "--run-name",
    "job",
    "--log-format",
    "json",
    "--log-every",
    "1",
)


def summary(folder):
    return json.loads((folder / "runs" / "job" / "summary.json").read_text())


def losses(result):
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {record["step"]: record["loss"] for record in records if "learning_rate" in record}


def trained(result, tmp_path, *, steps):
    assert result.returncode == 0, result.stderr
    assert sorted(losses(result)) == list(range(1, steps + 1))
    assert losses(result)[steps] < 0.8 * losses(result)[1]
    found = summary(tmp_path)
    assert (found["evaluation"]["samples"], found["topology"]["device"]) == (1000, "cuda")
    return found


def test_one_rank_over_nccl(run_trainer, tmp_path):
    result = run_trainer("train", *SMALL, "--steps", "60", "--strategy", "ddp", "--nproc-per-node", "1")
    assert trained(result, tmp_path, steps=60)["topology"]["backend"] == "nccl"


def test_a_single_device_without_a_group(run_trainer, tmp_path):
    result = run_trainer("train", *SMALL, "--steps", "60", "--nproc-per-node", "1")
    assert trained(result, tmp_path, steps=60)["topology"]["strategy"] == "single"


def test_data_parallel(run_trainer, tmp_path):
    result = run_trainer("train", *SMALL, "--steps", "60", "--strategy", "dp")
    assert trained(result, tmp_path, steps=60)["topology"]["strategy"] == "dp"


def test_bf16_with_channels_last_and_loader_processes(run_trainer, tmp_path):
    options = ("--precision", "bf16", "--channels-last", "--workers", "2", "--steps", "60", "--nproc-per-node", "1")
    trained(run_trainer("train", *SMALL, *options), tmp_path, steps=60)


def test_compile(run_trainer, tmp_path):
    options = ("--compile", "--steps", "60", "--nproc-per-node", "1")
    trained(run_trainer("train", *SMALL, *options, timeout=280), tmp_path, steps=60)


def test_torchvision_model_on_random_data(run_trainer, tmp_path):
    options = ("--dataset", "random", "--model", "resnet18", "--steps", "5", "--nproc-per-node", "1", "--lr", "0.01")
    result = run_trainer("train", *SMALL, *options)
    assert result.returncode == 0, result.stderr
    assert summary(tmp_path)["steps"] == 5


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_goes_on_where_it_was(run_trainer, tmp_path, optimizer):
    lr = "0.1" if optimizer == "sgd" else "0.002"
    options = (
        "--steps",
        "20",
        "--optimizer",
        optimizer,
        "--lr",
        lr,
        "--deterministic",
        "--nproc-per-node",
        "1",
        "--checkpoint-every",
        "10",
    )
    whole = run_trainer("train", *SMALL, *options, "--runs-dir", "whole")
    assert whole.returncode == 0, whole.stderr
    # The unbroken run's half-way checkpoint, resumed in another run folder.
    half = tmp_path / "whole" / "job" / "checkpoints" / "step-00000010"
    rest = run_trainer("train", *SMALL, *options, "--resume", str(half))
    assert rest.returncode == 0, rest.stderr
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 10}
    folders = [tmp_path / runs / "job" / "checkpoints" / "step-00000020" for runs in ("whole", "runs")]
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (safetensors.torch.load_file(folder / name) for folder in folders)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name


def test_a_loss_that_is_not_finite_ends_with_4_and_saves_nothing(run_trainer, tmp_path):
    result = run_trainer(
        "train", *SMALL, "--steps", "60", "--lr", "1e30", "--nproc-per-node", "1", "--checkpoint-every", "50"
    )
    assert result.returncode == 4, result.stderr
    assert not list((tmp_path / "runs" / "job").glob("checkpoints/step-*"))


@pytest.mark.gpu(count=2)
def test_two_ranks_over_nccl_see_what_one_sees(run_trainer, tmp_path):
    options = ("--steps", "20", "--norm", "group", "--global-batch-size", "29", "--lr", "0.02")
    found = {}
    for ranks in ("1", "2"):
        result = run_trainer("train", *SMALL, *options, "--nproc-per-node", ranks, "--runs-dir", f"ranks-{ranks}")
        assert result.returncode == 0, result.stderr
        found[ranks] = losses(result)[20]
    assert found["2"] == pytest.approx(found["1"], rel=1e-3)
