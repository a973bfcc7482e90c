"""Picture files in whole jobs: what a bad one does, whoever reads it, and what ends all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainer import codes

COUNTS = {"train": 13, "val": 4}  # pictures per class
RANKS_AND_WORKERS = [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0), (3, 2)]
STEPS = 9  # of 7 samples: more than two epochs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Class folders of noise around two gray levels; three training files and one test file are cut or no pictures."""
    root = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for split, count in COUNTS.items():
        for label, name in enumerate(("dark", "light")):
            place = root / split / name
            place.mkdir(parents=True)
            for number in range(count):
                noise = draw.integers(0, 60, (40, 50, 3), dtype=np.uint8) + np.uint8(150 * label)
                Image.fromarray(noise).save(place / f"{number:02d}.jpg", quality=92)
    for bad in ("train/dark/03.jpg", "val/light/01.jpg"):
        (root / bad).write_bytes((root / bad).read_bytes()[:700])
    (root / "train/dark/04.jpg").write_bytes(b"")
    (root / "train/light/12.jpg").write_text("<html>gone</html>")
    return root


def options(folder: Path, *more: str) -> tuple[str, ...]:
    fixed = ("--dataset", "folder", "--data-dir", str(folder), "--image-size", "24", "--norm", "group", "--lr", "0.02")
    return (*fixed, "--global-batch-size", "7", "--steps", str(STEPS), *more)


SKIP = ("--bad-samples", "skip", "--max-bad-samples", "0.25")


@pytest.fixture(scope="module")
def skipped(folder, tmp_path_factory, job_env):
    """Give a function that runs the job that skips with so many ranks and workers, once each."""
    from tests.distributed.conftest import Job

    outcomes = {}

    def run(ranks: int, workers: int):
        if (ranks, workers) not in outcomes:
            job = Job(tmp_path_factory.mktemp("job"), job_env)
            more = (*SKIP, "--nproc-per-node", str(ranks), "--workers", str(workers))
            outcomes[ranks, workers] = job.run(*options(folder, *more))
            job.clean_up()
        return outcomes[ranks, workers]

    return run


@pytest.mark.parametrize(("ranks", "workers"), RANKS_AND_WORKERS)
def test_what_stands_in_for_a_bad_file_is_the_same_for_all_ranks_and_workers(ranks, workers, skipped):
    reference, outcome = skipped(1, 0), skipped(ranks, workers)
    assert outcome.code == 0, outcome.err
    assert outcome.received == reference.received
    assert outcome.received.startswith(f"{7 * STEPS} ")
    assert outcome.summary["skipped"] == reference.summary["skipped"] > 6  # 3 files in more than two epochs
    assert (outcome.summary["evaluation"]["samples"], outcome.summary["evaluation"]["skipped"]) == (7, 1)
    assert outcome.summary["final_loss"] == pytest.approx(reference.summary["final_loss"], rel=1e-4)
    for name in ("dark/03.jpg", "dark/04.jpg", "light/12.jpg", "val/light/01.jpg"):
        told = sum(f"{name}' cannot be read" in line for line in outcome.err.splitlines())
        assert 1 <= told <= ranks


def test_a_bad_file_ends_all_ranks_and_is_named(folder, new_job):
    outcome = new_job().run(*options(folder, "--nproc-per-node", "2", "--workers", "2"))
    assert outcome.code == codes.DATA
    named = [line for line in outcome.err.splitlines() if "cannot be read" in line and "/train/" in line]
    assert named, outcome.err  # by each rank that met one in the same step
    assert "Traceback" not in outcome.err
    assert not list(outcome.run.glob("checkpoints/step-*"))


def test_more_bad_files_than_allowed_end_all_ranks(folder, new_job):
    more = ("--nproc-per-node", "2", "--bad-samples", "skip", "--max-bad-samples", "0.05")
    outcome = new_job().run(*options(folder, *more))
    assert outcome.code == codes.DATA
    assert "2 of 26 training samples cannot be read, and --max-bad-samples is 0.05" in outcome.err


def test_a_run_that_a_bad_file_ended_goes_on_by_skipping(folder, new_job, skipped):
    job = new_job()
    first = job.run(*options(folder, "--checkpoint-every", "1", "--nproc-per-node", "2"))
    assert first.code == codes.DATA
    saved = sorted(path.name for path in first.run.glob("checkpoints/step-*"))
    shutil.rmtree(job.folder / "trace")
    second = job.run(*options(folder, *SKIP, "--nproc-per-node", "2"))
    assert second.code == 0, second.err
    assert second.summary["steps"] == STEPS
    if saved:
        assert f"resumed at step {int(saved[-1][5:])}" in second.out
    assert second.summary["skipped"] == skipped(2, 0).summary["skipped"]


def test_other_files_are_not_resumed_on(folder, new_job, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    job = new_job()
    stopped = job.run(*options(copy, *SKIP, "--steps", "2"))
    assert stopped.code == 0
    for name, there, message in (
        ("added", "train/dark/99.jpg", "the data of --dataset folder are not those"),
        ("moved", None, "resumed at step 2"),
    ):
        data = shutil.copytree(folder, tmp_path / name)
        if there:
            shutil.copy(data / "train/dark/00.jpg", data / there)
        more = ("--resume", str(stopped.run), "--run-name", name, "--steps", "2")
        outcome = new_job(name).run(*options(data, *SKIP, *more))
        assert outcome.code == (codes.SETTING if there else 0)
        assert message in outcome.out + outcome.err
