"""The one table of exit codes, and the exceptions that carry one.

Only `cli.py` and `agent.py` turn these into an exit. The tree:

    TrainerError            1   what a person is told in one line
      SettingError          2   a setting, the usage or the launch is wrong; found before the first step
      DataError             3   data that cannot be used
      CheckpointError       3   a checkpoint that cannot be used
      Diverged              4   the loss is not finite
      NoProgress            5   start after start, and no new checkpoint
      PeerLost            170   a peer, or the rendezvous, did not answer in time
    Stopped         130 / 143   SIGINT or SIGTERM was obeyed
"""

from __future__ import annotations

OK = 0
UNEXPECTED = 1
SETTING = 2
DATA = 3
DIVERGED = 4
NO_PROGRESS = 5
INTERRUPTED = 130
TERMINATED = 143
PEER_LOST = 170

#: code -> what it means to the person who reads it.
MEANINGS = {
    OK: "finished",
    UNEXPECTED: "unexpected exception, or the last save failed",
    SETTING: "wrong setting, usage or launch",
    DATA: "data or checkpoint that cannot be used",
    DIVERGED: "diverged: the loss is not finite",
    NO_PROGRESS: "no progress over several starts",
    INTERRUPTED: "stopped by SIGINT",
    TERMINATED: "stopped by SIGTERM",
    PEER_LOST: "lost a peer, the rendezvous timed out, or a rank hung",
}

#: Codes that a new start cannot mend; they are never retried and end every rank.
PERMANENT = frozenset({SETTING, DATA, DIVERGED, NO_PROGRESS})


#: With this a rank tells torch's elastic agent alone that it has saved and makes way for a start with other nodes.
NODES_CHANGED = 129
#: Codes of what obeyed a stop signal.
STOP_CODES = frozenset({NODES_CHANGED, INTERRUPTED, TERMINATED})


class TrainerError(Exception):
    """Carry one line for a person (what, where it came from, what to do) and the exit code that goes with it.

    Args:
        shared: whether every rank raises the same; then nobody needs to be told, and rank 0's line is enough.
    """

    code = UNEXPECTED

    def __init__(self, message: str, *, shared: bool = False) -> None:
        super().__init__(message)
        self.shared = shared


class SettingError(TrainerError, ValueError):
    """Say that a setting, the usage or the launch is wrong."""

    code = SETTING


class DataError(TrainerError, ValueError):
    """Say that data is missing or cannot be used."""

    code = DATA


class CheckpointError(TrainerError, ValueError):
    """Say that a checkpoint is missing, damaged, or from another experiment."""

    code = DATA


class Diverged(TrainerError, ArithmeticError):
    """Say that the loss stopped being finite, and at which steps."""

    code = DIVERGED


class NoProgress(TrainerError):
    """Say how many starts of a run ended without a new checkpoint."""

    code = NO_PROGRESS


class PeerLost(TrainerError, ConnectionError):
    """Say who was waited for, where, and how long."""

    code = PEER_LOST


class Stopped(Exception):
    """End a run that a signal asked to stop, after its state was saved.

    Args:
        signum: the signal that was agreed on; the exit code is 128 + signum.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
        self.code = 128 + signum


def end_for(code: int, message: str) -> TrainerError | Stopped:
    """Build what ends all ranks alike with `code`: a stop, which needs no line, or an error with `message` as its line."""
    return Stopped(code - 128) if code in STOP_CODES else error_for(code, message, shared=True)


def error_for(code: int, message: str, *, shared: bool = False) -> TrainerError:
    """Build the exception whose exit code is `code`, with `message` as its line."""
    kinds: dict[int, type[TrainerError]] = {
        SETTING: SettingError,
        DATA: DataError,
        DIVERGED: Diverged,
        NO_PROGRESS: NoProgress,
        PEER_LOST: PeerLost,
    }
    return kinds.get(code, TrainerError)(message, shared=shared)


def from_process(returncode: int) -> int:
    """Return an ended process's code as a shell tells it: 128 + N where signal N killed it."""
    return returncode if returncode >= 0 else 128 - returncode
