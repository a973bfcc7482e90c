"""trainer.launch: what follows from a place: warnings, the log line, the children's variables, the derived port."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainer.launch import (
    Node,
    Options,
    Rank,
    child_environment,
    describe,
    discover,
    find_idle_devices,
    is_service_link,
)

LINK = "tcp://10.0.0.1:80"  # what Kubernetes puts into NAME_PORT for a Service


def env(text: str, **more: str) -> dict[str, str]:
    """Build an environment from `NAME=value` words."""
    return {**dict(word.split("=", 1) for word in text.split()), **more}


PLAIN = env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=host MASTER_PORT=1234")
GROUP = env("RANK=11 WORLD_SIZE=16 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 GROUP_RANK=1 GROUP_WORLD_SIZE=2")
TORCHRUN = {**GROUP, **env("TORCHELASTIC_RUN_ID=none MASTER_ADDR=node0 MASTER_PORT=29400")}
ELASTIC = env("PET_NNODES=2:4 PET_RDZV_ENDPOINT=job-worker-0:23456 PET_NPROC_PER_NODE=2")
TASK = env("SLURM_STEP_ID=2 SLURM_PROCID=6 SLURM_LOCALID=0 SLURM_NODEID=3 SLURM_STEP_NUM_TASKS=7 SLURM_JOB_ID=4711")
SRUN = {**TASK, **env("SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_STEP_NODELIST=gpu[07-08,11,20]")}


def pytorchjob(index: int, nproc: str, world: int) -> dict[str, str]:
    plain = f"RANK={index} WORLD_SIZE={world} MASTER_ADDR=job-master-0 MASTER_PORT=23456"
    pet = f"PET_NODE_RANK={index} PET_NNODES=3 PET_NPROC_PER_NODE={nproc} PET_MASTER_ADDR=job-master-0"
    return env(f"{plain} {pet} PET_MASTER_PORT=23456")


def trainjob(index: int, **more: str) -> dict[str, str]:
    pet = f"PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK={index} PET_MASTER_ADDR=job-node-0-0.job"
    return env(f"{pet} PET_MASTER_PORT=29500", **more)


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        ({**PLAIN, "MASTER_PORT": LINK}, {}, ("MASTER_PORT", LINK)),
        (trainjob(1, PET_MASTER_PORT=LINK), {}, ("PET_MASTER_PORT", LINK)),
        ({"WORLD_SIZE": "4"}, {}, ("WORLD_SIZE", "alone")),
        ({"JOB_COMPLETION_INDEX": "2"}, {}, ("JOB_COMPLETION_INDEX", "alone")),
    ],
)
def test_what_is_passed_over_is_warned_about_once(
    environ: dict[str, str], options: Any, words: tuple[str, ...]
) -> None:
    (warning,) = discover(environ, Options(**options)).warnings
    assert [word for word in words if word not in warning] == []


def test_the_environment_is_not_even_read_without_a_launcher() -> None:
    got = discover({**TORCHRUN, "MASTER_PORT": LINK, "WORLD_SIZE": "x"}, Options(launcher="none"))
    assert (got.found, got.warnings) == ((), ())


def children(environs: list[dict[str, str]], processes: int) -> list[dict[str, str]]:
    nodes = [discover(environ, Options()) for environ in environs]
    assert all(isinstance(place, Node) for place in nodes)
    return [
        child_environment(place, index, processes=place.processes or processes, master_port=place.master_port)
        for place in nodes
        if isinstance(place, Node)
        for index in range(place.processes or processes)
    ]


@pytest.mark.parametrize("nproc", ["8", "auto"])
def test_a27_three_pods_of_eight_make_24_ranks(nproc: str) -> None:
    world = 24 if nproc == "8" else 3
    found = children([pytorchjob(index, nproc, world) for index in range(3)], 8)
    assert [int(child["RANK"]) for child in found] == list(range(24))
    assert {child["WORLD_SIZE"] for child in found} == {"24"}
    assert [int(child["LOCAL_RANK"]) for child in found] == [*range(8)] * 3
    assert found[17] == {
        "RANK": "17",
        "WORLD_SIZE": "24",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "NODE_RANK": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
    }


def test_two_trainjob_pods_of_four_make_8_ranks() -> None:
    found = children([trainjob(index) for index in range(2)], 0)
    assert [int(child["RANK"]) for child in found] == list(range(8))
    assert {child["WORLD_SIZE"] for child in found} == {"8"}


def test_a_child_without_a_port_finds_its_own_place_again() -> None:
    child = child_environment(Node(processes=2), 1, processes=2, master_port=None)
    assert "MASTER_PORT" not in child
    got = discover({**child, "TRAINER_AGENT_PID": "1"}, Options(nproc_per_node="2"))
    assert dataclasses.replace(got, found=()) == Rank(1, 2, 1, 2, 0, 1, "127.0.0.1", None, "agent")
    assert got.found[:3] == ("TRAINER_AGENT_PID", "RANK", "WORLD_SIZE")


def test_the_derived_port_is_shared_by_a_step_and_differs_between_steps() -> None:
    def port(**more: str) -> int | None:
        return discover({**SRUN, **more}, Options()).master_port

    assert port(SLURM_PROCID="6") == port(SLURM_PROCID="0", SLURM_NODEID="0")
    others = {port(), port(SLURM_STEP_ID="3"), port(SLURM_JOB_ID="4712"), port(SLURM_JOB_ID="4713")}
    assert len(others) == 4
    assert all(number is not None and 20000 <= number < 30000 for number in others)


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        (TORCHRUN, {}, ("rank 11 of 16, local rank 3 of 8, node 1 of 2; launcher torchrun; master node0:29400", "GROUP_RANK")),
        ({**PLAIN, "MASTER_ADDR": "::1"}, {}, ("rank 1 of 2, local rank 1; launcher env; master [::1]:1234; read from RANK, WORLD_SIZE",)),
        (trainjob(1), {}, ("node 1 of 2, ranks on it: 4; launcher pod", "PET_NPROC_PER_NODE")),
        (trainjob(1), {"nproc_per_node": "auto"}, ("one rank per visible device", "--nproc-per-node")),
        (ELASTIC, {}, ("2 to 4 elastic nodes", "job-worker-0:23456", "PET_RDZV_ENDPOINT")),
        ({}, {}, ("node 0 of 1, one rank per visible device; launcher agent; master 127.0.0.1; no launch variables",)),
    ],
)  # fmt: skip
def test_one_line_says_what_was_found_and_where(environ: dict[str, str], options: Any, words: tuple[str, ...]) -> None:
    line = describe(discover(environ, Options(**options)))
    assert [word for word in words if word not in line] == [], line
    assert "\n" not in line


def test_one_task_beside_idle_devices_is_a_warning_that_names_the_option() -> None:
    task = discover(SRUN, Options())
    warning = find_idle_devices(task, devices=8)
    assert warning is not None
    assert "--nproc-per-node" in warning
    assert "8 visible devices: 7 stay idle" in warning
    assert find_idle_devices(task, devices=1) is None
    assert find_idle_devices(discover(SRUN, Options(nproc_per_node="auto")), devices=8) is None
    assert (
        find_idle_devices(discover({**TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Options()), devices=8)
        is None
    )


def test_a_service_link_is_told_from_a_port() -> None:
    assert is_service_link(LINK)
    assert not is_service_link("9400")
