"""Supervise this node's ranks as child processes: start them, forward signals, end what is left, name the first cause.

The agent imports no torch, so it is up at once, stays small, and is not caught in what catches a rank. It knows nothing of
models or data, and it gets the children's environments from its caller.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer import codes, log

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
_STOP_CODES = {codes.INTERRUPTED, codes.TERMINATED}
_PR_SET_PDEATHSIG = 1
#: How long the other ranks may take to notice that one has failed, before they are killed.
_PEER_SECONDS = 20.0


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    killed: bool = False

    @property
    def code(self) -> int | None:
        """Return the exit code as a shell tells it, or None while the child runs."""
        return None if self.process.returncode is None else codes.from_process(self.process.returncode)


@dataclass
class Ends:
    """Collect how the ranks ended, and tell the node's exit code.

    Attributes:
        stop: the stop signal that was forwarded, or 0; the highest, as the ranks agree on it.
        first: (rank, code) of the first end that is a cause: not 0, not a lost peer, not a signal that we sent.
    """

    stop: int = 0
    first: tuple[int, int] | None = None
    codes: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, code: int, *, killed: bool = False) -> None:
        """Take note of one rank's end; `killed` says that we killed it."""
        self.codes[rank] = code
        ours = killed or (self.stop and code == 128 + self.stop)
        if self.first is None and not ours and code not in (codes.OK, codes.PEER_LOST):
            self.first = (rank, code)

    @property
    def code(self) -> int:
        """Return the exit code of the node: the first cause's, else the stop's, else a lost peer's."""
        if self.first is not None:
            return self.first[1]
        if all(code == codes.OK for code in self.codes.values()):
            return codes.OK
        return 128 + self.stop if self.stop else codes.PEER_LOST


def listen(address: str) -> socket.socket:
    """Open the socket on a free port where rank 0 will hold the store: no other run can take the port meanwhile."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def supervise(
    command: Sequence[str],
    *,
    environments: Sequence[Mapping[str, str]],
    first_rank: int,
    grace: float,
    listener: socket.socket | None,
) -> int:
    """Run `command` once per environment and return the node's exit code.

    Args:
        first_rank: the number of the first child, for messages.
        grace: seconds between a stop signal and SIGKILL.
        listener: handed to the first child, whose environment must name its descriptor; closed here.
    """
    # Blocked signals are taken one by one below: no handler runs in the middle of anything, and it works as PID 1.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    prepare = functools.partial(_prepare_child, agent=os.getpid())
    children = []
    for index, environment in enumerate(environments):
        passed = (listener.fileno(),) if listener and index == 0 else ()
        process = subprocess.Popen(command, env=environment, pass_fds=passed, preexec_fn=prepare)
        children.append(_Child(first_rank + index, process))
    if listener:
        listener.close()
    return _watch(children, grace=grace)


def _prepare_child(*, agent: int) -> None:
    # The kernel kills the child when the agent ends, however it ends: no rank outlives its supervisor.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(codes.UNEXPECTED)  # it ended before that
    # SIGINT stays blocked until the child asks for it: in a starting interpreter it makes a stack and code 1.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS - {signal.SIGINT})


def _watch(children: Sequence[_Child], *, grace: float) -> int:
    ends, deadline = Ends(), None
    while running := [child for child in children if child.code is None]:
        wait = max(0.0, deadline - time.monotonic()) if deadline is not None else 3600.0
        received = signal.sigtimedwait(_SIGNALS, wait)
        if received is None and deadline is not None:
            _kill(running, ends)
            deadline = time.monotonic() + 1.0
        elif received is not None and received.si_signo != signal.SIGCHLD:
            _forward(received.si_signo, running, ends)
        for child in running:
            if child.process.poll() is not None:
                _note(child, ends, only=len(children) == 1)
        if not ends.stop and (stopped := _STOP_CODES & set(ends.codes.values())):
            # A rank was stopped by somebody else: ranks that still wait for it at the start would not hear of it.
            _forward(max(stopped) - 128, running, ends)
        if deadline is None and (ends.stop or any(ends.codes.values())):
            # After a stop rank 0 saves; after anything else there is nothing to wait for.
            deadline = time.monotonic() + (grace if ends.stop else _PEER_SECONDS)
    return ends.code


def _forward(signum: int, running: Sequence[_Child], ends: Ends) -> None:
    ends.stop = max(ends.stop, signum)
    for child in running:
        child.process.send_signal(signum)


def _note(child: _Child, ends: Ends, *, only: bool) -> None:
    assert child.code is not None
    was_first = ends.first
    ends.add(child.rank, child.code, killed=child.killed)
    if ends.first is was_first:
        return
    # A rank says in its own line why it ends; the agent speaks for one that could not, and says which was the first.
    if child.code not in codes.MEANINGS:
        log.warning(f"rank {child.rank} ended first, with code {child.code} ({_signal(child.code - 128)})")
    elif not only:
        log.info(f"rank {child.rank} ended first, with code {child.code} ({codes.MEANINGS[child.code]})")


def _signal(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return "not one of the trainer's own codes"


def _kill(running: Sequence[_Child], ends: Ends) -> None:
    for child in running:
        if not child.killed:
            why = "the grace time is over" if ends.stop else "a peer has ended"
            log.warning(f"rank {child.rank} has not ended by itself and is killed: {why}")
            child.killed = True
            child.process.kill()
