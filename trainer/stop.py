"""Turn SIGTERM and SIGINT into a flag that the training loop reads once per step; nothing more.

Saving, agreeing with the other ranks and exiting live elsewhere: a signal handler that did any of it would interrupt a
collective or a write at an arbitrary point.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PLAIN = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT}


class Stop:
    """Remember the last stop signal that this process received.

    Args:
        meanings: which signals to handle, and as which to take them; of several ranks' signals the highest counts.

    Attributes:
        signum: 0 until a signal came, then its number.
        since: when the first one came, by the monotonic clock; 0.0 until then.
    """

    def __init__(self, meanings: Mapping[signal.Signals, signal.Signals] = _PLAIN) -> None:
        self.signum, self.since = 0, 0.0
        self._meanings = meanings
        self._bell: int | None = None

    def install(self) -> None:
        """Handle the signals by setting the flag, from now on; call in the main thread."""
        if self._bell is None:
            self._bell, writer = os.pipe()
            os.set_blocking(self._bell, False)
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in self._meanings:
            signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.receive(self._meanings[signal.Signals(signum)])

    def receive(self, signum: int) -> None:
        """Take note of a stop signal, also of one that another rank received."""
        self.signum, self.since = signum, self.since or time.monotonic()

    def heard(self) -> int:
        """Return the signal that came, or 0; any thread may ask.

        While the main thread waits in native code, as for its peers in a collective, no handler of Python's runs there, and the
        flag stays as it was; the number of the signal is in the wake-up pipe at once.
        """
        with contextlib.suppress(BlockingIOError):
            for signum in os.read(self._bell, 64) if self._bell is not None else b"":
                if signum in self._meanings:
                    self.receive(self._meanings[signal.Signals(signum)])
        return self.signum

    def overdue(self, seconds: float) -> int:
        """Return the signal if the first one came more than `seconds` ago, else 0."""
        return self.signum if self.signum and time.monotonic() - self.since > seconds else 0


def restore_defaults() -> None:
    """Let SIGTERM and SIGINT end this process at once, also one that came while they were blocked.

    Used before the first step, where there is nothing to save and a rank may wait in native code (rendezvous) that no Python
    handler could interrupt. The agent starts its ranks with SIGINT blocked: in a starting interpreter it makes a stack and code 1.
    """
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
