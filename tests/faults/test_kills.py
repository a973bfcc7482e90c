"""A run whose processes are killed without warning, again and again, ends with the unbroken run's weights; see storm.py."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.conftest import Job, NewJob, Outcome
from tests.faults.storm import PHASES, RANKS, Storm, Strike, draw_plans
from trainer import checkpoint

SEED = 20
KEEP = 2

#: The built-in model beside a frozen weight, so that a save takes a part of the time that a kill can meet.
MODEL = """
import dataclasses
import torch
from trainer.models import build_model

class Heavy(torch.nn.Module):
    def __init__(self, cnn):
        super().__init__()
        self.cnn = cnn
        self.ballast = torch.nn.Parameter(torch.randn(8_000_000), requires_grad=False)

    def forward(self, pictures):
        return self.cnn(pictures)

def build(config, *, classes, shape):
    return Heavy(build_model(dataclasses.replace(config, model="cnn"), classes=classes, shape=shape))
"""
OPTIONS = (
    "--model", "heavy:build", "--dropout", "0.1", "--lr", "0.3", "--schedule", "constant", "--global-batch-size", "32",
    "--limit-train", "600", "--limit-test", "400", "--eval-batch-size", "20", "--workers", "1",
    "--checkpoint-every", "6", "--eval-every", "9", "--keep", str(KEEP), "--log-format", "json", "--log-every", "1",
    "--nproc-per-node", str(RANKS), "--max-restarts", "10", "--max-starts", "20",
)  # fmt: skip


@pytest.mark.parametrize("kills", [10, pytest.param(30, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_a_run_that_is_killed_again_and_again_ends_as_the_unbroken_one(
    kills: int, job: Job, new_job: NewJob, record_property: Callable[[str, object], None]
) -> None:
    steps = 15 * kills + 30  # few kills let more than 15 new steps be done
    whole = with_model(new_job("whole")).run(*OPTIONS, "--steps", str(steps))
    assert whole.code == 0, whole.err

    storm = Storm(with_model(job), *OPTIONS, "--steps", str(steps))
    for plan in draw_plans(kills, seed=SEED):
        storm.strike(plan)
    ended = storm.finish()
    record_property("shown", table(storm.strikes))

    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    assert_same(ended, whole, step=steps)
    assert_nothing_left(ended.run)
    size = sum(file.stat().st_size for file in (whole.run / "checkpoints" / f"step-{steps:08d}").iterdir())
    for struck in storm.strikes:
        assert struck.folders <= KEEP + 2, struck
        assert struck.size <= (KEEP + 2) * 1.001 * size, struck  # numbers in state.json differ in length
        assert struck.ended in expected_ends(struck.victim), struck
    assert {struck.phase for struck in storm.strikes} == set(PHASES)
    assert sum(bool(struck.cut) for struck in storm.strikes) >= kills / 6


def with_model(job: Job) -> Job:
    (job.folder / "heavy.py").write_text(MODEL)
    return job


def assert_same(ended: Outcome, whole: Outcome, *, step: int) -> None:
    """Assert that two runs have the same last checkpoint, bit for bit, and say so in their receipts."""
    assert ended.summary["weights_sha256"] == whole.summary["weights_sha256"]
    tensors, wanted = ended.tensors(step), whole.tensors(step)
    assert tensors.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(tensors[name], wanted[name])] == []
    texts = [(run.run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text() for run in (ended, whole)]
    assert json.loads(texts[0]) == json.loads(texts[1])  # with the best evaluation of all


def assert_nothing_left(run: Path) -> None:
    """Assert that a finished run's folder holds good checkpoints, not too many, and nothing temporary."""
    assert [path for path in run.rglob("*") if path.name.startswith(".tmp-") or path.suffix == ".old"] == []
    found = checkpoint.find(run / "checkpoints")
    assert len(found) <= KEEP + 1
    for path in found:
        checkpoint.verify(path)


def expected_ends(victim: str) -> set[str]:
    """Return what may be said of the end of a victim: the first cause, in the agent's words."""
    if victim == "agent":
        return {"the agent ended with 137"}
    if victim == "loaders":
        return {f"rank {rank} ended with 1 (unexpected exception, or the last save failed)" for rank in range(RANKS)}
    return {f"{victim} ended with 137 (killed by SIGKILL)"}


def table(strikes: list[Strike]) -> list[str]:
    """Return the lines that tell of each kill, and the median of the times to a new step."""
    rows = [("kill", "victim", "phase", "save cut off at", "seconds", "what followed")]
    for number, one in enumerate(strikes, start=1):
        seconds = "-" if math.isnan(one.seconds) else f"{one.seconds:.1f}"  # it was killed again before
        rows.append((str(number), one.victim, one.phase, one.cut or "-", seconds, one.ended))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    middle = statistics.median(one.seconds for one in strikes if not math.isnan(one.seconds))
    cut = sum(bool(one.cut) for one in strikes)
    return [*lines, f"{len(strikes)} kills, {cut} of them inside a save; {middle:.1f} s to the next new step (median)"]
