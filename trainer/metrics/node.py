"""What the agent tells of the ranks that it supervises."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from trainer import codes
from trainer.metrics.reporter import Reporter, event
from trainer.metrics.table import Reason


class AgentRecorder(Reporter):
    """Write the agent's series; make one with `open` or `off`. Where there is no agent, there are none of them."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the agent's files in the node's folder."""
        return cls._try(folder, name="agent", make=lambda files: cls(files, roles=("agent",)))

    @event
    def restart(self, reason: Reason) -> None:
        """Tell that all ranks of the node are started anew, and why the last start ended."""
        self._panel.cell("trainer_restarts_total", reason).add(1.0)

    @event
    def rank_exit(self, reason: Reason) -> None:
        """Tell that a rank has ended before the run was finished."""
        self._panel.cell("trainer_rank_exits_total", reason).add(1.0)

    @event
    def hang(self) -> None:
        """Tell that a rank was found to be hung."""
        self._panel.cell("trainer_hangs_total").add(1.0)

    @event
    def stop_signal(self) -> None:
        """Tell that a stop signal has come."""
        self._panel.cell("trainer_stop_signals_total").add(1.0)


def reason_of(code: int, *, hung: bool = False, killed: bool = False) -> Reason | None:
    """Say why a rank ended with `code`, or None for one that has finished.

    Args:
        hung: whether it was found to be hung.
        killed: whether the agent has killed it.
    """
    if hung:
        return "hang"
    if killed or code == codes.PEER_LOST:
        return "peer"
    if code in codes.STOP_CODES:
        return "stopped"
    # SIGKILL that is not the agent's is nearly always the kernel's, for memory.
    return None if code == codes.OK else "oom" if code == _KILLED else "crash"


_KILLED = 137
