"""What an elastic node tells torch's agent, and under which address it announces itself; whole runs are in tests/faults."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import Say
from trainer.cli.elastic import find_address, settings_for
from trainer.codes import PEER_LOST, PeerLost
from trainer.config import build
from trainer.launch import Elastic, Node

#: What is there beside the wanted, where options and PET_* say nothing.
PLAIN = {
    "min_nodes": 1, "max_nodes": 3, "nproc_per_node": 2, "run_id": "a-run", "rdzv_endpoint": "node0:29400", "rdzv_backend": "c10d",
    "rdzv_configs": {"join_timeout": 600}, "max_restarts": 100, "local_addr": None,
}  # fmt: skip

# id, options, what PET_* say, what differs from PLAIN
ASKED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("nothing", {}, {}, {}),
    ("the run's id", {}, {"run_id": "it"}, {"run_id": "it"}),
    ("restarts of the pod", {}, {"max_restarts": 7}, {"max_restarts": 7}),
    ("restarts by option", {"max_restarts": 0}, {"max_restarts": 7}, {"max_restarts": 0}),
    ("the wait", {"rendezvous_seconds": 0.5}, {}, {"rdzv_configs": {"join_timeout": 1}}),
    (
        "conf wins",
        {"rendezvous_seconds": 9.0},
        {"conf": (("join_timeout", "5"), ("last_call_timeout", "2"))},
        {"rdzv_configs": {"join_timeout": "5", "last_call_timeout": "2"}},
    ),
]


@pytest.mark.parametrize(("options", "told", "wanted"), [row[1:] for row in ASKED], ids=[row[0] for row in ASKED])
def test_what_torchs_agent_is_told(options: dict[str, Any], told: dict[str, Any], wanted: dict[str, Any]) -> None:
    config = build({"run_name": "a-run", **options})
    found = settings_for(config, Elastic(1, 3, "node0:29400", **told), processes=2, address=None)
    assert {name: found[name] for name in PLAIN} == PLAIN | wanted
    assert "SIGTERM" not in found["signals_to_handle"]  # that one is the trainer's own


def test_torchs_agent_takes_all_that_it_is_told() -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    found = settings_for(build({"run_name": "a-run"}), Elastic(1, 3, "node0:29400"), processes=2, address="10.0.0.1")
    made = LaunchConfig(**found, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
    assert {name: getattr(made, name) for name in found} == found


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def node(host: str, port: int, **more: Any) -> Node:
    return Node(0, 1, 1, host, port, "pod", elastic=Elastic(1, 3, f"{host}:{port}", **more))


@pytest.mark.parametrize(
    ("host", "more", "wanted"),
    [
        ("localhost", {}, "localhost"),  # the name by which the others come here
        ("127.0.0.1", {"local_addr": "10.0.0.1"}, "10.0.0.1"),
        ("no-such-host.invalid", {"conf": (("is_host", "true"),)}, None),  # as torch would, without a wait
    ],
)
def test_the_node_where_all_meet_waits_for_nobody(host: str, more: dict[str, Any], wanted: str | None) -> None:
    assert find_address(node(host, 9, **more), seconds=0) == wanted


@pytest.mark.parametrize(("told", "wanted"), [(None, "127.0.0.1"), ("10.0.0.1", "10.0.0.1")])
def test_another_node_announces_the_address_from_which_it_came(
    told: str | None, wanted: str, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.cli.elastic._is_here", lambda *_: False)
    port = listener.getsockname()[1]
    assert find_address(node("localhost", port, local_addr=told), seconds=0) == wanted


def test_nobody_where_all_meet_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.cli.elastic._is_here", lambda *_: False)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        port = silent.getsockname()[1]
        with pytest.raises(
            PeerLost, match=f"nobody answered at 127.0.0.1:{port}, where the nodes meet, within 0 s"
        ) as caught:
            find_address(node("127.0.0.1", port), seconds=0)
    assert caught.value.code == PEER_LOST
    assert "Connection refused" in str(caught.value)


def test_an_evaluation_is_not_elastic(say: Say) -> None:
    said = say("eval", "nowhere", env={"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "127.0.0.1:29400"})
    assert said.code == 2
    assert "for `trainer eval` on this node alone add --launcher agent" in said.err
