"""How the ranks find each other: name, store, roll call; every wait has a limit and names who did not come.

torch's own rendezvous says only "timed out", after twice the limit where a name does not resolve, and names nobody.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from trainer.codes import PeerLost, SettingError, TrainerError, error_for

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Meeting:
    """Say where and how the ranks meet.

    Attributes:
        host, port: where rank 0 listens.
        rendezvous_seconds, collective_seconds: the limits of the waits at the start, and in one collective.
        listen_fd: rank 0's listening socket where the agent opened it, else None.
        store_attempt: where somebody else serves the store, and keeps it over restarts, the number of this start; else None.
        on_end: called in a watcher thread with (code, line) when another rank published that it ends.
    """

    host: str
    port: int
    rendezvous_seconds: float
    collective_seconds: float
    listen_fd: int | None = None
    store_attempt: int | None = None
    on_end: Callable[[int, str], None] | None = None


def open_store(meeting: Meeting, *, rank: int, world: int) -> dist.TCPStore:
    """Open the store that rank 0 holds, or that the launcher serves.

    Raises:
        SettingError: rank 0 cannot listen on the port.
        PeerLost: the host's name does not resolve, or nobody listens there, within the limit.
    """
    deadline = time.monotonic() + meeting.rendezvous_seconds
    _resolve(meeting, deadline)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    serves = rank == 0 and meeting.store_attempt is None
    listener = meeting.listen_fd if serves else None
    try:
        return dist.TCPStore(
            meeting.host, meeting.port, world, serves, left, wait_for_workers=False, master_listen_fd=listener
        )
    except (RuntimeError, ConnectionError) as error:
        if serves:
            raise SettingError(
                f"rank 0 cannot listen on port {meeting.port} of this host ({_reason(error)}); choose another with --master-port"
            ) from error
        raise PeerLost(
            f"rank 0 did not answer at {meeting.host}:{meeting.port} within {meeting.rendezvous_seconds:g} s (--rendezvous-seconds); "
            "check that node 0 runs and that its address and port are right"
        ) from error


def _reason(error: BaseException) -> str:
    text = str(error)
    return "the port is in use" if "EADDRINUSE" in text or "in use" in text else text.splitlines()[0][:120]


def _resolve(meeting: Meeting, deadline: float) -> None:
    while True:
        try:
            socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PeerLost(
                    f"the name of node 0, {meeting.host!r}, does not resolve ({error.strerror}) after {meeting.rendezvous_seconds:g} s "
                    "(--rendezvous-seconds); check --master-addr or MASTER_ADDR"
                ) from error
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def meet(store: dist.Store, meeting: Meeting, *, rank: int, world: int, identity: str) -> list[str]:
    """Wait until every rank is here and return their host names, by rank.

    Rank 0 calls the roll and publishes the result, so that all ranks say the same.

    Raises:
        PeerLost: ranks are missing after the limit; the line names them.
        SettingError: two ranks of one host have the same identity (device).
    """
    store.set(f"here/{rank}", json.dumps([socket.gethostname(), identity]))
    if rank == 0:
        store.set("roll", _call_roll(store, meeting, world=world))
    try:
        # Rank 0 may have come later than this rank, and gives the others the whole limit.
        store.wait(["roll"], timedelta(seconds=2 * meeting.rendezvous_seconds + 10))
        roll = json.loads(store.get("roll"))
    except (RuntimeError, ConnectionError) as error:
        raise PeerLost(f"lost rank 0 ({meeting.host}:{meeting.port}) while the ranks met") from error
    if "code" in roll:
        raise error_for(roll["code"], roll["line"], shared=True)
    return [str(host) for host in roll["hosts"]]


def _call_roll(store: dist.Store, meeting: Meeting, *, world: int) -> str:
    missing = set(range(world))
    deadline = time.monotonic() + meeting.rendezvous_seconds
    while missing and time.monotonic() < deadline:
        missing = {rank for rank in missing if not store.check([f"here/{rank}"])}
        if missing:
            time.sleep(_POLL_SECONDS)
    try:
        if missing:
            raise PeerLost(_missing_line(missing, meeting, world))
        present = [json.loads(store.get(f"here/{rank}")) for rank in range(world)]
        _check_devices(present)
    except TrainerError as error:
        return json.dumps({"code": error.code, "line": str(error)})
    return json.dumps({"hosts": [host for host, _ in present]})


def _missing_line(missing: set[int], meeting: Meeting, world: int) -> str:
    some = sorted(missing)[:16]
    names = ", ".join(map(str, some)) + (" ..." if len(missing) > len(some) else "")
    return (
        f"waited {meeting.rendezvous_seconds:g} s (--rendezvous-seconds) at {meeting.host}:{meeting.port} "
        f"for {'rank' if len(missing) == 1 else 'ranks'} {names} of {world}; check that every node was started"
    )


def _check_devices(present: list[list[str]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for rank, (host, identity) in enumerate(present):
        if not identity:
            continue
        if (host, identity) in seen:
            raise SettingError(
                f"ranks {seen[host, identity]} and {rank} on {host} share one device ({identity}); "
                "give each its own with --nproc-per-node, CUDA_VISIBLE_DEVICES or the launcher's GPU binding"
            )
        seen[host, identity] = rank
