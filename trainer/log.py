"""Log lines, as text for people or JSON for collectors: one schema, the rank on each, every line flushed.

Information goes to stdout and from rank 0 alone; warnings and errors go to stderr, from every rank and with its number. What is
worth a line is decided by the callers. Output that cannot be written never stops a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from typing import Any, TextIO

LOGGER = logging.getLogger("trainer")


class _Text(logging.Formatter):
    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        if record.levelno < logging.WARNING:
            return f"{stamp} {record.getMessage()}"
        who = "" if self._rank is None else f" [rank {self._rank}]"
        line = f"{stamp} {record.levelname.lower()}{who} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "rank": self._rank,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(_finite(line | getattr(record, "fields", {})))


def _finite(value: Any) -> Any:
    # JSON has no NaN: a strict reader would lose the whole line.
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Stream(logging.Handler):
    """Write to the stdout or stderr of the moment, by level, and flush."""

    def emit(self, record: logging.LogRecord) -> None:
        _write(sys.stderr if record.levelno >= logging.WARNING else sys.stdout, self.format(record) + "\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        discard(stream)
    except (OSError, ValueError):
        pass  # the disk is full, or the stream is closed


def discard(stream: TextIO) -> None:
    """Send what is still buffered, and all that follows, to nowhere: else the interpreter's exit fails on it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def setup(form: str, *, rank: int | None = None) -> None:
    """Send this process's lines out as `form` (text or json), marked with `rank` (None: the process is no rank)."""
    handler = _Stream()
    handler.setFormatter(_Json(rank) if form == "json" else _Text(rank))
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO if not rank else logging.WARNING)


def info(message: str, **fields: Any) -> None:
    """Log one line of information; `fields` are added to the JSON form."""
    LOGGER.info(message, extra={"fields": fields})


def warning(message: str, **fields: Any) -> None:
    """Log one warning."""
    LOGGER.warning(message, extra={"fields": fields})


def error(message: str, **fields: Any) -> None:
    """Log one error."""
    LOGGER.error(message, extra={"fields": fields})


def failure(message: str) -> None:
    """Log an error with the traceback of the exception that is being handled; it shows no values of variables."""
    LOGGER.error(message, exc_info=True)


def show(text: str) -> None:
    """Write `text` to stdout as it stands, where that is possible."""
    _write(sys.stdout, text)
