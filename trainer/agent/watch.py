"""One start of the ranks, until the last has ended: signals are forwarded, a hang or a first end starts the clock for the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainer import codes, log
from trainer.agent.ends import Ends, meaning
from trainer.agent.flight import FlightRecorder
from trainer.agent.hangs import Hangs, show_stacks
from trainer.beat import Phase, Records
from trainer.metrics import AgentRecorder, reason_of

#: What the agent waits for; blocked in it.
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
#: How long the other ranks may take to notice that one has failed, before they are killed. Where that one has lost a peer,
#: it has waited a whole limit, and the others with it: who is left then is the one it waited for. While ranks start they may wait
#: for each other by nothing that tells them of a killed one.
_PEER_SECONDS, _SAME_PEER_SECONDS, _START_PEER_SECONDS = 20.0, 4.0, 2.0
_STARTING = (Phase.SETUP, Phase.PREPARE)
#: How long a killed rank may take to be gone; freeing much memory takes seconds, a call to a dead disk or device has no end.
_GONE_SECONDS = 30.0


@dataclass
class Child:
    """Hold one rank's process; `index` is its number on the node."""

    rank: int
    index: int
    process: subprocess.Popen[bytes]
    killed: bool = False

    @property
    def code(self) -> int | None:
        """Return the exit code as a shell tells it, or None while the child runs."""
        return None if self.process.returncode is None else codes.from_process(self.process.returncode)


def watch(
    children: Sequence[Child],
    *,
    grace: float,
    records: Records | None,
    metrics: AgentRecorder,
    flight: FlightRecorder | None = None,
) -> Ends:
    """Wait for the children, forward stop signals, and end what has not ended in time; return how they ended.

    Raises nothing, and leaves no child and no zombie, but for one that the kernel does not let go.
    """
    ends, deadline, hangs = Ends(), None, Hangs(records)
    while running := [child for child in children if child.code is None]:
        received = _receive(hangs.seconds if deadline is None else max(0.0, deadline - time.monotonic()))
        if received in (signal.SIGTERM, signal.SIGINT):
            metrics.stop_signal()
            _forward(received, running, ends)
        elif not received and deadline is not None:
            if all(child.killed for child in running):
                _give_up(running, ends)
                break
            _kill(running, ends, flight)
            deadline = time.monotonic() + _GONE_SECONDS
        elif deadline is None and (hung := hangs.find({child.index: child.process.pid for child in running})):
            _end_hang(running, hung, ends, metrics, flight)
            deadline = time.monotonic() + _GONE_SECONDS
        for child in running:
            if child.process.poll() is not None:
                _note(child, ends, metrics, only=len(children) == 1)
        _reap_orphans(children)
        if not ends.stop and not ends.hung and (stopped := codes.STOP_CODES & set(ends.codes.values())):
            # A rank was stopped by somebody else: ranks that still wait for it at the start would not hear of it.
            _forward(max(stopped) - 128, running, ends)
        if deadline is None and (ends.stop or any(ends.codes.values())):
            # After a stop rank 0 saves; after anything else there is nothing to wait for.
            deadline = time.monotonic() + (grace if ends.stop else _peer_seconds(ends, running, records))
    return ends


def _peer_seconds(ends: Ends, running: Sequence[Child], records: Records | None) -> float:
    """Return how long those that still run may take to end by themselves after a failure."""
    if ends.first is None:
        return _SAME_PEER_SECONDS
    was_killed = (
        ends.first[1] not in codes.MEANINGS
    )  # else the ranks that start may still have a line of their own to say
    if records is not None and was_killed:
        signs = records.read()
        if all(signs[child.index].phase in _STARTING for child in running):
            return min(_PEER_SECONDS, _START_PEER_SECONDS)
    return _PEER_SECONDS


def _receive(seconds: float) -> int:
    """Wait for one of SIGNALS and return its number, or 0 when the time is over."""
    received = signal.sigtimedwait(SIGNALS, seconds)
    # When this process was stopped until the time was over (docker pause), CPython returns memory it has not written to.
    return received.si_signo if received is not None and received.si_signo in SIGNALS else 0


def _forward(signum: int, running: Sequence[Child], ends: Ends) -> None:
    ends.stop = max(ends.stop, signum)
    for child in running:
        child.process.send_signal(signum)


def _note(child: Child, ends: Ends, metrics: AgentRecorder, *, only: bool) -> None:
    assert child.code is not None
    if reason := reason_of(child.code, hung=child.rank in ends.hung, killed=child.killed):
        metrics.rank_exit(reason)
    was_first = ends.first
    ends.add(child.rank, child.code, killed=child.killed)
    if ends.first is was_first:
        return
    # A rank says in its own line why it ends; the agent speaks for one that could not, and says which was the first.
    line = f"rank {child.rank} ended first, with code {child.code} ({meaning(child.code)})"
    if child.code not in codes.MEANINGS:
        log.warning(line)
    elif not only:
        log.info(line)


def _kill(running: Sequence[Child], ends: Ends, flight: FlightRecorder | None) -> None:
    why = "the grace time is over" if ends.stop else "a peer has ended"
    for child in running:
        log.warning(f"rank {child.rank} has not ended by itself and is killed: {why}")
    if not ends.stop:
        _show(running, flight)
    for child in running:
        child.killed = True
        child.process.kill()


def _end_hang(
    running: Sequence[Child], hung: dict[int, str], ends: Ends, metrics: AgentRecorder, flight: FlightRecorder | None
) -> None:
    """Say which ranks hang, have every rank of the node print its stacks, and kill all of them."""
    ends.hung = tuple(child.rank for child in running if child.index in hung)
    for child in running:
        if child.index in hung:
            metrics.hang()
            log.error(f"rank {child.rank} is hung: {hung[child.index]}")
    _show(running, flight)
    log.error("all ranks of this node are killed: nothing goes on without the one that is hung")
    for child in running:
        child.killed = True
        child.process.kill()


def _show(running: Sequence[Child], flight: FlightRecorder | None) -> None:
    if flight is not None:
        flight.ask(child.rank for child in running)  # they write while the stacks are printed
    show_stacks({child.rank: child.process for child in running})
    if flight is not None and (written := flight.written()):
        log.error(f"NCCL's flight recorder: {', '.join(map(str, written))}")


def _give_up(running: Sequence[Child], ends: Ends) -> None:
    ends.unkillable = True
    for child in running:
        log.error(
            f"rank {child.rank} (process {child.process.pid}) does not end, though it was killed: the kernel holds it, "
            "as for a disk or device that does not answer; the agent ends without it"
        )
        ends.add(child.rank, codes.from_process(-signal.SIGKILL), killed=True)


def _reap_orphans(children: Sequence[Child]) -> None:
    """As PID 1 of a container, take note of the ends of processes whose own parent has ended: else they stay as zombies."""
    ours = {child.process.pid for child in children if child.code is None}
    try:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in ours:
                return  # the loop looks after these itself, at the next signal
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        pass  # there are no children at all
