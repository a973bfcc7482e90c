"""How the ranks find each other: name, store, roll call; every wait has a limit and names who did not come.

torch's own rendezvous says only "timed out", after twice the limit where a name does not resolve, and names nobody.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from trainer.codes import PEER_LOST, PeerLost, SettingError, TrainerError, error_for
from trainer.stop import Stop

#: How long rank 0, which may hold the store, stays for ranks that have not yet read in it why all end.
FAREWELL_SECONDS = 5.0
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
        stop: told of a stop signal that another rank received, and the others of one that this rank received.
    """

    host: str
    port: int
    rendezvous_seconds: float
    collective_seconds: float
    listen_fd: int | None = None
    store_attempt: int | None = None
    on_end: Callable[[int, str], None] | None = None
    stop: Stop | None = None


def open_store(meeting: Meeting, *, rank: int, world: int) -> dist.TCPStore:
    """Open the store that rank 0 holds, or that the launcher serves.

    Raises:
        SettingError: rank 0 cannot listen on the port.
        PeerLost: the host's name does not resolve, or nobody listens there, within the limit.
    """
    deadline = time.monotonic() + meeting.rendezvous_seconds
    serves = rank == 0 and meeting.store_attempt is None
    _resolve(meeting, deadline)
    if not serves:
        _reach(meeting, deadline)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    listener = meeting.listen_fd if serves else None
    try:
        return dist.TCPStore(
            meeting.host, meeting.port, world, serves, left, wait_for_workers=False, master_listen_fd=listener
        )
    except RuntimeError as error:
        if serves and "listen" in str(error):
            raise SettingError(
                f"rank 0 cannot listen on port {meeting.port} of this host ({_reason(error)}); choose another with --master-port"
            ) from error
        raise _no_answer(meeting, serves=serves) from error


def _reason(error: BaseException) -> str:
    text = str(error)
    return "the port is in use" if "EADDRINUSE" in text or "in use" in text else text.splitlines()[0][:120]


def _no_answer(meeting: Meeting, *, serves: bool) -> PeerLost:
    where, limit = (
        f"at {meeting.host}:{meeting.port}",
        f"within {meeting.rendezvous_seconds:g} s (--rendezvous-seconds)",
    )
    if serves:
        return PeerLost(
            f"rank 0 listens, but cannot reach itself {where} {limit}; "
            "check --master-addr, and that --node-rank 0 is given to that host"
        )
    return PeerLost(
        f"rank 0 did not answer {where} {limit}; check that node 0 runs and that its address and port are right"
    )


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
        _pause(deadline)


def _reach(meeting: Meeting, deadline: float) -> None:
    """Wait until somebody listens: torch's own attempts, where nobody does, print stacks."""
    while True:
        try:
            socket.create_connection(
                (meeting.host, meeting.port), timeout=max(1.0, deadline - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise _no_answer(meeting, serves=False) from error
        _pause(deadline)


def _pause(deadline: float) -> None:
    time.sleep(min(0.3, max(0.0, deadline - time.monotonic())))


def meet(store: dist.Store, meeting: Meeting, *, rank: int, world: int, identity: str) -> list[str]:
    """Wait until every rank is here and return their hosts' names, by rank.

    Rank 0 calls the roll and publishes the result, so that all ranks say the same.

    Raises:
        PeerLost: ranks are missing after the limit; the line names them.
        SettingError: two ranks of one host have the same identity (device).
    """
    try:
        store.set(_here(rank), json.dumps([socket.gethostname(), identity]))
        if rank == 0:
            _publish_roll(store, meeting, world=world)
        # Rank 0 may have come later than this rank, and gives the others the whole limit.
        store.wait(["roll"], timedelta(seconds=2 * meeting.rendezvous_seconds + 10))
        roll = json.loads(store.get("roll"))
        store.set(f"read/{rank}", "")
    except RuntimeError as error:
        raise PeerLost(f"lost rank 0 ({meeting.host}:{meeting.port}) while the ranks met") from error
    if "code" in roll:
        raise error_for(roll["code"], roll["line"], shared=roll["code"] != PEER_LOST)
    return [str(host) for host in roll["hosts"]]


def _publish_roll(store: dist.Store, meeting: Meeting, *, world: int) -> None:
    missing = wait_for_keys(store, [_here(rank) for rank in range(world)], seconds=meeting.rendezvous_seconds)
    present = [rank for rank in range(world) if _here(rank) not in missing]
    try:
        if missing:
            raise PeerLost(_missing_line(set(range(world)) - set(present), meeting, world))
        hosts = [json.loads(store.get(_here(rank))) for rank in present]
        _check_devices(hosts)
    except TrainerError as error:
        store.set("roll", json.dumps({"code": error.code, "line": str(error)}))
        # Rank 0 raises it too and ends, and with it the store.
        wait_for_keys(store, [f"read/{rank}" for rank in present if rank], seconds=FAREWELL_SECONDS)
    else:
        store.set("roll", json.dumps({"hosts": [host for host, _ in hosts]}))


def _here(rank: int) -> str:
    return f"here/{rank}"


def wait_for_keys(store: dist.Store, keys: Iterable[str], *, seconds: float) -> set[str]:
    """Wait until all `keys` are in the store and return those that are not, after the limit."""
    missing = set(keys)
    deadline = time.monotonic() + seconds
    while missing := {key for key in missing if not store.check([key])}:
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    return missing


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
