"""trainer.launch.discover: one table of environment and options -> what this process is, or the error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from trainer.codes import SETTING, SettingError
from trainer.launch import Elastic, Node, Options, Rank, discover

LINK = "tcp://10.0.0.1:80"  # what Kubernetes puts into NAME_PORT for a Service


def env(text: str, *others: Mapping[str, str], **more: str) -> dict[str, str]:
    """Build an environment from `NAME=value` words; what comes later wins."""
    values = dict(word.split("=", 1) for word in text.split())
    for other in (*others, more):
        values |= other
    return values


def torchrun(**more: str) -> dict[str, str]:
    place = "RANK=11 LOCAL_RANK=3 WORLD_SIZE=16 LOCAL_WORLD_SIZE=8 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=11"
    return env(f"{place} MASTER_ADDR=node0 MASTER_PORT=29400 TORCHELASTIC_RUN_ID=none", more)


def pytorchjob(index: int, nproc: str, world: int, **more: str) -> dict[str, str]:
    plain = f"RANK={index} WORLD_SIZE={world} MASTER_ADDR=job-master-0 MASTER_PORT=23456"
    pet = f"PET_NODE_RANK={index} PET_NNODES=3 PET_NPROC_PER_NODE={nproc} PET_MASTER_ADDR=job-master-0"
    return env(f"{plain} {pet} PET_MASTER_PORT=23456", more)


def trainjob(**more: str) -> dict[str, str]:
    pet = "PET_NNODES=2 PET_NPROC_PER_NODE=4 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500"
    return env(f"{pet} JOB_COMPLETION_INDEX=1", more)


def elastic(**more: str) -> dict[str, str]:
    endpoint = "PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=job-worker-0:23456"
    return env(f"PET_NNODES=2:4 {endpoint} PET_MAX_RESTARTS=3 PET_NPROC_PER_NODE=2", more)


def allocation(**more: str) -> dict[str, str]:
    tasks = "SLURM_NTASKS=7 SLURM_NNODES=4 SLURM_TASKS_PER_NODE=2(x3),1"
    return env(f"SLURM_JOB_ID=4711 {tasks} SLURM_JOB_NODELIST=gpu[07-08,11,20]", more)


def srun(**more: str) -> dict[str, str]:
    place = "SLURM_STEP_ID=2 SLURM_PROCID=6 SLURM_LOCALID=0 SLURM_NODEID=3 SLURM_STEP_NUM_TASKS=7"
    step = f"{place} SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_STEP_NODELIST=gpu[07-08,11,20]"
    return env(step, allocation(), more)


def mpi(prefix: str, rank: int, size: int, local: int, local_size: int, **more: str) -> dict[str, str]:
    names = f"{prefix}_RANK={rank} {prefix}_SIZE={size} {prefix}_LOCAL_RANK={local} {prefix}_LOCAL_SIZE={local_size}"
    return env(names, more)


OMPI, MV2 = "OMPI_COMM_WORLD", "MV2_COMM_WORLD"
PMI = env("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4")
LEGACY = env("RANK=1 WORLD_SIZE=2 MASTER_ADDR=host MASTER_PORT=1234")
PLAIN = env("LOCAL_RANK=1", LEGACY)
CHILD = env("TRAINER_AGENT_PID=7 RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=m")
ONE_TASK = env("SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1")
PORT = 20000 + (4711 * 101 + 2) % 10000
TWO = {"nnodes": 2, "node_rank": 1, "master_addr": "a"}


def rank(launcher: str, *place: int | None, at: str = "127.0.0.1", port: int | None = None) -> Rank:
    """Build the expected Rank: rank, world, local rank, local world, node rank, nodes."""
    names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "nodes")
    values: dict[str, Any] = dict(zip(names, place, strict=False))
    return Rank(**values, master_addr=at, master_port=port, launcher=launcher)


def node(
    launcher: str, number: int, nodes: int, processes: int | None, at: str = "127.0.0.1", port: int | None = None
) -> Node:
    """Build the expected Node."""
    return Node(number, nodes, processes, at, port, launcher)


def elastic_node(processes: int | None, minimum: int, maximum: int) -> Node:
    limits = Elastic(minimum, maximum, "job-worker-0:23456", max_restarts=3)
    return Node(0, minimum, processes, "job-worker-0", 23456, "pod", elastic=limits)


def elastic_by_options(launcher: str, address: str, port: int, **more: Any) -> Node:
    limits = Elastic(1, 3, f"[{address}]:{port}" if ":" in address else f"{address}:{port}", **more)
    return Node(0, 1, None, address, port, launcher, elastic=limits)


ELASTIC_OPTIONS = {"nnodes": "1:3", "master_addr": "a"}
AGENT_OPTIONS = {"nnodes": "1:3", "launcher": "agent"}
ALL_PET = {
    "PET_RDZV_ENDPOINT": "[::1]", "PET_RDZV_ID": "it", "PET_RDZV_CONF": "is_host=true, last_call_timeout=5", "PET_LOCAL_ADDR": "10.0.0.1",
}  # fmt: skip
ALL_ELASTIC = Elastic(2, 4, "[::1]:29400", "it", (("is_host", "true"), ("last_call_timeout", "5")), 3, "10.0.0.1")

# id, environment, options, what is found: a Rank, a Node, or words of the error.
FOUND: list[tuple[str, dict[str, str], dict[str, Any], Rank | Node | tuple[str, ...]]] = [
    # torchrun, which is the innermost launcher wherever it runs
    ("torchrun", torchrun(), {}, rank("torchrun", 11, 16, 3, 8, 1, 2, at="node0", port=29400)),
    ("torchrun forced", torchrun(), {"launcher": "torchrun"}, rank("torchrun", 11, 16, 3, 8, 1, 2, at="node0", port=29400)),
    ("torchrun in srun", srun(**torchrun()), {}, rank("torchrun", 11, 16, 3, 8, 1, 2, at="node0", port=29400)),
    ("torchrun in mpirun", mpi(OMPI, 1, 2, 0, 1, **torchrun()), {}, rank("torchrun", 11, 16, 3, 8, 1, 2, at="node0", port=29400)),
    ("torchrun in PyTorchJob", pytorchjob(1, "8", 24, **torchrun()), {}, rank("torchrun", 11, 16, 3, 8, 1, 2, at="node0", port=29400)),
    ("torchrun --virtual-local-rank", torchrun(LOCAL_RANK="0"), {}, rank("torchrun", 11, 16, 0, 8, 1, 2, at="node0", port=29400)),
    ("torchrun, --local-rank agrees", torchrun(), {"local_rank": 3}, rank("torchrun", 11, 16, 3, 8, 1, 2, at="node0", port=29400)),
    ("torchrun, --local-rank disagrees", torchrun(), {"local_rank": 2}, ("--local-rank is 2", "torchrun", "3")),
    ("torchrun and --nproc-per-node", torchrun(), {"nproc_per_node": "8"}, ("--nproc-per-node", "torchrun already started", "--launcher agent")),
    ("torchrun and --nnodes", torchrun(), {"nnodes": 2}, ("--nnodes", "torchrun already started")),
    ("torchrun and --launcher agent", torchrun(), {"launcher": "agent", "nproc_per_node": "2"}, node("agent", 0, 1, 2)),
    ("half a torchrun", env("TORCHELASTIC_RUN_ID=x", LEGACY), {}, ("TORCHELASTIC_RUN_ID=x", "not LOCAL_RANK")),
    # plain variables and the legacy torch.distributed.launch
    ("plain", PLAIN, {}, rank("env", 1, 2, 1, at="host", port=1234)),
    ("A27 legacy launch gives --local-rank", LEGACY, {"local_rank": 1}, rank("env", 1, 2, 1, at="host", port=1234)),
    ("A27 --local-rank agrees", PLAIN, {"local_rank": 1}, rank("env", 1, 2, 1, at="host", port=1234)),
    ("--local-rank disagrees", PLAIN, {"local_rank": 0}, ("--local-rank is 0", "says 1")),
    ("--local-rank and nothing else", {}, {"local_rank": 0}, ("--local-rank is 0", "RANK and WORLD_SIZE")),
    ("plain, sizes told", {**PLAIN, "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}, {}, rank("env", 1, 2, 1, 2, 0, at="host", port=1234)),
    ("plain in srun", srun(**PLAIN), {}, rank("env", 1, 2, 1, at="host", port=1234)),
    ("plain, options move the master", PLAIN, {"master_addr": "b", "master_port": 9}, rank("env", 1, 2, 1, at="b", port=9)),
    ("plain and --nproc-per-node", PLAIN, {"nproc_per_node": "2"}, ("--nproc-per-node", "already started")),
    ("local rank 3 of a world of one", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3"}, {}, rank("env", 0, 1, 3)),
    ("plain without a port", {**PLAIN, "MASTER_PORT": ""}, {}, rank("env", 1, 2, 1, at="host", port=29500)),
    ("plain without MASTER_ADDR", {**PLAIN, "MASTER_ADDR": ""}, {}, ("WORLD_SIZE=2", "MASTER_ADDR is not")),
    ("plain on one host", {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {}, rank("env", 1, 2, 1, 2, port=29500)),
    ("plain forced, absent", {"RANK": "0"}, {"launcher": "env"}, ("--launcher env", "WORLD_SIZE, LOCAL_RANK")),
    # Open MPI, MVAPICH, MPICH and Intel MPI
    ("Open MPI, one host", mpi(OMPI, 1, 4, 1, 4), {}, rank("openmpi", 1, 4, 1, 4, 0, 1, port=29500)),
    ("Open MPI, its job's name", mpi(OMPI, 1, 4, 1, 4, PMIX_NAMESPACE="1377107969"), {}, rank("openmpi", 1, 4, 1, 4, 0, 1, port=29851)),
    ("Open MPI, hosts", mpi(OMPI, 5, 8, 1, 4, MASTER_ADDR="h0", MASTER_PORT="77"), {}, rank("openmpi", 5, 8, 1, 4, at="h0", port=77)),
    ("mpirun in Slurm", srun(**mpi(OMPI, 5, 8, 1, 4, MASTER_ADDR="h0")), {}, rank("openmpi", 5, 8, 1, 4, at="h0", port=29500)),
    ("Open MPI, no master", mpi(OMPI, 5, 8, 1, 4), {}, ("more than one host", "mpirun -x MASTER_ADDR=")),
    ("Open MPI, --master-addr", mpi(OMPI, 5, 8, 1, 4), {"master_addr": "h1"}, rank("openmpi", 5, 8, 1, 4, at="h1", port=29500)),
    ("Open MPI task as a node", mpi(OMPI, 1, 2, 0, 1, MASTER_ADDR="h0"), {"nproc_per_node": "8"}, node("openmpi", 1, 2, 8, "h0", 29500)),
    ("half an Open MPI", {f"{OMPI}_RANK": "0"}, {}, (f"{OMPI}_RANK=0", f"not {OMPI}_SIZE, {OMPI}_LOCAL_RANK")),
    ("Open MPI, no local rank", {f"{OMPI}_RANK": "0", f"{OMPI}_SIZE": "2"}, {}, (f"{OMPI}_SIZE=2", f"{OMPI}_LOCAL_RANK is not")),
    ("MVAPICH", mpi(MV2, 3, 4, 1, 2, MASTER_ADDR="h0"), {}, rank("mvapich", 3, 4, 1, 2, at="h0", port=29500)),
    ("MVAPICH before srun", srun(**mpi(MV2, 1, 2, 1, 2)), {}, rank("mvapich", 1, 2, 1, 2, 0, 1, port=29500)),
    ("MVAPICH, no master", mpi(MV2, 3, 4, 1, 2), {}, ("MV2_COMM_WORLD_SIZE is 4", "mpirun_rsh", "MASTER_ADDR=")),
    ("MPICH", {**PMI, "MASTER_ADDR": "h0"}, {}, rank("pmi", 5, 8, 1, 4, at="h0", port=29500)),
    ("MPICH, no master", PMI, {}, ("PMI_SIZE is 8", "mpiexec -genv MASTER_ADDR")),
    ("srun --mpi=pmi2", srun(**PMI), {}, rank("slurm", 6, 7, 0, 1, 3, 4, at="gpu07", port=PORT)),
    ("lone PMI process", env("PMI_RANK=0 PMI_SIZE=1"), {}, rank("pmi", 0, 1, 0, 1, 0, 1)),
    ("PMI forced over srun", srun(**PMI, MASTER_ADDR="h0"), {"launcher": "pmi"}, rank("pmi", 5, 8, 1, 4, at="h0", port=29500)),
    # pods that stand for a node
    ("PyTorchJob auto", pytorchjob(2, "auto", 3), {}, node("pod", 2, 3, None, "job-master-0", 23456)),
    ("PyTorchJob gpu", pytorchjob(2, "gpu", 3), {}, node("pod", 2, 3, None, "job-master-0", 23456)),
    ("PyTorchJob 1", pytorchjob(0, "1", 3), {}, node("pod", 0, 3, 1, "job-master-0", 23456)),
    ("A27 PyTorchJob 8", pytorchjob(2, "8", 24), {}, node("pod", 2, 3, 8, "job-master-0", 23456)),
    ("PyTorchJob 8, world in pods", pytorchjob(2, "8", 3), {}, node("pod", 2, 3, 8, "job-master-0", 23456)),
    ("PyTorchJob, wrong world", pytorchjob(2, "8", 16), {}, ("WORLD_SIZE is 16", "PET_NNODES is 3, with 8 ranks")),
    ("PyTorchJob auto, wrong world", pytorchjob(2, "auto", 4), {}, ("WORLD_SIZE is 4", "one rank per device")),
    ("PyTorchJob, one option over it", pytorchjob(2, "8", 24), {"nproc_per_node": "4"}, node("pod", 2, 3, 4, "job-master-0", 23456)),
    ("PyTorchJob, options over it", pytorchjob(1, "8", 24), {"nnodes": 2, "master_port": 5}, node("pod", 1, 2, 8, "job-master-0", 5)),
    ("PyTorchJob forced", pytorchjob(2, "8", 24), {"launcher": "pod"}, node("pod", 2, 3, 8, "job-master-0", 23456)),
    ("a pod's variables before srun's", srun(**pytorchjob(2, "8", 24)), {}, node("pod", 2, 3, 8, "job-master-0", 23456)),
    ("MVAPICH before a pod", pytorchjob(2, "8", 24, **mpi(MV2, 1, 2, 1, 2)), {}, rank("mvapich", 1, 2, 1, 2, 0, 1, at="job-master-0", port=23456)),
    ("older operator, Volcano", LEGACY, {}, node("pod", 1, 2, None, "host", 1234)),
    ("older operator and --nproc-per-node", LEGACY, {"nproc_per_node": "8"}, node("pod", 1, 2, 8, "host", 1234)),
    ("operator v1.3, master", env("", LEGACY, RANK="0", MASTER_ADDR="localhost"), {}, node("pod", 0, 2, None, "localhost", 1234)),
    ("TrainJob", trainjob(), {}, node("pod", 1, 2, 4, "job-node-0-0.job", 29500)),
    ("JobSet, index for the node rank", trainjob(PET_NODE_RANK=""), {}, node("pod", 1, 2, 4, "job-node-0-0.job", 29500)),
    ("PET_STANDALONE is ignored", trainjob(PET_STANDALONE=""), {}, node("pod", 1, 2, 4, "job-node-0-0.job", 29500)),
    ("PET_STANDALONE=1 is ignored", {"PET_STANDALONE": "1"}, {}, node("agent", 0, 1, None)),
    ("PET_NNODES=1 is enough", {"PET_NNODES": "1"}, {}, node("pod", 0, 1, None)),
    ("pod forced, absent", {}, {"launcher": "pod"}, ("--launcher pod", "PET_NNODES or RANK, WORLD_SIZE, MASTER_ADDR")),
    ("pod, no node rank", {"PET_NNODES": "2", "PET_MASTER_ADDR": "a"}, {}, ("PET_NNODES is 2", "PET_NODE_RANK")),
    ("pod, no master", {"PET_NNODES": "2", "PET_NODE_RANK": "0"}, {}, ("PET_NNODES is 2", "PET_MASTER_ADDR")),
    ("pod, node rank too high", trainjob(PET_NODE_RANK="2"), {}, ("PET_NODE_RANK is 2", "PET_NNODES is 2")),
    ("pod, PET_ wins", trainjob(MASTER_ADDR="m", MASTER_PORT="7"), {}, node("pod", 1, 2, 4, "job-node-0-0.job", 29500)),
    ("pod, port is a link", trainjob(PET_MASTER_PORT=LINK), {}, node("pod", 1, 2, 4, "job-node-0-0.job", 29500)),
    ("elastic PyTorchJob", elastic(), {}, elastic_node(2, 2, 4)),
    ("elastic, one option over it", elastic(), {"nproc_per_node": "gpu"}, elastic_node(None, 2, 4)),
    ("elastic, endpoint alone tells", elastic(PET_NNODES="3"), {}, elastic_node(2, 3, 3)),
    ("elastic made fixed by options", elastic(), TWO, node("pod", 1, 2, 2, "a", 29500)),
    ("elastic, no endpoint", elastic(PET_RDZV_ENDPOINT=""), {}, ("'2:4'", "PET_RDZV_ENDPOINT is not set")),
    *((f"elastic {text}", elastic(PET_NNODES=text), {}, ("PET_NNODES", repr(text), "minimum:maximum")) for text in ("4:2", "a:b", "2:", ":2", "0:2")),
    ("elastic, all that PET_ say", elastic(**ALL_PET), {}, Node(0, 2, 2, "::1", 29400, "pod", elastic=ALL_ELASTIC)),
    ("elastic, conf is no number", elastic(PET_RDZV_CONF="last_call_timeout=soon"), {}, ("PET_RDZV_CONF", "last_call_timeout=soon")),
    ("elastic, conf is no pair", elastic(PET_RDZV_CONF="timeout"), {}, ("PET_RDZV_CONF is 'timeout'", "key=value")),
    ("elastic, another backend", elastic(PET_RDZV_BACKEND="etcd-v2"), {}, ("PET_RDZV_BACKEND is 'etcd-v2'", "c10d")),
    *((f"elastic at {text}", elastic(PET_RDZV_ENDPOINT=text), {}, ("PET_RDZV_ENDPOINT", repr(text))) for text in ("a:b", ":1", "a:70000", "::1")),
    ("elastic by options", {}, ELASTIC_OPTIONS, elastic_by_options("agent", "a", 29500)),
    ("elastic by options over a pod", pytorchjob(1, "8", 16), {**ELASTIC_OPTIONS, "nproc_per_node": "gpu"}, elastic_by_options("pod", "a", 29500)),
    ("elastic by options, the pod's endpoint", {"PET_RDZV_ENDPOINT": "b:7", "PET_NNODES": "2"}, {"nnodes": "1:3"}, elastic_by_options("pod", "b", 7)),
    ("elastic by options alone", elastic(), {**AGENT_OPTIONS, "master_addr": "::1", "master_port": 7}, elastic_by_options("agent", "::1", 7)),
    ("elastic by options, no endpoint", {}, {"nnodes": "1:3"}, ("--nnodes is '1:3'", "--master-addr")),
    ("elastic by options, wrong way round", {}, {**ELASTIC_OPTIONS, "nnodes": "3:1"}, ("--nnodes is '3:1'", "minimum:maximum")),
    ("elastic nodes have no rank", {}, {**ELASTIC_OPTIONS, "node_rank": 0}, ("--node-rank", "drop the option")),
    # srun
    ("srun, --ntasks alone", srun(), {}, rank("slurm", 6, 7, 0, 1, 3, 4, at="gpu07", port=PORT)),
    ("srun, first node", srun(SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_NODEID="0"), {}, rank("slurm", 1, 7, 1, 2, 0, 4, at="gpu07", port=PORT)),
    ("srun, MASTER_* set", srun(MASTER_ADDR="m", MASTER_PORT="5"), {}, rank("slurm", 6, 7, 0, 1, 3, 4, at="m", port=5)),
    ("srun, other variables alone", srun(WORLD_SIZE="7", MASTER_ADDR="m"), {}, rank("slurm", 6, 7, 0, 1, 3, 4, at="m", port=PORT)),
    ("srun, job-wide fallbacks", srun(SLURM_STEP_NUM_TASKS="", SLURM_STEP_NODELIST=""), {}, rank("slurm", 6, 7, 0, 1, 3, 4, at="gpu07", port=PORT)),
    ("srun, no counts", srun(SLURM_STEP_TASKS_PER_NODE=""), {}, rank("slurm", 6, 7, 0, None, 3, at="gpu07", port=PORT)),
    ("srun, no host at all", srun(SLURM_STEP_NODELIST="", SLURM_JOB_NODELIST=""), {}, ("SLURM_STEP_NODELIST", "--master-addr")),
    ("srun, bad node list", srun(SLURM_STEP_NODELIST="gpu[1-"), {}, ("SLURM_STEP_NODELIST is 'gpu[1-'", "node list")),
    ("srun, bad counts", srun(SLURM_STEP_TASKS_PER_NODE="2(y3)"), {}, ("SLURM_STEP_TASKS_PER_NODE is '2(y3)'", "tasks per node")),
    ("srun, no local id", srun(SLURM_LOCALID=""), {}, ("SLURM_LOCALID", "is not")),
    ("srun -n1", ONE_TASK, {}, rank("slurm", 0, 1, 0, None, None, 1)),
    ("srun task as a node", srun(), {"nproc_per_node": "auto"}, node("slurm", 6, 7, None, "gpu07", PORT)),
    ("srun task as a node, --nnodes agrees", srun(), {"nproc_per_node": "2", "nnodes": 7}, node("slurm", 6, 7, 2, "gpu07", PORT)),
    ("srun task as a node, --nnodes disagrees", srun(), {"nproc_per_node": "2", "nnodes": 4}, ("--nnodes is 4", "slurm says 7")),
    ("srun and --nnodes", srun(), {"nnodes": 4}, ("--nnodes", "slurm", "--nproc-per-node")),
    ("python in an allocation", allocation(), {}, node("agent", 0, 1, None)),
    ("python in a batch script", allocation(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0"), {}, node("agent", 0, 1, None)),
    ("python in salloc's shell", srun(SLURM_STEP_ID="4294967290", SLURM_PROCID="0", SLURM_NODEID="0"), {}, node("agent", 0, 1, None)),
    ("slurm forced, no step", allocation(), {"launcher": "slurm"}, ("--launcher slurm", "SLURM_STEP_ID, SLURM_PROCID")),
    # our own
    ("nothing", {}, {}, node("agent", 0, 1, None)),
    ("empty strings", dict.fromkeys([*PLAIN, *trainjob(), *srun(), *PMI, *torchrun(), "PET_STANDALONE"], ""), {}, node("agent", 0, 1, None)),
    ("--nproc-per-node", {}, {"nproc_per_node": "4"}, node("agent", 0, 1, 4)),
    ("options for two nodes", {}, {**TWO, "nproc_per_node": "2"}, node("agent", 1, 2, 2, "a", 29500)),
    ("options over half-set variables", {"WORLD_SIZE": "9", "MASTER_ADDR": "m"}, TWO, node("agent", 1, 2, None, "a", 29500)),
    ("options, master from a variable", {"MASTER_ADDR": "m", "MASTER_PORT": "7"}, {"nnodes": 2, "node_rank": 0}, node("agent", 0, 2, None, "m", 7)),
    ("options, index from a Job", {"JOB_COMPLETION_INDEX": "1"}, {"nnodes": 2, "master_addr": "a"}, node("agent", 1, 2, None, "a", 29500)),
    ("options, no node rank", {}, {"nnodes": 2, "master_addr": "a"}, ("--nnodes is 2", "add --node-rank")),
    ("options, no master", {}, {"nnodes": 2, "node_rank": 0}, ("--nnodes is 2", "add --master-addr")),
    ("options, node rank too high", {}, dict(TWO, node_rank=2), ("--node-rank is 2", "--nnodes is 2")),
    ("options, node rank alone", {}, {"node_rank": 1}, ("--node-rank is 1", "--nnodes is not given")),
    ("agent asks no variable", pytorchjob(2, "8", 24), {"launcher": "agent"}, node("agent", 0, 1, None)),
    ("agent needs its own master", {"MASTER_ADDR": "m"}, {"launcher": "agent", "nnodes": 2, "node_rank": 0}, ("add --master-addr",)),
    ("spawn", pytorchjob(2, "8", 24), dict(TWO, launcher="spawn", nproc_per_node="2"), node("spawn", 1, 2, 2, "a", 29500)),
    ("none", torchrun(RANK="junk"), {"launcher": "none", "nnodes": 3}, rank("none", 0, 1, 0, 1, 0, 1)),
    ("our child", {**CHILD, "NODE_RANK": "1", "GROUP_WORLD_SIZE": "2"}, dict(TWO), rank("agent", 3, 4, 1, 2, 1, 2, at="m")),
    ("our child, port told", {**CHILD, "MASTER_PORT": "8"}, {"launcher": "agent", "master_port": 9}, rank("agent", 3, 4, 1, 2, at="m", port=8)),
    ("our child in a pod", pytorchjob(1, "2", 6, **CHILD), {"nproc_per_node": "2"}, rank("agent", 3, 4, 1, 2, at="m", port=23456)),
    ("our child in torchrun's shell", torchrun(**CHILD), {}, rank("agent", 3, 4, 1, 2, 1, 2, at="m", port=29400)),
    # addresses, ports and numbers
    ("A09 [::1]", {**PLAIN, "MASTER_ADDR": "[::1]"}, {}, rank("env", 1, 2, 1, at="::1", port=1234)),
    ("A09 ::1", {**PLAIN, "MASTER_ADDR": "::1"}, {}, rank("env", 1, 2, 1, at="::1", port=1234)),
    ("A09 --master-addr [::1]", {}, dict(TWO, master_addr="[::1]"), node("agent", 1, 2, None, "::1", 29500)),
    ("port is a link", {**PLAIN, "MASTER_PORT": LINK}, {}, rank("env", 1, 2, 1, at="host", port=29500)),
    ("port is a link, srun", srun(MASTER_PORT=LINK), {}, rank("slurm", 6, 7, 0, 1, 3, 4, at="gpu07", port=PORT)),
    ("port is a link, single node", {"MASTER_PORT": LINK}, {}, node("agent", 0, 1, None)),
    ("port alone", {"MASTER_PORT": "1234"}, {}, node("agent", 0, 1, None, port=1234)),
    ("port too high", {**PLAIN, "MASTER_PORT": "99999"}, {}, ("MASTER_PORT is '99999'", "65535")),
    ("port is a word", {**PLAIN, "MASTER_PORT": "http"}, {}, ("MASTER_PORT is 'http'",)),
    ("rank is a word", {**PLAIN, "RANK": "zero"}, {}, ("RANK is 'zero'", "whole number >= 0")),
    ("rank is negative", {**PLAIN, "RANK": "-1"}, {}, ("RANK is '-1'",)),
    ("rank is the world", {**PLAIN, "RANK": "2"}, {}, ("RANK is 2", "WORLD_SIZE", "0 to 1")),
    ("world is 0", {**PLAIN, "WORLD_SIZE": "0"}, {}, ("WORLD_SIZE is '0'", ">= 1")),
    ("local rank is 1.0", {**PLAIN, "LOCAL_RANK": "1.0"}, {}, ("LOCAL_RANK is '1.0'",)),
    ("local rank is the local world", torchrun(LOCAL_RANK="8"), {}, ("LOCAL_RANK is 8", "LOCAL_WORLD_SIZE")),
    ("Open MPI rank too high", mpi(OMPI, 1, 1, 0, 1), {}, (f"{OMPI}_RANK is 1", f"{OMPI}_SIZE")),
    ("Slurm rank too high", srun(SLURM_PROCID="7"), {}, ("SLURM_PROCID is 7", "SLURM_STEP_NUM_TASKS")),
    ("Slurm local rank too high", srun(SLURM_LOCALID="1"), {}, ("SLURM_LOCALID is 1", "SLURM_STEP_TASKS_PER_NODE")),
    ("PET_NNODES is a word", trainjob(PET_NNODES="two"), {}, ("PET_NNODES is 'two'",)),
    *((f"{text} processes", trainjob(PET_NPROC_PER_NODE=text), {}, ("PET_NPROC_PER_NODE", repr(text))) for text in ("cpu", "0", "-2", "2.5")),
    ("--nproc-per-node is a word", {}, {"nproc_per_node": "many"}, ("--nproc-per-node is 'many'",)),
    # half-set groups
    ("WORLD_SIZE alone", {"WORLD_SIZE": "4"}, {}, node("agent", 0, 1, None)),
    ("JOB_COMPLETION_INDEX alone", {"JOB_COMPLETION_INDEX": "2"}, {}, node("agent", 0, 1, None)),
    ("A27 RANK alone", {"RANK": "0"}, {}, ("RANK=0 set", "not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR")),
    ("A27 RANK and WORLD_SIZE", {"RANK": "0", "WORLD_SIZE": "2"}, {}, ("RANK=0, WORLD_SIZE=2 set", "not LOCAL_RANK, MASTER_ADDR")),
    ("A27 LOCAL_RANK alone", {"LOCAL_RANK": "0"}, {}, ("LOCAL_RANK=0 set", "not RANK")),
    ("A27 MASTER_ADDR alone", {"MASTER_ADDR": "m"}, {}, ("MASTER_ADDR=m set", "not RANK")),
    ("A27 PET_NODE_RANK alone", {"PET_NODE_RANK": "1"}, {}, ("PET_NODE_RANK=1 set", "not PET_NNODES")),
    ("A27 PMI_RANK alone", {"PMI_RANK": "1"}, {}, ("PMI_RANK=1 set", "not PMI_SIZE")),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "options", "wanted"), [row[1:] for row in FOUND], ids=[row[0] for row in FOUND])
def test_the_place_is_read_from_one_launcher(environ: dict[str, str], options: dict[str, Any], wanted: Any) -> None:
    if isinstance(wanted, tuple):
        with pytest.raises(SettingError) as caught:
            discover(environ, Options(**options))
        line = str(caught.value)
        assert [part for part in wanted if part not in line] == [], line
        assert "\n" not in line
        assert caught.value.code == SETTING
    else:
        got = discover(environ, Options(**options))
        assert dataclasses.replace(got, found=(), warnings=()) == wanted
        assert set(got.found) <= set(environ) | {"--" + name.replace("_", "-") for name in options}


@pytest.mark.parametrize(
    "environ", [{}, torchrun(), pytorchjob(1, "8", 24), trainjob(), elastic(), srun(), PLAIN, CHILD]
)
def test_a_complete_launch_gives_no_warning(environ: dict[str, str]) -> None:
    assert discover(environ, Options()).warnings == ()
