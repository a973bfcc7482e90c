"""The same training under every launcher: what the model received, the evaluation, and the loss are those of one rank."""

from __future__ import annotations

import time

import pytest

from tests.distributed.test_equivalence import STEPS
from tests.docs.pages import LAUNCHING, fenced
from tests.launchers.conftest import Shell
from tests.launchers.rows import REFERENCE, ROWS
from tests.launchers.slurm import free_port

OPTIONS = " ".join(["trainer train --run-name job --trace trace", *STEPS])


def run(row, shell, *, variables=None):
    """Run a row to its end; return what it left, and its cells of the printed table."""
    port = free_port()
    start = time.monotonic()
    for node in range(row.typed):
        given = {**row.variables, **(row.first if node == 0 else {})}
        filled = {name: value.format(node=node, port=port) for name, value in given.items()}
        shell.type(row.line.format(node=node, port=port).replace("trainer train", OPTIONS), filled | (variables or {}))
    outcome = shell.outcome()
    seconds = f"{time.monotonic() - start:.1f}"
    left = (f"code {outcome.code}", "-", "-")
    if (outcome.run / "summary.json").exists():
        summary = outcome.summary
        received = outcome.received.split()[1][:12]
        left = (received, str(summary["evaluation"]["samples"]), f"{summary['final_loss']:.6f}")
    return outcome, (row.name, str(row.nodes), str(row.ranks), *left, seconds, row.line)


def write_scripts(folder):
    """Write the page's batch scripts, whose second line is their name, with the options of every row."""
    for _, lines in fenced(LAUNCHING, "bash"):
        text = "\n".join(lines).replace("trainer train", OPTIONS)
        (folder / lines[1].removeprefix("# ")).write_text(text + "\n")


@pytest.fixture(scope="session")
def reference(tmp_path_factory, shell_env):
    """One rank, in place, the plainest way there is: what it left, and its cells."""
    shell = Shell(tmp_path_factory.mktemp("reference"), shell_env)
    outcome, cells = run(REFERENCE, shell)
    assert shell.close() == []
    assert outcome.code == 0, outcome.err
    return outcome, cells


def test_the_reference_learns(reference, record_property):
    """Else equal losses would say little: the loss must have moved well away from ln 10 = 2.303."""
    record_property("row", (-1, reference[1]))
    assert reference[0].summary["final_loss"] < 2.2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}, {row.nodes} x {row.ranks // row.nodes}")
def test_training_is_that_of_one_rank_in_place(row, shell, need, reference, record_property):
    write_scripts(shell.folder)
    outcome, cells = run(row, shell, variables=need(row.programs))
    record_property("row", (ROWS.index(row), cells))
    assert outcome.code == 0, outcome.err
    assert f"launcher {row.found};" in outcome.out
    assert "step 30/30 loss" in outcome.out, "the output is a file: steps are lines"
    assert outcome.received == reference[0].received
    assert outcome.received.startswith(f"{30 * 29} ")
    summary, wanted = outcome.summary, reference[0].summary
    assert summary["topology"]["ranks"] == row.ranks
    if row.found != "openmpi":  # which does not tell the nodes: hosts are counted, and there is one
        assert summary["topology"]["nodes"] == row.nodes
    assert summary["evaluation"]["samples"] == 101
    assert summary["evaluation"]["loss"] == pytest.approx(wanted["evaluation"]["loss"], rel=1e-4)
    assert summary["final_loss"] == pytest.approx(wanted["final_loss"], rel=1e-4)
