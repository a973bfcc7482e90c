"""The group that is up: collectives with a limit, one rank's bytes for all, ends that every rank hears of."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer.codes import PERMANENT, UNEXPECTED, PeerLost, TrainerError, error_for
from trainer.group.rendezvous import Meeting, meet, open_store

_END_KEY = "end"
_FAREWELL_SECONDS = 5.0
_STORE_SECONDS = 10.0
_LISTEN_SECONDS = 1.0


@dataclass
class Group:
    """Hold one rank's view of the ranks.

    Attributes:
        rank, world, local_rank: this rank's number, the number of ranks, its number on its node.
        device: where this rank computes.
        backend: "nccl" or "gloo", or None where this process is alone and no group is up.
        control: the gloo group beside it, for the agreement and for bytes.
        where: what the rank is doing, for the line about a lost peer.
        closing, listener: the thread that hears of other ranks' ends, and how it is asked to end.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    backend: str | None = None
    control: dist.ProcessGroup | None = None
    where: str = "start-up"
    _store: dist.Store | None = None
    _hosts: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    listener: threading.Thread | None = None

    @property
    def distributed(self) -> bool:
        """Tell whether a process group is up."""
        return self.backend is not None

    @property
    def nodes(self) -> int:
        """Count the hosts that the ranks run on."""
        return len(set(self._hosts)) or 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up `values` over all ranks, in place on each; every rank takes part. Raises PeerLost."""
        if self.distributed:
            with self.waiting():
                dist.all_reduce(values)
        return values

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average `values` over all ranks, in place on each; every rank takes part. Raises PeerLost."""
        return self.sum(values).div_(self.world)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite `tensors` with rank 0's; every rank takes part. Raises PeerLost."""
        if self.distributed:
            with self.waiting():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def from_rank_0(self, produce: Callable[[], bytes]) -> bytes:
        """Run `produce` on rank 0 alone and return its bytes on every rank.

        Raises:
            TrainerError: what `produce` raised on rank 0, on every rank.
            PeerLost: a rank did not take part.
        """
        payload, code = b"", 0
        if self.rank == 0:
            try:
                payload = produce()
            except TrainerError as error:
                payload, code = str(error).encode(), error.code
        if self.distributed:
            payload, code = self._share(payload, code)
        if code:
            raise error_for(code, payload.decode(), shared=True)
        return payload

    def _share(self, payload: bytes, code: int) -> tuple[bytes, int]:
        head = torch.tensor([len(payload), code], dtype=torch.int64)
        with self.waiting():
            dist.broadcast(head, src=0, group=self.control)
            size = int(head[0])
            body = torch.empty(size, dtype=torch.uint8)
            if self.rank == 0 and size:
                body.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            if size:
                dist.broadcast(body, src=0, group=self.control)
        return body.numpy().tobytes(), int(head[1])

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Turn the failure of a wait for other ranks into the error that says who and where; others pass through."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if not self.distributed or isinstance(error, TrainerError) or not _is_lost_peer(error):
                raise
            raise self._explain() from error

    def _explain(self) -> TrainerError:
        """Find out who is missing: a living rank leaves its mark in the store within two seconds of its own failure."""
        assert self._store is not None
        missing = set(range(self.world)) - {self.rank}
        try:
            self._store.set(f"lost/{self.rank}", self.where)
            deadline = time.monotonic() + 2.0
            while missing and time.monotonic() < deadline:
                if self._store.check([_END_KEY]):
                    return _published(self._store.get(_END_KEY))
                missing = {rank for rank in missing if not self._store.check([f"lost/{rank}"])}
                time.sleep(0.05)
        except (RuntimeError, ConnectionError):
            missing = {0}
        if not missing:
            return PeerLost(
                f"a collective failed in {self.where} although every rank answers; see --collective-seconds"
            )
        return PeerLost(f"lost {self._names(sorted(missing))} in {self.where}")

    def _names(self, ranks: list[int]) -> str:
        names = ", ".join(f"{rank} (on {self._hosts[rank]})" for rank in ranks[:8])
        return ("ranks " if len(ranks) > 1 else "rank ") + names + (" ..." if len(ranks) > 8 else "")

    def publish(self, code: int, message: str) -> None:
        """Tell every rank that this one ends with `code`, so that they end with it too and not with a lost peer.

        Rank 0 holds the store, so it stays until the others have heard, for a few seconds at most.
        """
        if self._store is None or code not in PERMANENT | {UNEXPECTED}:
            return
        note = json.dumps({"code": code, "message": message, "rank": self.rank})
        with contextlib.suppress(RuntimeError, ConnectionError):
            told = json.loads(self._store.compare_set(_END_KEY, "", note))
            if self.rank == 0:
                self._wait_for("heard", self.world - 1 if told["rank"] == 0 else self.world - 2)

    def _wait_for(self, key: str, count: int) -> None:
        assert self._store is not None
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self._store.add(key, 0) < count and time.monotonic() < deadline:
            time.sleep(0.02)

    def leave(self) -> None:
        """Take the group down after a good end; rank 0, which holds the store, goes last."""
        if self._store is None:
            return
        self.closing.set()
        if self.listener is not None:
            self.listener.join(timeout=_STORE_SECONDS)
        with contextlib.suppress(RuntimeError, ConnectionError):
            self._store.add("left", 1)
            if self.rank == 0:
                self._wait_for("left", self.world)
        dist.destroy_process_group()


def _is_lost_peer(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, (dist.DistError, ConnectionError)) or "gloo" in text or "NCCL" in text


def _published(note: bytes) -> TrainerError:
    told = json.loads(note)
    return error_for(told["code"], f"rank {told['rank']} ended: {told['message']}", shared=True)


def alone(device: torch.device) -> Group:
    """Return the group of one process that has no peers and needs no process group."""
    return Group(rank=0, world=1, local_rank=0, device=device)


@contextlib.contextmanager
def connect(
    meeting: Meeting, *, rank: int, world: int, local_rank: int, device: torch.device, backend: str, identity: str
) -> Iterator[Group]:
    """Meet the other ranks, and take the group down after a good end.

    Args:
        identity: names this rank's device (its UUID on a GPU): two ranks of one host with one are an error; "" has none.

    Raises:
        SettingError: the port is in use, or two ranks share a device.
        PeerLost: the name does not resolve, or ranks did not come, within the limit; the line names them.
    """
    server = open_store(meeting, rank=rank, world=world)
    store = _own_part(server, meeting)
    hosts = meet(store, meeting, rank=rank, world=world, identity=identity)
    group = Group(rank, world, local_rank, device, backend, where="the first connection", _store=store, _hosts=hosts)
    limit = timedelta(seconds=meeting.collective_seconds)
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    _watch(group, meeting, server.port)
    # NCCL's watchdog aborts the process, which says less than we can: its limit lies behind ours.
    nccl = backend == "nccl"
    with group.waiting():
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world,
            timeout=limit + timedelta(seconds=60) if nccl else limit,
            device_id=device if nccl else None,
        )
        group.control = typing.cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))
    try:
        yield group
    except Exception as error:
        if not (isinstance(error, TrainerError) and error.shared):
            group.publish(getattr(error, "code", UNEXPECTED), str(error) or type(error).__name__)
        raise
    group.leave()


def _own_part(store: dist.Store, meeting: Meeting) -> dist.Store:
    return dist.PrefixStore(f"trainer/{meeting.store_attempt or 0}", store)


def _watch(group: Group, meeting: Meeting, port: int) -> None:
    """Listen for another rank's end in a thread, over a connection of its own: the training thread may be stuck in one."""
    if meeting.on_end is None:
        return
    client = dist.TCPStore(meeting.host, port, None, False, timedelta(seconds=_STORE_SECONDS), wait_for_workers=False)
    arguments = (_own_part(client, meeting), group, meeting.on_end)
    group.listener = threading.Thread(target=_listen, args=arguments, daemon=True, name="listen-for-ends")
    group.listener.start()


def _listen(store: dist.Store, group: Group, on_end: Callable[[int, str], None]) -> None:
    try:
        # Asking again and again, not one long wait: a thread in native code when the process ends would abort it.
        while not store.check([_END_KEY]):
            if group.closing.wait(_LISTEN_SECONDS):
                return
        told = json.loads(store.get(_END_KEY))
        if told["rank"] == group.rank:
            return
        store.add("heard", 1)
    except (RuntimeError, ConnectionError):
        return  # the store has gone; the next collective tells
    on_end(told["code"], f"rank {told['rank']} ended: {told['message']}")
