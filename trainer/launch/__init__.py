"""Where this process stands among the ranks: `discover(environ, options) -> Rank | Node`.

A `Rank` was started by another launcher and trains in place; a `Node` stands for node k of n, and its ranks are still to
be started. Everything here is a pure function of a mapping and a few options: no os.environ, no sockets, no processes,
no torch. Starting ranks is `agent.py`, joining them is `group.py`, counting GPUs is `devices.py`.

    places.py        Options, Rank, Node, Elastic, and what is derived from them
    reader.py        read one value from options and variables, remember what was read
    hostlist.py      Slurm's `gpu[07-08,11]` and `2(x3),1`
    recognisers.py   one function per launcher
    elastic.py       minimum:maximum nodes, by options or PET_*
    discovery.py     the order in which the launchers are asked
"""

from trainer.launch.discovery import discover
from trainer.launch.hostlist import expand_counts, expand_hosts
from trainer.launch.places import (
    Elastic,
    Node,
    Options,
    Rank,
    child_environment,
    describe,
    find_idle_devices,
)
from trainer.launch.reader import is_service_link

__all__ = [
    "Elastic",
    "Node",
    "Options",
    "Rank",
    "child_environment",
    "describe",
    "discover",
    "expand_counts",
    "expand_hosts",
    "find_idle_devices",
    "is_service_link",
]
