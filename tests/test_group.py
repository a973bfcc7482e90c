"""The process group with real processes over gloo: collectives, the agreement, who is missing, ends that all hear of."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer import agent
from trainer.codes import DataError, Diverged, PeerLost, SettingError, Stopped
from trainer.group import Agreement, Group, Meeting, Verdict, alone, connect
from trainer.group.rendezvous import meet, open_store
from trainer.stop import Stop

CPU = torch.device("cpu")
HOST = socket.gethostname()
PATIENCE_SECONDS = 90


@dataclass(frozen=True)
class End:
    """How one rank ended: what its body returned, or the error's type, code and line; or the code that `on_end` got."""

    value: Any = None
    error: str = ""
    code: int | None = 0
    line: str = ""
    shared: bool = False


Body = Callable[[Group], Any]

#: This rank's own.
STOP = Stop()


def _rank(
    pipe: connection.Connection,
    body: Body,
    meeting: Meeting,
    listener: socket.socket | None,
    rank: int,
    world: int,
    identity: str,
) -> None:
    torch.set_num_threads(1)

    def tell(end: End) -> None:
        pipe.send(end)
        os._exit(0)

    def on_end(code: int, line: str) -> None:
        time.sleep(1)  # as the trainer does: a rank that is not stuck ends by itself
        tell(End(error="on_end", code=code, line=line))

    descriptor = listener.detach() if listener else None
    try:
        meeting = replace(meeting, listen_fd=descriptor, on_end=on_end, stop=STOP)
        with connect(
            meeting, rank=rank, world=world, local_rank=rank, device=CPU, backend="gloo", identity=identity
        ) as group:
            value = body(group)
        tell(End(value))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the test wants to see it
        code, shared = getattr(error, "code", None), getattr(error, "shared", False)
        line = str(error) if code is not None else traceback.format_exc()
        tell(End(error=type(error).__name__, code=code, line=line, shared=shared))


class Ranks:
    """Start ranks that meet and run `body`."""

    def __init__(
        self,
        body: Body,
        *,
        world: int,
        start: int | None = None,
        identities: tuple[str, ...] = (),
        port: int | None = None,
        **limits: Any,
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "trainer.group"])
        listener = agent.listen("127.0.0.1") if port is None else None
        port = listener.getsockname()[1] if listener else port
        meeting = Meeting("127.0.0.1", port, **({"rendezvous_seconds": 60, "collective_seconds": 60} | limits))
        self.pipes, self.processes = [], []
        for rank in range(world if start is None else start):
            pipe, end = context.Pipe(duplex=False)
            identity = identities[rank] if identities else ""
            arguments = (end, body, meeting, listener if rank == 0 else None, rank, world, identity)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            end.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        if listener:
            listener.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def end(self, rank: int) -> End:
        """Wait until a rank ends and say how."""
        assert self.pipes[rank].poll(PATIENCE_SECONDS), f"rank {rank} did not end"
        try:
            end: End = self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(PATIENCE_SECONDS)
            return End(error="died", code=self.processes[rank].exitcode)
        return end


def run_ranks(body: Body, *, world: int, **options: Any) -> list[End]:
    with Ranks(body, world=world, **options) as ranks:
        return [ranks.end(rank) for rank in range(len(ranks.processes))]


def values(body: Body, *, world: int) -> list[Any]:
    ends = run_ranks(body, world=world)
    assert [end.error for end in ends] == [""] * world, ends
    return [end.value for end in ends]


# Collectives


def _collectives(group: Group) -> Any:
    mine = torch.tensor([group.rank + 1.0, 10.0 * group.rank])
    total, mean = group.sum(mine.clone()), group.mean(mine.clone())
    tensors = [torch.full((2, 2), float(group.rank + 5)), torch.tensor(group.rank + 7)]
    group.broadcast(tensors)
    texts = [group.from_rank_0(lambda size=size: bytes([size % 251]) * size) for size in (0, 1, 100_000)]
    facts = (group.distributed, group.nodes, group.rank, group.world)
    return total.tolist(), mean.tolist(), [tensor.tolist() for tensor in tensors], [len(text) for text in texts], facts


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sum_mean_broadcast_and_bytes_are_the_same_on_every_rank(world: int) -> None:
    ranks = range(world)
    total = [sum(rank + 1.0 for rank in ranks), sum(10.0 * rank for rank in ranks)]
    mean = [value / world for value in total]
    for rank, result in enumerate(values(_collectives, world=world)):
        assert result[0] == total
        assert result[1] == pytest.approx(mean)
        assert result[2:] == ([[[5.0, 5.0], [5.0, 5.0]], 7], [0, 1, 100_000], (True, 1, rank, world))


def test_a_process_alone_needs_no_group() -> None:
    group = alone(CPU)
    assert _collectives(group) == ([1, 0], [1, 0], [[[5, 5], [5, 5]], 7], [0, 1, 100_000], (False, 1, 0, 1))


def _only_rank_0_produces(group: Group) -> Any:
    calls: list[int] = []

    def produce() -> bytes:
        calls.append(group.rank)
        return b"of rank %d" % group.rank

    return group.from_rank_0(produce), calls


def test_bytes_are_produced_on_rank_0_alone() -> None:
    assert values(_only_rank_0_produces, world=2) == [(b"of rank 0", [0]), (b"of rank 0", [])]


def _data_error(group: Group) -> None:
    def produce() -> bytes:
        raise DataError("the file is gone")

    group.from_rank_0(produce)


def test_what_rank_0_finds_wrong_ends_every_rank_with_its_code() -> None:
    assert run_ranks(_data_error, world=3) == [
        End(error="DataError", code=3, line="the file is gone", shared=True)
    ] * 3  # fmt: skip
    with pytest.raises(DataError, match="the file is gone"):
        _data_error(alone(CPU))


def _some_fail(group: Group) -> str:
    def work() -> str:
        if group.rank == group.world - 1:
            raise SettingError("the model is unknown here")
        return f"of rank {group.rank}"

    return group.together(work)


def test_what_one_rank_cannot_do_ends_every_rank_with_its_code() -> None:
    line = "rank 2: the model is unknown here"
    assert run_ranks(_some_fail, world=3) == [End(error="SettingError", code=2, line=line, shared=True)] * 3
    with pytest.raises(SettingError, match="the model is unknown here"):
        _some_fail(alone(CPU))


def _all_succeed(group: Group) -> str:
    return group.together(lambda: f"of rank {group.rank}")


def test_what_all_ranks_can_do_is_each_ones_own() -> None:
    assert values(_all_succeed, world=2) == ["of rank 0", "of rank 1"]
    assert _all_succeed(alone(CPU)) == "of rank 0"


def _surprise(group: Group) -> None:
    def produce() -> bytes:
        raise OSError(28, "No space left on device")

    group.from_rank_0(produce)


def test_an_unexpected_error_of_rank_0_is_heard_by_those_that_wait_for_its_bytes() -> None:
    first, *others = run_ranks(_surprise, world=3)
    assert first.error == "OSError"
    for end in others:
        assert (end.code, end.line) == (1, "rank 0 ended: unexpected OSError: [Errno 28] No space left on device")


# The agreement

FLAGS = {
    "nothing": {},
    "stop on the last rank": {"stop": {-1: 15}},
    "different stops": {"stop": {0: 15, -1: 2}},
    "diverged on rank 0": {"diverged": {0: True}},
    "no data on the last rank": {"data": {-1: True}},
    "all at once": {"stop": {0: 2}, "diverged": {-1: True}, "data": {0: True}},
}


def _ask(group: Group) -> Any:
    """Ask six steps, with flags at step 3 alone, and return what was known at each step, before and after settling."""
    results = {}
    for name, flags in FLAGS.items():
        agreement, known = Agreement(group), []
        for step in range(1, 7):
            here = {kind: ranks.get(group.rank, ranks.get(group.rank - group.world)) for kind, ranks in flags.items()}
            here = here if step == 3 else {}
            finite = torch.tensor(not here.get("diverged"))
            agreement.ask(step=step, stop=here.get("stop") or 0, finite=finite, failed=3 * bool(here.get("data")))
            before = agreement.previous()
            known.append((before, agreement.settled() if step in (3, 6) else before))
        results[name] = known
    return results


@pytest.fixture(scope="module")
def agreed() -> dict[int, list[Any]]:
    return {0: [_ask(alone(CPU))]} | {world: values(_ask, world=world) for world in (1, 2, 3)}


@pytest.mark.parametrize("world", [0, 1, 2, 3], ids=["alone", "1", "2", "3"])
@pytest.mark.parametrize("name", FLAGS)
def test_all_ranks_agree_on_the_highest_flags(agreed: dict[int, list[Any]], world: int, name: str) -> None:
    flags = FLAGS[name]
    for rank in agreed[world]:
        known = rank[name]
        # One step after it was asked, an answer is read; settling reads it at once.
        assert [before.step for before, _ in known[:3]] == [0, 1, 2]
        assert known[2][0] == Verdict(step=2)
        verdict = known[2][1]
        assert verdict.stop == max(flags.get("stop", {0: 0}).values())
        assert (verdict.diverged, verdict.failed) == ("diverged" in flags, 3 * ("data" in flags))
        assert verdict.step == 3
        # What is known stays known; the step is the first bad one.
        last = known[5][1]
        assert replace(last, step=3) == verdict
        assert last.step == (3 if verdict.diverged or verdict.failed else 6)


def test_settling_without_a_question_waits_for_nobody() -> None:
    assert Agreement(alone(CPU)).settled() == Agreement(alone(CPU)).previous() == Verdict()


def test_a_bad_verdict_is_an_error_and_data_come_first() -> None:
    Verdict(step=4, stop=15).raise_if_bad()
    with pytest.raises(Diverged, match="not finite at step 4") as diverged:
        Verdict(step=4, stop=15, diverged=True).raise_if_bad()
    with pytest.raises(DataError, match="at step 5") as data:
        Verdict(step=5, diverged=True, failed=3).raise_if_bad()
    assert diverged.value.shared
    assert data.value.shared


# How the ranks meet


def _meeting(port: int, **changes: Any) -> Meeting:
    return replace(Meeting("127.0.0.1", port, rendezvous_seconds=0.3, collective_seconds=5), **changes)


def test_the_roll_call_names_who_is_missing_to_all_who_came() -> None:
    ends = run_ranks(_collectives, world=5, start=2, rendezvous_seconds=3)
    for end in ends:
        assert (end.error, end.code) == ("PeerLost", 170)
        assert end.line.startswith("waited 3 s (--rendezvous-seconds) at 127.0.0.1:")
        assert end.line.endswith(" for ranks 2, 3, 4 of 5; check that every node was started")


def test_one_missing_rank_and_many_are_named() -> None:
    lines = []
    for world in (2, 40):
        with agent.listen("127.0.0.1") as listener:
            meeting = _meeting(listener.getsockname()[1], listen_fd=os.dup(listener.fileno()))
        store = open_store(meeting, rank=0, world=world)
        with pytest.raises(PeerLost) as error:
            meet(store, meeting, rank=0, world=world, identity="")
        lines.append(str(error.value))
    assert "for rank 1 of 2; " in lines[0]
    assert f"for ranks {', '.join(map(str, range(1, 17)))} ... of 40; " in lines[1]


def test_two_ranks_on_one_device_are_an_error_on_every_rank() -> None:
    ends = run_ranks(_collectives, world=3, identities=("GPU-a", "GPU-b", "GPU-a"))
    line = (
        f"ranks 0 and 2 on {HOST} share one device (GPU-a); "
        "give each its own with --nproc-per-node, CUDA_VISIBLE_DEVICES or the launcher's GPU binding"
    )
    assert ends == [End(error="SettingError", code=2, line=line, shared=True)] * 3


def test_ranks_on_cpus_have_no_device_to_share() -> None:
    assert [end.error for end in run_ranks(_collectives, world=2, identities=("", ""))] == ["", ""]


def test_a_port_in_use_is_a_setting_to_change() -> None:
    with agent.listen("127.0.0.1") as listener, pytest.raises(SettingError) as error:
        open_store(_meeting(port := listener.getsockname()[1]), rank=0, world=2)
    assert str(error.value) == (
        f"rank 0 cannot listen on port {port} of this host (the port is in use); choose another with --master-port"
    )


def test_a_rank_0_that_does_not_answer_is_a_lost_peer(free_port: int) -> None:
    with pytest.raises(PeerLost) as error:
        open_store(_meeting(free_port, rendezvous_seconds=1), rank=1, world=2)
    assert str(error.value) == (
        f"rank 0 did not answer at 127.0.0.1:{free_port} within 1 s (--rendezvous-seconds); "
        "check that node 0 runs and that its address and port are right"
    )


def test_a_rank_0_on_the_wrong_host_is_told_to_look_at_the_address(free_port: int) -> None:
    documentation_address = "192.0.2.1"  # RFC 5737: nobody has it
    with pytest.raises(PeerLost) as error:
        open_store(_meeting(free_port, host=documentation_address), rank=0, world=2)
    assert str(error.value) == (
        f"rank 0 listens, but cannot reach itself at 192.0.2.1:{free_port} within 0.3 s (--rendezvous-seconds); "
        "check --master-addr, and that --node-rank 0 is given to that host"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_said_so(rank: int) -> None:
    with pytest.raises(PeerLost) as error:
        open_store(_meeting(29500, host="no-such-node.invalid"), rank=rank, world=2)
    assert str(error.value).startswith("the name of node 0, 'no-such-node.invalid', does not resolve (")
    assert str(error.value).endswith("after 0.3 s (--rendezvous-seconds); check --master-addr or MASTER_ADDR")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_starts_that_share_a_launchers_store_do_not_hear_each_other() -> None:
    """As under torchrun, whose agent serves the store and keeps it over restarts."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    first = run_ranks(_rank_1_raises, world=2, port=store.port, store_attempt=0)
    assert [end.code for end in first] == [3, 3]
    again = run_ranks(_collectives, world=2, port=store.port, store_attempt=1)
    assert [end.error for end in again] == ["", ""]
    assert again[0].value[:2] == again[1].value[:2] == ([3, 10], [1.5, 5])


# Ends


def _rank_1_raises(group: Group) -> None:
    group.where = "step 7"
    if group.rank == 1:
        raise DataError("picture 12 cannot be read")
    group.sum(torch.zeros(1))


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_end_with_the_code_of_the_one_that_found_the_error(world: int) -> None:
    ends = run_ranks(_rank_1_raises, world=world)
    assert ends[1] == End(error="DataError", code=3, line="picture 12 cannot be read")
    for end in (end for rank, end in enumerate(ends) if rank != 1):
        assert (end.code, end.line) == (3, "rank 1 ended: picture 12 cannot be read")


def _rank_1_is_stopped(group: Group) -> int:
    if group.rank == 1:
        STOP.receive(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not STOP.signum and time.monotonic() < deadline:
        time.sleep(0.05)  # in no collective: as a rank whose data do not come
    group.sum(torch.zeros(1))
    return STOP.signum


def test_a_rank_that_waits_for_no_peer_hears_of_a_stop_too() -> None:
    assert values(_rank_1_is_stopped, world=3) == [signal.SIGTERM] * 3


def _rank_0_is_stopped(group: Group) -> None:
    def produce() -> bytes:
        raise Stopped(signal.SIGINT)

    group.from_rank_0(produce)


def test_a_stop_of_what_rank_0_does_for_all_ends_all_with_its_code() -> None:
    assert [(end.error, end.code) for end in run_ranks(_rank_0_is_stopped, world=2)] == [("Stopped", 130)] * 2


def _rank_0_raises(group: Group) -> None:
    if group.rank == 0:
        raise SettingError("the model cannot be imported")
    group.sum(torch.zeros(1))


def test_rank_0_takes_the_store_along_only_after_the_others_have_heard() -> None:
    ends = run_ranks(_rank_0_raises, world=3)
    assert ends[0] == End(error="SettingError", code=2, line="the model cannot be imported")
    assert {(end.code, end.line) for end in ends[1:]} == {(2, "rank 0 ended: the model cannot be imported")}


def _foreign_code(group: Group) -> None:
    error = RuntimeError("HTTP\n  not found")
    error.code = 404  # type: ignore[attr-defined]
    if group.rank == 0:
        raise error
    group.sum(torch.zeros(1))


def test_a_foreign_error_with_a_code_of_its_own_is_an_unexpected_one() -> None:
    ends = run_ranks(_foreign_code, world=2)
    assert ends[0].code == 404  # the very exception goes up; the command line knows it is none of ours
    assert (ends[1].code, ends[1].line) == (1, "rank 0 ended: unexpected RuntimeError: HTTP not found")


def _users_exit(group: Group) -> None:
    if group.rank == 0:
        raise SystemExit(0)
    group.sum(torch.zeros(1))


def test_an_exit_in_code_of_the_users_ends_all_ranks() -> None:
    first, second = run_ranks(_users_exit, world=2)
    assert first.error == "SystemExit"
    assert (second.code, second.line) == (1, "rank 0 ended: unexpected SystemExit: 0")


def _rank_0_is_stuck(group: Group) -> None:
    if group.rank == 1:
        raise Diverged("the loss is not finite")
    time.sleep(PATIENCE_SECONDS)


def test_a_rank_that_is_stuck_outside_a_collective_hears_of_an_end() -> None:
    first, second = run_ranks(_rank_0_is_stuck, world=2)
    assert second == End(error="Diverged", code=4, line="the loss is not finite")
    assert first == End(error="on_end", code=4, line="rank 1 ended: the loss is not finite")


def _rank_dies(group: Group) -> Any:
    group.where = "step 7"
    group.sum(torch.zeros(1))
    if group.rank == group.world - 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        group.sum(torch.zeros(1))
    return None


@pytest.mark.parametrize("world", [3, 5])
def test_a_rank_that_dies_is_named_by_the_others(world: int) -> None:
    ends = run_ranks(_rank_dies, world=world)
    victim = world - 2
    assert ends.pop(victim) == End(error="died", code=-signal.SIGKILL)
    for end in ends:
        assert end.code == 170
        assert end.line.endswith(f"lost rank {victim} (on {HOST}) in step 7"), ends


def test_a_dead_rank_0_is_named_by_the_others() -> None:
    first, second = run_ranks(_rank_dies, world=2)
    assert first.error == "died"
    assert (second.code, second.line) == (
        170,
        f"lost rank 0 (on {HOST}), which holds the ranks' store, in step 7",
    )


def _rank_stops(group: Group) -> Any:
    group.where = "step 7"
    group.sum(torch.zeros(1))
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.sum(torch.zeros(1))


def test_a_rank_0_that_stands_still_holds_nobody_for_ever() -> None:
    """As a node that vanishes: the store that it holds neither answers nor refuses."""
    with Ranks(_rank_stops, world=2, collective_seconds=1.5) as ranks:
        end = ranks.end(1)
    assert (end.error, end.code) == ("PeerLost", 170)
    assert end.line == f"lost rank 0 (on {HOST}), which holds the ranks' store, in step 7"


def _rank_is_late(group: Group) -> Any:
    group.where = "step 7"
    if group.rank == 1:
        time.sleep(PATIENCE_SECONDS)
    group.sum(torch.zeros(1))


def test_a_rank_that_runs_but_does_not_come_is_said_to_run() -> None:
    first, second = run_ranks(_rank_is_late, world=2, collective_seconds=1.5)
    line = f"waited in vain for rank 1 (on {HOST}) in step 7 (--collective-seconds); still running"
    assert first == End(error="PeerLost", code=170, line=line)
    assert second == End(error="on_end", code=170, line=f"rank 0 ended: {line}")


def _gloo_gives_up(group: Group) -> Any:
    group.where = "step 7"
    if group.rank == 1:
        time.sleep(60)  # does not come
    with group.waiting():
        # As gloo says it of what waited beside the collective whose limit was over; its own name is not in it.
        raise RuntimeError("Application timeout caused pair closure")


def test_a_wait_that_gloo_gives_up_without_its_name_is_a_lost_peer() -> None:
    with Ranks(_gloo_gives_up, world=2) as ranks:
        end = ranks.end(0)
    assert (end.error, end.code) == ("PeerLost", 170)
    assert end.line == f"waited in vain for rank 1 (on {HOST}) in step 7 (--collective-seconds); still running"


def _users_errors(group: Group) -> Any:
    with group.waiting():
        if group.rank == 0:
            raise ConnectionResetError("the user's own database")
        group.sum(torch.zeros(1))


def test_a_connection_of_the_users_own_is_no_lost_peer() -> None:
    first, second = run_ranks(_users_errors, world=2)
    assert first.error == "ConnectionResetError"
    assert (second.code, second.line) == (1, "rank 0 ended: unexpected ConnectionResetError: the user's own database")


def _stopped(group: Group) -> Any:
    if group.rank == 0:
        time.sleep(1)  # saves
    raise Stopped(15)


def test_a_stop_is_no_end_that_others_must_hear_of() -> None:
    assert [(end.error, end.code) for end in run_ranks(_stopped, world=3)] == [("Stopped", 143)] * 3


def _rank_0_saves(group: Group) -> Any:
    group.sum(torch.zeros(1))
    if group.rank == 0:
        time.sleep(1)
    return group.rank


def test_a_rank_may_leave_while_rank_0_still_saves() -> None:
    assert values(_rank_0_saves, world=3) == [0, 1, 2]
