"""The same training, whoever starts the ranks and however many there are."""

from __future__ import annotations

import pytest

STEPS = (
    "--steps",
    "30",
    "--global-batch-size",
    "29",
    "--norm",
    "group",
    "--limit-train",
    "500",
    "--limit-test",
    "101",
    "--optimizer",
    "adamw",
    "--lr",
    "0.003",
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer")
LEGACY = ("-m", "torch.distributed.launch", "--nproc-per-node", "2")

#: id -> (ranks, prefix of the command, options)
ONE_COMMAND = {
    "agent-1": (1, ("-m", "trainer"), ("--nproc-per-node", "1")),
    "agent-2": (2, ("-m", "trainer"), ("--nproc-per-node", "2")),
    "agent-3": (3, ("-m", "trainer"), ("--nproc-per-node", "3")),
    "spawn-2": (2, ("-m", "trainer"), ("--launcher", "spawn", "--nproc-per-node", "2")),
    "torchrun-2": (2, TORCHRUN, ()),
    "legacy-2": (2, (*LEGACY, "-m", "trainer"), ()),
    "legacy-2-use-env": (2, (*LEGACY, "--use-env", "-m", "trainer"), ()),
    "none-1": (1, ("-m", "trainer"), ("--launcher", "none")),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, job_env):
    """One rank, in place, the plainest way there is."""
    from tests.distributed.conftest import Job

    job = Job(tmp_path_factory.mktemp("reference"), job_env)
    outcome = job.run("--launcher", "none", *STEPS)
    job.clean_up()
    assert outcome.code == 0, outcome.err
    return outcome


def assert_same(outcome, reference, *, ranks: int) -> None:
    assert outcome.code == 0, outcome.err
    assert outcome.received == reference.received
    assert outcome.received.startswith(f"{30 * 29} ")
    assert outcome.summary["topology"]["ranks"] == ranks
    assert outcome.summary["evaluation"]["samples"] == 101
    assert outcome.summary["final_loss"] == pytest.approx(reference.summary["final_loss"], rel=1e-4)
    assert outcome.summary["evaluation"]["loss"] == pytest.approx(reference.summary["evaluation"]["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ONE_COMMAND)
def test_training_does_not_depend_on_who_starts_the_ranks(name, new_job, reference):
    ranks, prefix, options = ONE_COMMAND[name]
    assert_same(new_job().run(*options, *STEPS, prefix=prefix), reference, ranks=ranks)


@pytest.mark.parametrize("processes", [1, 2])
def test_training_does_not_depend_on_the_number_of_nodes(processes, new_job, reference, free_port):
    job = new_job()
    address = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        str(processes),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port),
    )
    nodes = [job.start(*address, "--node-rank", str(node), *STEPS) for node in (0, 1)]
    assert_same(job.outcome(*nodes), reference, ranks=2 * processes)


def test_the_reference_learns(reference):
    """Else equal losses would say little: the loss must have moved well away from ln 10 = 2.303."""
    assert reference.summary["final_loss"] < 2.2
