"""The group that is up: collectives with a limit, and one rank's bytes for all.

How the ranks meet and how they tell each other of their ends lives beside it.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from trainer import log
from trainer.codes import Stopped, TrainerError, end_for, error_for
from trainer.group.ends import Ends
from trainer.group.rendezvous import Meeting, meet, open_store

T = typing.TypeVar("T")

_STORE_SECONDS = 10.0


@dataclass
class Group:
    """Hold one rank's view of the ranks.

    Attributes:
        rank, world, local_rank: this rank's number, the number of ranks, its number on its node.
        device: where this rank computes.
        backend: "nccl" or "gloo", or None where this process is alone and no group is up.
        control: the gloo group beside it, for the agreement and for bytes.
        where: what the rank is doing, for the line about a lost peer.
        ends: how this rank's end is told and the others' are heard, or None without a process group.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    backend: str | None = None
    control: dist.ProcessGroup | None = None
    where: str = "start-up"
    ends: Ends | None = None

    @property
    def distributed(self) -> bool:
        """Tell whether a process group is up."""
        return self.backend is not None

    @property
    def nodes(self) -> int:
        """Count the hosts that the ranks run on."""
        return len(set(self.ends.hosts)) if self.ends else 1

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
            TrainerError, Stopped: what `produce` raised on rank 0, on every rank.
            PeerLost: a rank did not take part.
        """
        payload, code = b"", 0
        if self.rank == 0:
            try:
                payload = produce()
            except (TrainerError, Stopped) as error:
                payload, code = str(error).encode(errors="surrogateescape"), error.code
        payload, code = self._share(payload, code)
        if code:
            raise end_for(code, payload.decode(errors="surrogateescape"))
        return payload

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its result; if it fails on any rank, all ranks end alike.

        Raises:
            TrainerError: the error of the first rank on which it failed, with its code, on every rank.
            PeerLost: a rank did not take part.
        """
        ends = torch.zeros(self.world, dtype=torch.int64)
        try:
            result, failure = work(), None
        except TrainerError as error:
            ends[self.rank], failure = error.code, error
        if self.distributed:
            with self.waiting():
                dist.all_reduce(ends, group=self.control)
        if not ends.any():
            return result
        first = int(ends.nonzero()[0])
        if failure is not None and self.rank != 0 and not ends.all():
            log.error(str(failure))  # rank 0 speaks for all of a shared error; here on the node where it is
        line, code = self._share(str(failure).encode(errors="surrogateescape"), int(ends[first]), source=first)
        origin = "" if ends.all() or first == 0 else f"rank {first}: "
        raise error_for(code, origin + line.decode(errors="surrogateescape"), shared=True)

    def _share(self, payload: bytes, code: int, *, source: int = 0) -> tuple[bytes, int]:
        if not self.distributed:
            return payload, code
        head = torch.tensor([len(payload), code], dtype=torch.int64)
        with self.waiting():
            dist.broadcast(head, src=source, group=self.control)
            size = int(head[0])
            body = torch.empty(size, dtype=torch.uint8)
            if self.rank == source and size:
                body.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            if size:
                dist.broadcast(body, src=source, group=self.control)
        return body.numpy().tobytes(), int(head[1])

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Turn the failure of a wait for other ranks into the error that says who and where; others pass through."""
        try:
            yield
        except RuntimeError as error:
            if self.ends is None or isinstance(error, TrainerError) or not _is_lost_peer(error):
                raise
            raise self.ends.explain(self.where, reason=str(error).strip().splitlines()[0]) from error


#: What is in the text of an error of the two libraries; the last is gloo's own, of a second wait on a connection that it has given up.
_LIBRARIES = ("gloo", "NCCL", "Application timeout caused pair closure")


def _is_lost_peer(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _LIBRARIES)


def alone(device: torch.device) -> Group:
    """Return the group of one process that has no peers and needs no process group."""
    return Group(rank=0, world=1, local_rank=0, device=device)


@contextlib.contextmanager
def connect(
    meeting: Meeting, *, rank: int, world: int, local_rank: int, device: torch.device, backend: str, identity: str
) -> Iterator[Group]:
    """Meet the other ranks; tell them of an error, and take the group down after a good end or a stop.

    Args:
        identity: names this rank's device (its UUID on a GPU): two ranks of one host with one are an error; "" has none.

    Raises:
        SettingError: the port is in use, or two ranks share a device.
        PeerLost: the name does not resolve, or ranks did not come, within the limit; the line names them.
    """
    server = open_store(meeting, rank=rank, world=world)
    store = _own_part(server, meeting)
    hosts = meet(store, meeting, rank=rank, world=world, identity=identity)
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    ends = Ends(store, rank, hosts)
    group = Group(rank, world, local_rank, device, backend, where="the first connection", ends=ends)
    try:
        with group.waiting():
            client = dist.TCPStore(
                meeting.host, server.port, None, False, timedelta(seconds=_STORE_SECONDS), wait_for_workers=False
            )
            ends.listen(_own_part(client, meeting), on_end=meeting.on_end, stop=meeting.stop)
            _initialise(group, store, seconds=meeting.collective_seconds)
            yield group
    except Stopped:
        _leave(ends)
        raise
    except (Exception, SystemExit) as error:  # code of the user's may call sys.exit
        ends.publish(error)
        raise
    _leave(ends)


def _own_part(store: dist.Store, meeting: Meeting) -> dist.Store:
    return dist.PrefixStore(f"trainer/{meeting.store_attempt or 0}", store)


def _initialise(group: Group, store: dist.Store, *, seconds: float) -> None:
    # NCCL's watchdog aborts the process, which says less than we can: its limit lies behind ours.
    limit, nccl = timedelta(seconds=seconds), group.backend == "nccl"
    dist.init_process_group(
        group.backend,
        store=dist.PrefixStore("group", store),
        rank=group.rank,
        world_size=group.world,
        timeout=limit + timedelta(seconds=60) if nccl else limit,
        device_id=group.device if nccl else None,
    )
    group.control = typing.cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))


def _leave(ends: Ends) -> None:
    ends.leave()
    dist.destroy_process_group()
