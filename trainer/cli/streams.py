"""The process's standard streams: open, and able to print any name."""

from __future__ import annotations

import io
import os
import sys

from trainer import log


def mend_streams() -> None:
    """Open what the caller has closed (else a socket would become the children's stdout), and print any name somehow."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write out what waits for stdout; a full disk is no error of the command's."""
    try:
        sys.stdout.flush()
    except OSError:
        log.discard(sys.stdout)
