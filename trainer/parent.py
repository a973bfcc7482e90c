"""No process of ours outlives the one that started it: the kernel ends it then. What is started, and by whom, is not known here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from trainer import codes

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, `parent`, ends, however it ends; end at once if it has. Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(codes.UNEXPECTED)  # it ended before that
