"""How the ranks of a node ended, and what follows: the first cause, the node's exit code, whether a new start may help."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from trainer import codes
from trainer.metrics import Reason, reason_of


@dataclass
class Ends:
    """Collect how the ranks ended, and tell the node's exit code.

    Attributes:
        stop: the stop signal that was forwarded, or 0; the highest, as the ranks agree on it.
        first: (rank, code) of the first end that is a cause: not 0, not a lost peer, not a signal that we sent.
        hung: the ranks that were found to be hung; from then on no end is a cause.
        unkillable: whether a rank is left that even SIGKILL did not end.
    """

    stop: int = 0
    first: tuple[int, int] | None = None
    codes: dict[int, int] = field(default_factory=dict)
    hung: tuple[int, ...] = ()
    unkillable: bool = False

    def add(self, rank: int, code: int, *, killed: bool = False) -> None:
        """Take note of one rank's end; `killed` says that we killed it."""
        self.codes[rank] = code
        ours = killed or self.hung or (self.stop and code == 128 + self.stop)
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

    @property
    def cause(self) -> str:
        """Say in a few words what ended the ranks."""
        if self.first is not None:
            rank, code = self.first
            return f"rank {rank} ended with {code} ({meaning(code)})"
        if self.hung:
            names = ", ".join(map(str, self.hung))
            return f"{'rank' if len(self.hung) == 1 else 'ranks'} {names} hung"
        return "a peer was lost"

    @property
    def reason(self) -> Reason:
        """Say in one of the words of the metrics what ended the ranks."""
        if self.first is not None:
            return reason_of(self.first[1]) or "peer"
        return "hang" if self.hung else "peer"

    @property
    def may_start_again(self) -> bool:
        """Tell whether a new start can mend what ended the ranks."""
        final = {codes.OK, *codes.STOP_CODES} | codes.PERMANENT
        return not self.stop and not self.unkillable and self.code not in final


def meaning(code: int) -> str:
    """Say what an exit code means: one of ours, or the signal behind one that is not."""
    if code in codes.MEANINGS:
        return codes.MEANINGS[code]
    try:
        return f"killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return "not one of the trainer's own codes"
