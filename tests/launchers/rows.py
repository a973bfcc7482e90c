"""The table: every launcher, the line that is typed, the variables that a pod or an MPI gives it, and what must be found.

How a row is run is in conftest.py, what is asserted about it in test_table.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """Hold one job.

    Attributes:
        name: the launcher, as the printed table calls it.
        nodes, ranks: how many nodes it stands for, and ranks in all.
        found: the launcher that the trainer names in its first line.
        line: what is typed; {node} is the number of the node, {port} a free port.
        typed: how often it is typed, with {node} 0, 1, ...
        variables: what each of the typed lines finds in its environment.
        first: what differs for the first of them.
        programs: what has to be installed; without it the row is skipped.
    """

    name: str
    nodes: int
    ranks: int
    found: str
    line: str = "trainer train"
    typed: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    programs: tuple[str, ...] = ()


SLURM = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "squeue", "scancel")
MPI = ("mpirun",)

#: An option wins over what a launcher says: all of these share this machine, and other jobs run on it.
PORT = {"TRAINER_MASTER_PORT": "{port}"}
HERE = PORT | {"TRAINER_MASTER_ADDR": "127.0.0.1"}

REFERENCE = Row("none: the reference", 1, 1, "none", "trainer train --launcher none")


def agent(nodes: int, each: int) -> Row:
    """The agent, by options."""
    line = f"trainer train --nproc-per-node {each}"
    if nodes > 1:
        line += f" --nnodes {nodes} --node-rank {{node}} --master-addr 127.0.0.1 --master-port {{port}}"
    return Row("agent", nodes, nodes * each, "agent", line, typed=nodes)


def torchrun(nodes: int, each: int) -> Row:
    """The ranks of torchrun: alone, or on nodes whose numbers are given."""
    where = "--standalone"
    if nodes > 1:
        where = f"--nnodes {nodes} --node-rank {{node}} --master-addr 127.0.0.1 --master-port {{port}}"
    line = f"torchrun {where} --nproc-per-node {each} -m trainer train"
    return Row("torchrun", nodes, nodes * each, "torchrun", line, typed=nodes)


def pytorchjob(count: int, per_pod: str) -> Row:
    """A PyTorchJob's master and workers. `per_pod` is nprocPerNode; WORLD_SIZE counts pods where it is no number."""
    each = int(per_pod) if per_pod.isdigit() else 1
    variables = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "{port}",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": "{port}",
        "RANK": "{node}",
        "PET_NODE_RANK": "{node}",
        "WORLD_SIZE": str(count * each),
        "PET_NPROC_PER_NODE": per_pod,
        "PET_NNODES": str(count),
    }
    name = f"PyTorchJob, nprocPerNode {per_pod}"
    return Row(name, count, count * each, "pod", typed=count, variables=variables)


def two_pods(name: str, *variables: Mapping[str, str], first: Mapping[str, str] | None = None) -> Row:
    """Two pods that find these variables, and no others."""
    found = {key: value for some in variables for key, value in some.items()}
    return Row(name, 2, 2, "pod", typed=2, variables=found, first=first or {})


OPERATOR = {"RANK": "{node}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
MANIFEST = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "{port}", "PET_NODE_RANK": "{node}"}
INDEX = {"JOB_COMPLETION_INDEX": "{node}"}


def other_mpi(name: str, found: str, *variables: str) -> Row:
    """Two ranks that find what an MPI sets: rank, size, local rank and local size."""
    values = dict(zip(variables, ("{node}", "2", "{node}", "2"), strict=True))
    return Row(name, 1, 2, found, typed=2, variables=PORT | values)


def mpirun(name: str, nodes: int, ranks: int, line: str, *, programs: tuple[str, ...] = MPI) -> Row:
    """A line that starts the ranks by Open MPI; MASTER_ADDR of a made-up host is replaced."""
    variables = HERE if "node0" in line else PORT if nodes > 1 else {}  # on one host the port is that of the job
    return Row(name, nodes, ranks, "openmpi", line, variables=variables, programs=programs)


def slurm(name: str, nodes: int, ranks: int, line: str, *, found: str = "slurm") -> Row:
    """A line that Slurm runs."""
    return Row(name, nodes, ranks, found, line, programs=SLURM)


INDEXED = "JOB_COMPLETION_INDEX={node} PET_NNODES=2 PET_MASTER_ADDR=node0 PET_MASTER_PORT=29500 trainer train"
LEGACY = "python -m torch.distributed.launch --master-port {port} --nproc-per-node 2"
STANDALONE = "torchrun --standalone --nproc-per-node 2"
RENDEZVOUS = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1"
HOSTS = "mpirun -n 2 --host node0,node1 -x MASTER_ADDR=node0"
IN_SLURM = "salloc --nodes 2 --ntasks 2 mpirun -x MASTER_ADDR=$(hostname)"

ROWS = [
    *(agent(nodes, each) for nodes, each in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2))),
    Row("torch.multiprocessing", 1, 2, "spawn", "trainer train --launcher spawn --nproc-per-node 2"),
    *(torchrun(nodes, each) for nodes, each in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2))),
    Row("torch.distributed.launch", 1, 2, "torchrun", f"{LEGACY} -m trainer train"),
    Row("torch.distributed.launch, use-env", 1, 2, "torchrun", f"{LEGACY} --use-env -m trainer train"),
    pytorchjob(1, "auto"),
    pytorchjob(1, "2"),
    pytorchjob(2, "auto"),
    pytorchjob(2, "1"),
    pytorchjob(2, "2"),
    pytorchjob(3, "auto"),
    two_pods("PyTorchJob of an older operator", OPERATOR),
    two_pods("PyTorchJob of operator 1.3", OPERATOR, first={"MASTER_ADDR": "localhost"}),
    two_pods("TrainJob", MANIFEST, INDEX, {"PET_NPROC_PER_NODE": "auto"}),
    two_pods("Indexed Job", MANIFEST, INDEX),
    Row("Indexed Job, no PET_NODE_RANK", 2, 2, "pod", INDEXED, typed=2, variables=HERE),
    two_pods("JobSet", MANIFEST, INDEX),
    two_pods("Volcano", OPERATOR),
    mpirun("mpirun", 1, 2, "mpirun -n 2 trainer train"),
    mpirun("mpirun, two hosts", 2, 2, f"{HOSTS} trainer train"),
    mpirun("mpirun, each task a node", 2, 4, f"{HOSTS} --bind-to none trainer train --nproc-per-node 2"),
    mpirun("mpirun in salloc", 2, 2, f"{IN_SLURM} trainer train", programs=(*SLURM, *MPI)),
    mpirun("mpirun in sbatch", 2, 2, "sbatch mpi.sbatch", programs=(*SLURM, *MPI)),
    other_mpi(
        "MVAPICH", "mvapich", *(f"MV2_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    ),
    other_mpi("MPICH, Intel MPI", "pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    slurm("srun", 1, 2, "srun --ntasks 2 trainer train"),
    slurm("srun, pmi2", 1, 2, "srun --ntasks 2 --mpi pmi2 trainer train"),
    slurm("srun, uneven", 2, 3, "srun --nodes 2 --ntasks 3 trainer train"),
    slurm("srun, each task a node", 2, 4, "srun --nodes 2 --ntasks-per-node 1 trainer train --nproc-per-node 2"),
    slurm("srun in sbatch, tasks are nodes", 2, 4, "sbatch train.sbatch"),
    slurm("torchrun in srun", 1, 2, f"srun --ntasks 1 {STANDALONE} -m trainer train", found="torchrun"),
    slurm("torchrun in srun", 2, 2, f"srun --nodes 2 --ntasks 2 {RENDEZVOUS} -m trainer train", found="torchrun"),
    slurm("alone in sbatch", 1, 1, "sbatch --ntasks 2 --wrap 'trainer train'", found="agent"),
    slurm("alone in salloc", 1, 1, "salloc --ntasks 2 trainer train", found="agent"),
    slurm("alone in salloc's shell", 1, 1, "echo trainer train | salloc --ntasks 2", found="agent"),
]
