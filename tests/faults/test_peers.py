"""Two nodes of which one is cut off or stands still: each that lives ends with 170 within its limit, and says whom it waited for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.distributed.conftest import Job, messages, reach, wait_until

LIMIT_SECONDS, MORE_SECONDS = 8, 15
FIXED = (
    "--log-format", "json", "--log-every", "1", "--workers", "0", "--limit-train", "64", "--limit-test", "20",
    "--global-batch-size", "8", "--eval-every", "1000000", "--checkpoint-every", "0", "--steps", "1000000",
    "--collective-seconds", str(LIMIT_SECONDS), "--nproc-per-node", "1", "--nnodes", "2", "--master-port", "29500",
    "--run-name", "job",
)  # fmt: skip
ADDRESSES = ("10.213.7.1", "10.213.7.2")
#: Where frames go that nobody is to get: an address that no card has.
NOBODY = "02:00:00:00:00:99"


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, timeout=20)


class Network:
    """Two network namespaces that a cable joins, one for each node."""

    def __init__(self) -> None:
        self.names = [f"trainer-{os.getpid()}-{node}" for node in (0, 1)]
        self.made: list[str] = []

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            self.made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.names[1])
        for name, address in zip(self.names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self.made:
            ip("netns", "delete", name)

    def start(self, job: Job, node: int, *more: str) -> subprocess.Popen[str]:
        where = ("--node-rank", str(node), "--master-addr", ADDRESSES[0])
        command = [sys.executable, "-m", "trainer", "train", *FIXED, *where, *more]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], *command], cwd=job.folder,
            env=job.env | {"GLOO_SOCKET_IFNAME": "eth0"}, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        job.started.append(process)
        return process

    def pull(self) -> None:
        """Pull the cable: both see at once that it is gone."""
        ip("-n", self.names[1], "link", "set", "eth0", "down")

    def swallow(self) -> None:
        """Have the cable swallow everything in both directions: nobody sees anything."""
        for name, address in zip(self.names, reversed(ADDRESSES), strict=True):
            ip("-n", name, "neigh", "replace", address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.make()
        yield made
    finally:
        made.remove()


LOST = r"lost rank {} \(on \S+\)(, which holds the ranks' store,)? in (step \d+|the evaluation .*)"


@pytest.mark.parametrize("how", ["pull", "swallow"])
def test_nodes_that_are_cut_off_from_each_other_both_end_and_name_the_other(
    how: str, network: Network, job: Job
) -> None:
    nodes = [network.start(job, node) for node in (0, 1)]
    reach(nodes[0], 5)
    getattr(network, how)()
    since = time.monotonic()
    ends = [process.communicate(timeout=100) for process in nodes]
    assert time.monotonic() - since < LIMIT_SECONDS + MORE_SECONDS
    for node, (_, err) in enumerate(ends):
        assert nodes[node].returncode == 170, err
        assert re.fullmatch(LOST.format(1 - node), messages(err)[0]), err


def test_nodes_that_cannot_reach_each_other_from_the_start_say_so(network: Network, job: Job) -> None:
    network.swallow()
    nodes = [network.start(job, node, "--rendezvous-seconds", "4") for node in (0, 1)]
    ends = [process.communicate(timeout=100) for process in nodes]
    assert [process.returncode for process in nodes] == [170, 170], ends
    (first,), (second,) = (messages(err) for _, err in ends)
    assert re.match(rf"waited 4 s \(--rendezvous-seconds\) at {ADDRESSES[0]}:29500 for rank 1 of 2; ", first)
    assert re.match(rf"rank 0 did not answer at {ADDRESSES[0]}:29500 within 4 s \(--rendezvous-seconds\); ", second)


@pytest.mark.parametrize("still", [0, 1])
def test_a_node_that_stands_still_is_named_and_ends_when_it_goes_on(still: int, network: Network, job: Job) -> None:
    """As a machine whose container is paused, or that has no memory left. Node 0 holds the ranks' store."""
    nodes = [network.start(job, node) for node in (0, 1)]
    reach(nodes[0], 5)
    os.killpg(nodes[still].pid, signal.SIGSTOP)
    since = time.monotonic()
    _, err = nodes[1 - still].communicate(timeout=100)
    assert time.monotonic() - since < LIMIT_SECONDS + MORE_SECONDS
    assert nodes[1 - still].returncode == 170, err
    assert re.fullmatch(LOST.format(still), messages(err)[0]), err
    os.killpg(nodes[still].pid, signal.SIGCONT)
    _, err = nodes[still].communicate(timeout=LIMIT_SECONDS + MORE_SECONDS)
    assert nodes[still].returncode == 170, err
    wait_until(lambda: not job.left(), seconds=5)
