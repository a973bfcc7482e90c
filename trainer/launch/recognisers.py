"""Read a Rank or a Node from what one launcher sets; which launcher is asked first is in discovery.py.

Each function takes all its values from one launcher: rank from one and local rank from another is never right.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trainer.codes import SettingError
from trainer.launch.elastic import read_elastic
from trainer.launch.hostlist import expand_counts, expand_hosts
from trainer.launch.places import LOCALHOST, Node, Rank
from trainer.launch.reader import Reader

#: torch's default, and what TrainJob sets; a PyTorchJob sets 23456.
DEFAULT_PORT = 29500

#: Derived ports: below those that the kernel gives to outgoing connections (from 32768).
_FIRST_PORT, _PORTS = 20000, 10000

#: Launcher -> its names for rank, size, local rank and local size.
MPI_NAMES = {
    "openmpi": tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mvapich": tuple(f"MV2_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

#: How each MPI passes a variable on to all ranks.
_MPI_EXPORT = {
    "openmpi": "mpirun -x MASTER_ADDR=HOST",
    "mvapich": "mpirun_rsh ... MASTER_ADDR=HOST trainer ...",
    "pmi": "mpiexec -genv MASTER_ADDR HOST",
}

_PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_POD = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def read_agent_child(reader: Reader) -> Rank:
    """Read a rank that our own agent started; without MASTER_PORT, rank 0 was handed a listening socket."""
    reader.use("TRAINER_AGENT_PID")
    return _read_worker(reader, "agent")


def read_torchrun(reader: Reader) -> Rank:
    """Read a worker of torchrun, which decides everything: options over it are refused."""
    _refuse(reader, "torchrun", "--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")
    return _read_worker(reader, "torchrun")


def read_env(reader: Reader) -> Rank:
    """Read a rank that the plain variables describe: the legacy torch.distributed.launch, or a script by hand."""
    _refuse(reader, "another launcher (RANK and LOCAL_RANK are given)", "--nnodes", "--node-rank", "--nproc-per-node")
    return _read_worker(reader, "env")


def _read_worker(reader: Reader, launcher: str) -> Rank:
    rank, size = _read_rank(reader, "RANK", "WORLD_SIZE")
    local_rank = reader.demand("LOCAL_RANK", "--local-rank")
    local_size = reader.number("LOCAL_WORLD_SIZE", minimum=1)
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    node_rank = reader.number("GROUP_RANK", "NODE_RANK")
    nodes = reader.number("GROUP_WORLD_SIZE", minimum=1)
    address = reader.address("--master-addr", "MASTER_ADDR")
    if address is None and size not in (1, local_size):
        raise SettingError(f"RANK and WORLD_SIZE={size} are set, but MASTER_ADDR is not; set it to the host of rank 0")
    port = reader.port("--master-port", "MASTER_PORT")
    if port is None and launcher != "agent" and size > 1:
        port = DEFAULT_PORT
    place = Rank(rank, size, local_rank, local_size, node_rank, nodes, address or LOCALHOST, port, launcher=launcher)
    if launcher == "torchrun" and reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return replace(place, store_attempt=reader.number("TORCHELASTIC_RESTART_COUNT") or 0)
    return place


def read_openmpi(reader: Reader) -> Rank | Node:
    """Read a rank of Open MPI's mpirun."""
    return _read_mpi(reader, "openmpi")


def read_mvapich(reader: Reader) -> Rank | Node:
    """Read a rank of MVAPICH's mpirun_rsh or mpiexec."""
    return _read_mpi(reader, "mvapich")


def read_pmi(reader: Reader) -> Rank | Node:
    """Read a rank of MPICH's or Intel MPI's mpiexec."""
    return _read_mpi(reader, "pmi")


def _read_mpi(reader: Reader, launcher: str) -> Rank | Node:
    rank_name, size_name, local_name, local_size_name = MPI_NAMES[launcher]
    rank, size = _read_rank(reader, rank_name, size_name)
    if size > 1 and not reader.has(local_name):
        raise SettingError(f"{rank_name} and {size_name}={size} are set, but {local_name} is not; set all or none")
    # Some process managers tell a lone process no more than its rank and the size.
    local_rank = reader.number(local_name) or 0
    local_size = reader.number(local_size_name, minimum=1) or (1 if size == 1 else None)
    _check_below(local_name, local_rank, local_size_name, local_size)
    one_host = local_size == size
    address = reader.address("--master-addr", "MASTER_ADDR") or (LOCALHOST if one_host else None)
    if address is None:
        raise SettingError(
            f"{size_name} is {size}, on more than one host, but MASTER_ADDR is not set; "
            f"name rank 0's host by --master-addr or {_MPI_EXPORT[launcher]}"
        )
    port = reader.port("--master-port", "MASTER_PORT")
    if port is None and size > 1:
        port = _openmpi_port(reader) if one_host and launcher == "openmpi" else DEFAULT_PORT
    node_rank, nodes = (0, 1) if one_host else (None, None)
    return _place_task(reader, Rank(rank, size, local_rank, local_size, node_rank, nodes, address, port, launcher))


def _openmpi_port(reader: Reader) -> int:
    """Derive a port from the job's name, so that two jobs on one host do not meet; over several hosts one is to be opened."""
    name = reader.text("PMIX_NAMESPACE")
    return DEFAULT_PORT if name is None else _FIRST_PORT + zlib.crc32(name.encode()) % _PORTS


def read_slurm(reader: Reader) -> Rank | Node:
    """Read a task of an srun step; the tasks per node may be uneven, as with `--ntasks` alone."""
    size_name = reader.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size_name is None or not reader.has("SLURM_LOCALID"):
        raise SettingError("SLURM_STEP_ID is set, but SLURM_LOCALID or SLURM_STEP_NUM_TASKS is not; set all or none")
    rank, size = _read_rank(reader, "SLURM_PROCID", size_name)
    local_rank = reader.demand("SLURM_LOCALID")
    node_rank = reader.number("SLURM_NODEID")
    tasks = reader.text("SLURM_STEP_TASKS_PER_NODE")
    counts = expand_counts(tasks) if tasks else (1,) if size == 1 else ()
    local_size = counts[node_rank] if node_rank is not None and node_rank < len(counts) else None
    _check_below("SLURM_LOCALID", local_rank, "SLURM_STEP_TASKS_PER_NODE", local_size)
    port = reader.port("--master-port", "MASTER_PORT") or (_slurm_port(reader) if size > 1 else None)
    nodes = len(counts) or None
    address = _slurm_address(reader, one_host=size in (1, local_size))
    return _place_task(reader, Rank(rank, size, local_rank, local_size, node_rank, nodes, address, port, "slurm"))


def _slurm_address(reader: Reader, *, one_host: bool) -> str:
    address = reader.address("--master-addr", "MASTER_ADDR")
    if address is not None:
        return address
    name = reader.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if name is not None:
        return expand_hosts(reader.text(name) or "", name=name)[0]
    if not one_host:
        raise SettingError("SLURM_STEP_NODELIST and MASTER_ADDR are not set; name the host of task 0 by --master-addr")
    return LOCALHOST


def _slurm_port(reader: Reader) -> int:
    """Derive a port that is the same for all tasks of a step, and another for the next step or job on the host."""
    job, step = (reader.number(name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 101 + step) % _PORTS


def _place_task(reader: Reader, rank: Rank) -> Rank | Node:
    """Turn a task of srun or MPI into a Node where --nproc-per-node asks it to start ranks of its own."""
    if not reader.has("--nproc-per-node"):
        hint = f"{rank.launcher} (add --nproc-per-node, and each task stands for a node)"
        _refuse(reader, hint, "--nnodes", "--node-rank")
        return rank
    for option, told in (("--nnodes", rank.world_size), ("--node-rank", rank.rank)):
        given = reader.number(option)
        if given not in (None, told):
            raise SettingError(
                f"{option} is {given}, but {rank.launcher} says {told}; drop {option}, or use --launcher agent"
            )
    processes = reader.processes("--nproc-per-node")
    return Node(rank.rank, rank.world_size, processes, rank.master_addr, rank.master_port, rank.launcher)


def read_pod(reader: Reader) -> Node:
    """Read a pod that stands for a node: PET_* as torchrun reads them, or an operator's RANK, the pod's index."""
    processes = ("--nproc-per-node", "PET_NPROC_PER_NODE")
    if not reader.has("--nnodes") and reader.has("PET_NNODES", "PET_RDZV_ENDPOINT"):
        return read_elastic(reader, "pod", nodes_name="PET_NNODES", processes=processes, default_port=DEFAULT_PORT)
    names = ("--nnodes", "PET_NNODES", *(["WORLD_SIZE"] if reader.has(*_POD) else []))
    node = read_node(reader, "pod", nodes_name=reader.first(*names), processes=processes)
    if node.elastic is None:
        _check_world(reader, node)
    return node


def read_node(
    reader: Reader, launcher: str, *, nodes_name: str | None, processes: tuple[str, ...] = ("--nproc-per-node",)
) -> Node:
    """Read a node whose number of nodes is in `nodes_name`, where None is a single node, and minimum:maximum an elastic job.

    Raises:
        SettingError: one of several nodes, but not which one, or not where node 0 is.
    """
    if nodes_name and ":" in (reader.text(nodes_name) or ""):
        return read_elastic(reader, launcher, nodes_name=nodes_name, processes=processes, default_port=DEFAULT_PORT)
    nodes = reader.demand(nodes_name, minimum=1) if nodes_name else 1
    rank_names = ("--node-rank", *(["PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK"] if nodes_name else []))
    node_rank = reader.number(*rank_names)
    if node_rank is None and nodes > 1:
        raise SettingError(
            f"{nodes_name} is {nodes}, but not which node this is; add --node-rank (from 0) or PET_NODE_RANK"
        )
    if node_rank is not None and node_rank >= nodes:
        where = f"{nodes_name} is {nodes}" if nodes_name else "--nnodes is not given"
        raise SettingError(f"{reader.first(*rank_names)} is {node_rank}, but {where}; nodes are counted from 0")
    address = reader.address("--master-addr", "PET_MASTER_ADDR", "MASTER_ADDR")
    if address is None and nodes > 1:
        raise SettingError(f"{nodes_name} is {nodes}, but not where node 0 is; add --master-addr or PET_MASTER_ADDR")
    port = reader.port("--master-port", "PET_MASTER_PORT", "MASTER_PORT") or (DEFAULT_PORT if nodes > 1 else None)
    return Node(node_rank or 0, nodes, reader.processes(*processes), address or LOCALHOST, port, launcher)


def _check_world(reader: Reader, node: Node) -> None:
    """Refuse a WORLD_SIZE that fits neither the pod's own variables nor the options over them."""
    if not reader.has("WORLD_SIZE"):
        return
    world = reader.demand("WORLD_SIZE", minimum=1)
    told = (reader.number("PET_NNODES", minimum=1) or world, reader.processes("PET_NPROC_PER_NODE"))
    for nodes, processes in (told, (node.nodes, node.processes)):
        # Operators write the number of pods, or of all ranks; how many one per device makes is not known here.
        if world == nodes or (world % nodes == 0 if processes is None else world == nodes * processes):
            return
    ranks = "one rank per device" if told[1] is None else f"{told[1]} ranks on each"
    raise SettingError(
        f"WORLD_SIZE is {world}, but PET_NNODES is {told[0]}, with {ranks}; "
        "it must be the number of nodes or of all ranks; correct one of them"
    )


def _read_rank(reader: Reader, rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = reader.demand(rank_name), reader.demand(size_name, minimum=1)
    _check_below(rank_name, rank, size_name, size)
    return rank, size


def _check_below(name: str, number: int, size_name: str, size: int | None) -> None:
    if size is not None and number >= size:
        raise SettingError(f"{name} is {number}, but by {size_name} it is 0 to {size - 1}; correct what sets them")


def _refuse(reader: Reader, launcher: str, *options: str) -> None:
    given = [name for name in options if reader.has(name)]
    if given:
        names = " and ".join(given)
        raise SettingError(
            f"{names} given, but {launcher} already started the ranks; drop the option, or use --launcher agent"
        )


@dataclass(frozen=True)
class Recogniser:
    """Know one launcher: any one of the `needs`, when all its names are set, is enough to `read` it."""

    needs: tuple[tuple[str, ...], ...]
    read: Callable[[Reader], Rank | Node]


#: Every launcher by name, in the order to ask: the innermost first. Open MPI under Slurm has SLURM_PROCID as well, and
#: `srun --mpi=pmi2` PMI_RANK.
RECOGNISERS: Mapping[str, Recogniser] = {
    "torchrun": Recogniser((("TORCHELASTIC_RUN_ID", *_PLAIN),), read_torchrun),
    "env": Recogniser((_PLAIN, ("RANK", "WORLD_SIZE", "--local-rank")), read_env),
    "openmpi": Recogniser((MPI_NAMES["openmpi"][:2],), read_openmpi),
    "mvapich": Recogniser((MPI_NAMES["mvapich"][:2],), read_mvapich),
    "pod": Recogniser((("PET_NNODES",), _POD), read_pod),
    "slurm": Recogniser((("SLURM_STEP_ID", "SLURM_PROCID"),), read_slurm),
    "pmi": Recogniser((MPI_NAMES["pmi"][:2],), read_pmi),
}
