"""How a run ends under the launchers that are not ours: a stop that saves, and the code of a failure."""

from __future__ import annotations

import time

import pytest

from tests.launchers.rows import MPI, SLURM
from tests.launchers.slurm import free_port
from trainer import codes

RUN = "trainer train --run-name job --limit-train 500 --limit-test 10 --log-every 1"


def wait_for_steps(shell):
    """Wait until the first of the lines has printed the loss of a step."""
    process, output = shell.started[0]
    deadline = time.monotonic() + 120
    while " loss " not in output.with_suffix(".out").read_text():
        assert process.poll() is None, output.with_suffix(".err").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("tasks", ["--ntasks 2 {}", "--nodes 2 --ntasks-per-node 1 {} --nproc-per-node 1"])
def test_scancel_stops_all_ranks_after_the_same_step_and_they_save(tasks, shell, need):
    variables = need(SLURM)
    shell.type(f"srun --job-name stop {tasks.format(RUN)} --epochs 10000", variables)
    wait_for_steps(shell)
    shell.type("scancel --name stop", variables)
    outcome = shell.outcome()
    assert outcome.code == codes.TERMINATED
    assert "stopped by SIGTERM" in outcome.out
    assert list((outcome.run / "checkpoints").iterdir())


@pytest.mark.parametrize(("programs", "start"), [(SLURM, "srun --ntasks 2"), (MPI, "mpirun -n 2")])
def test_the_code_of_a_failure_is_the_code_of_the_launcher(programs, start, shell, need):
    port = {"TRAINER_MASTER_PORT": str(free_port())} if programs == MPI else {}
    shell.type(f"{start} {RUN} --lr 1e9", need(programs) | port)
    assert shell.outcome().code == codes.DIVERGED


@pytest.mark.parametrize(
    ("programs", "line", "told"),
    [
        (SLURM, f"srun --ntasks 2 {RUN} --nnodes 2", "--nnodes given, but slurm"),
        (MPI, f"mpirun -n 2 --host node0,node1 {RUN}", "mpirun -x MASTER_ADDR=HOST"),
    ],
)
def test_a_wrong_launch_is_code_2_and_says_what_to_change(programs, line, told, shell, need):
    shell.type(line, need(programs))
    outcome = shell.outcome()
    assert outcome.code == codes.SETTING
    assert told in outcome.err
    assert "Traceback" not in outcome.err
