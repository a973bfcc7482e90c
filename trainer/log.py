"""Log lines, as text for people or JSON for collectors: one schema, the rank on each, every line flushed.

Information goes to stdout and from rank 0 alone; warnings and errors go to stderr, from every rank and with its number. What is
worth a line is decided by the callers.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

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
        return f"{stamp} {record.levelname.lower()}{who} {record.getMessage()}"


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
        return json.dumps(line | getattr(record, "fields", {}))


class _Stream(logging.Handler):
    """Write to the stdout or stderr of the moment, by level, and flush."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except (BrokenPipeError, ValueError):
            pass  # the reader has gone, or the stream is closed: training goes on


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
