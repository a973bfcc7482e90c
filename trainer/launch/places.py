"""What a launch can be: the options, a Rank, a Node, and what follows from one. How they are found out is not here."""

from __future__ import annotations

from dataclasses import dataclass

LOCALHOST = "127.0.0.1"

#: Launchers that start one process per task and leave it to the user how many tasks there are on a host.
TASK_LAUNCHERS = ("openmpi", "mvapich", "slurm", "pmi")


@dataclass(frozen=True)
class Options:
    """Hold what the command line says about the launch; None means that it says nothing.

    Attributes:
        launcher: auto, agent, spawn, none, or the name of the one launcher to ask.
        nnodes: a number, or minimum:maximum for an elastic job.
        nproc_per_node: a number, or auto or gpu for one process per visible device.
        local_rank: what the legacy torch.distributed.launch appends as an argument.
    """

    launcher: str = "auto"
    nnodes: str | None = None
    node_rank: int | None = None
    nproc_per_node: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_rank: int | None = None


@dataclass(frozen=True)
class Rank:
    """Stand for one rank that another process started; it trains in place.

    Attributes:
        local_world_size, node_rank, nodes: None where the launcher does not tell.
        master_port: None where no port is agreed on: a world of one, or our agent hands over a listening socket.
        found: the variables and options that this was read from.
        warnings: one line each, for the log.
        store_attempt: where the launcher itself serves a store at that address (torchrun), the number of its start, since
            the store outlives it; else None, and rank 0 serves it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None = None
    node_rank: int | None = None
    nodes: int | None = None
    master_addr: str = LOCALHOST
    master_port: int | None = None
    launcher: str = "none"
    found: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    store_attempt: int | None = None


@dataclass(frozen=True)
class Elastic:
    """Describe a set of nodes that may shrink and grow.

    Attributes:
        endpoint: where they meet, as host:port.
        run_id, conf, max_restarts, local_addr: what torchrun calls --rdzv-id, --rdzv-conf, --max-restarts and --local-addr.
    """

    minimum: int
    maximum: int
    endpoint: str
    run_id: str | None = None
    conf: tuple[tuple[str, str], ...] = ()
    max_restarts: int | None = None
    local_addr: str | None = None


@dataclass(frozen=True)
class Node:
    """Stand for one node whose ranks are still to be started.

    Attributes:
        processes: ranks on this node; None means one per visible device, and one where there is none.
        master_port: None on a single node, where any free port will do.
        elastic: set where the number of nodes may change; then node_rank is 0, nodes the minimum, and the address where they meet.
        found, warnings: as in `Rank`.
    """

    node_rank: int = 0
    nodes: int = 1
    processes: int | None = None
    master_addr: str = LOCALHOST
    master_port: int | None = None
    launcher: str = "agent"
    found: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    elastic: Elastic | None = None


def child_environment(node: Node, index: int, *, processes: int, master_port: int | None) -> dict[str, str]:
    """Return the variables of rank `index` of this node; libraries read them before torch.distributed is up.

    MASTER_PORT is left out if `master_port` is None. Every node is taken to run the same number of processes.
    """
    assert 0 <= index < processes
    values = {
        "RANK": node.node_rank * processes + index,
        "WORLD_SIZE": node.nodes * processes,
        "LOCAL_RANK": index,
        "LOCAL_WORLD_SIZE": processes,
        "NODE_RANK": node.node_rank,
        "GROUP_RANK": node.node_rank,
        "GROUP_WORLD_SIZE": node.nodes,
        "MASTER_ADDR": node.master_addr,
        "MASTER_PORT": master_port,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def describe(place: Rank | Node) -> str:
    """Return one log line: what this process is, who started it, where rank 0 is, and from which variables."""
    parts = [_describe_rank(place) if isinstance(place, Rank) else _describe_node(place)]
    parts.append(f"launcher {place.launcher}")
    if not isinstance(place, Node) or place.elastic is None:
        host = f"[{place.master_addr}]" if ":" in place.master_addr else place.master_addr
        parts.append(f"master {host}" if place.master_port is None else f"master {host}:{place.master_port}")
    parts.append("read from " + ", ".join(place.found) if place.found else "no launch variables")
    return "; ".join(parts)


def _describe_rank(place: Rank) -> str:
    def of(total: int | None) -> str:
        return "" if total is None else f" of {total}"

    text = f"rank {place.rank} of {place.world_size}, local rank {place.local_rank}{of(place.local_world_size)}"
    return text if place.node_rank is None else f"{text}, node {place.node_rank}{of(place.nodes)}"


def _describe_node(place: Node) -> str:
    ranks = "one rank per visible device" if place.processes is None else f"ranks on it: {place.processes}"
    if place.elastic is not None:
        limits = f"{place.elastic.minimum} to {place.elastic.maximum}"
        return f"one of {limits} elastic nodes that meet at {place.elastic.endpoint}, {ranks}"
    return f"node {place.node_rank} of {place.nodes}, {ranks}"


def find_idle_devices(place: Rank | Node, *, devices: int) -> str | None:
    """Return a warning if srun or MPI started one task on a host with several visible devices, else None."""
    if not isinstance(place, Rank) or place.launcher not in TASK_LAUNCHERS:
        return None
    if place.local_world_size != 1 or devices < 2:
        return None
    return (
        f"one {place.launcher} task on this host, but {devices} visible devices: {devices - 1} stay idle; "
        "start one task per device, or add --nproc-per-node auto so that this task starts a rank on each"
    )
