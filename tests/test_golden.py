"""Stored values of a fixed run: what a change must not alter unless it means to.

The digests of order, augmentation and learning rate are beside their modules' tests. Digests of weights are compared only
within one run of the tests.
"""

from __future__ import annotations

import json
import platform
import shlex

import pytest

#: Losses of 20 steps of `RUN`.
# fmt: off
LOSSES = [
    2.347499, 2.345999, 2.322214, 2.430787, 2.25895,
    2.210132, 2.242627, 2.147428, 2.124879, 2.172823,
    2.075902, 1.981038, 2.035605, 2.046004, 1.963981,
    1.85948, 1.777315, 1.706782, 1.78445, 1.685647,
]
# fmt: on

#: The oldest instruction set that the libraries have: every CPU of the family then computes the same. Training amplifies a
#: difference in the last digit a thousandfold within these 20 steps (measured: AVX2 against SSE4.1, 8e-4).
OLDEST = {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
TOLERANCE = 1e-5 if platform.machine() == "x86_64" else 1e-2

RUN = shlex.split(
    "train --launcher none --steps 20 --global-batch-size 128 --dropout 0.1 --lr 0.05 --clip-norm 5 "
    "--seed 5 --schedule constant --limit-test 200 --log-every 1 --log-format json --run-name golden"
)


def test_twenty_losses_are_the_stored_ones(run_trainer, tmp_path):
    run = run_trainer(*RUN, env=OLDEST)  # with one thread: the order of a sum depends on their number
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    losses = [record["loss"] for record in records if "learning_rate" in record]
    assert losses == pytest.approx(LOSSES, rel=TOLERANCE), losses


def test_a_repeated_run_has_the_same_weights_to_the_bit(run_trainer, tmp_path):
    digests = set()
    for runs in ("first", "second"):
        assert run_trainer(*RUN, "--runs-dir", runs).returncode == 0
        digests.add(json.loads((tmp_path / runs / "golden" / "summary.json").read_text())["weights_sha256"])
    assert len(digests) == 1
