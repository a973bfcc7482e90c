"""Start the ranks, and start them again while that may help: the agent's outer loop."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer import log
from trainer.agent.flight import FlightRecorder
from trainer.agent.watch import SIGNALS, Child, watch
from trainer.beat import Records, Sign
from trainer.metrics import AgentRecorder
from trainer.parent import die_with


@dataclass(frozen=True)
class Launch:
    """Hold what one start of the ranks needs; each start has its own.

    Attributes:
        environments: one per rank.
        listener: handed to the first rank, whose environment must name its descriptor; None: rank 0 listens by itself.
        records: where the ranks give signs of life, whose environments must name its descriptor; None: nobody looks for hangs.
    """

    environments: Sequence[Mapping[str, str]]
    listener: socket.socket | None = None
    records: Records | None = None


def listen(address: str) -> socket.socket:
    """Open the socket on a free port where rank 0 will hold the store: no other run can take the port meanwhile."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(1024)
    return listener


def supervise(
    command: Sequence[str],
    *,
    launch: Callable[[str, Sequence[str]], Launch],
    first_rank: int,
    grace: float,
    max_restarts: int = 0,
    flight: FlightRecorder | None = None,
    metrics: AgentRecorder | None = None,
) -> int:
    """Run `command` once per rank, again where ranks were lost, and return the node's exit code.

    Args:
        launch: makes what one start needs, given what a rank of the last start told ("" at first) and why each start before
            it ended; may raise SettingError.
        first_rank: the number of the first child, for messages.
        grace: seconds between a stop signal and SIGKILL.
        metrics: told of starts, ends and signals.
        flight: asked for NCCL's last collectives where a rank hangs.
        max_restarts: how often all ranks are started again without a newer checkpoint in between.
    """
    # Blocked signals are taken one by one: no handler runs in the middle of anything, and it works as PID 1.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    budget, told, causes = _Budget(max_restarts), "", list[str]()
    metrics = metrics or AgentRecorder.off()
    while not (stop := _pending_stop()):
        metrics.phase("init")
        launched = launch(told, causes)
        children = _start(command, launched, first_rank=first_rank)
        ends = watch(children, grace=grace, records=launched.records, flight=flight, metrics=metrics)
        signs = launched.records.read() if launched.records else []
        told = next((sign.text for sign in signs if sign.text), told)
        if not ends.may_start_again or not budget.take(signs):
            return ends.code
        causes.append(ends.cause)
        metrics.restart(ends.reason)
        log.warning(f"restart {budget.used} of {max_restarts}: {ends.cause}")
    return 128 + stop


class _Budget:
    """Count restarts; a checkpoint newer than any before gives all of them back.

    The step of a checkpoint, not of training: a run that dies between two checkpoints does the same steps each time.
    """

    def __init__(self, limit: int) -> None:
        self.used, self._limit, self._saved = 0, limit, -1

    def take(self, signs: Sequence[Sign]) -> bool:
        """Take one restart, where one is left."""
        saved = max((sign.saved for sign in signs), default=-1)
        if saved > self._saved:
            self.used, self._saved = 0, saved
        if self.used >= self._limit:
            if self._limit:
                log.warning(f"all {self._limit} restarts (--max-restarts) are used up without a newer checkpoint")
            return False
        self.used += 1
        return True


def is_stopped() -> bool:
    """Tell whether a stop signal has come since the last rank ended."""
    return bool(_pending_stop())


def _pending_stop() -> int:
    """Return the stop signal that came while no rank was there to forward it to, or 0; the highest, as in `Ends`."""
    stop = 0
    while received := signal.sigtimedwait(SIGNALS - {signal.SIGCHLD}, 0):
        stop = max(stop, received.si_signo)
    return stop


def _start(command: Sequence[str], launched: Launch, *, first_rank: int) -> list[Child]:
    prepare = functools.partial(_prepare_child, agent=os.getpid())
    with contextlib.ExitStack() as ours:
        if launched.listener:
            ours.enter_context(launched.listener)
        if launched.records:
            ours.callback(launched.records.close)
        children = []
        for index, environment in enumerate(launched.environments):
            passed = [launched.records.fd] if launched.records else []
            passed += [launched.listener.fileno()] if launched.listener and index == 0 else []
            process = subprocess.Popen(command, env=environment, pass_fds=passed, preexec_fn=prepare)
            children.append(Child(first_rank + index, index, process))
        return children


def _prepare_child(*, agent: int) -> None:
    die_with(agent)  # no rank outlives its supervisor
    # SIGINT stays blocked until the child asks for it: in a starting interpreter it makes a stack and code 1.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS - {signal.SIGINT})
