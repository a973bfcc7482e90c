"""What the recorders of agent and ranks share: nothing that goes wrong in them reaches the caller, and a forked child is silent."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from trainer import log
from trainer.metrics.files import Files
from trainer.metrics.panel import Panel
from trainer.metrics.table import Level, Phase, Role

P = ParamSpec("P")
R = TypeVar("R", bound="Reporter")


def event(method: Callable[Concatenate[R, P], None]) -> Callable[Concatenate[R, P], None]:
    """Let a method run while the recorder is on, one thread at a time, and switch the recorder off where it fails."""

    @functools.wraps(method)
    def call(self: R, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_on:
            try:
                with self.lock:
                    method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, metrics must not end a run
                self.is_on = False
                _warn(error)

    return call


class Reporter:
    """Write one process's series. Any thread may report.

    Attributes:
        is_on: whether anything is written: not in a forked child, and no more once writing has failed.
    """

    def __init__(self, files: Files | None, *, roles: tuple[Role, ...] = (), rank: int = 0) -> None:
        self.is_on = files is not None
        self.lock = threading.RLock()  # a signal's handler that logs may come in the middle of an event
        self._panel = Panel(files, roles=roles, rank=rank)
        self._phase = ""
        if self.is_on:
            this = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _silence(this()))

    @classmethod
    def off(cls) -> Self:
        """Return a recorder that writes nothing."""
        return cls(None)

    @classmethod
    def _try(cls, folder: Path, *, name: str, make: Callable[[Files], Self]) -> Self:
        try:
            return make(Files(folder, name=name))
        except Exception as error:  # noqa: BLE001 - as above
            _warn(error)
            return cls.off()

    @event
    def phase(self, phase: Phase) -> None:
        """Tell what the node does from now on."""
        if phase != self._phase:
            self._phase = phase
            self._panel.choose("trainer_phase", phase)

    @event
    def message(self, level: Level) -> None:
        """Tell that a line was logged."""
        self._panel.cell("trainer_log_messages_total", level).add(1.0)

    def close(self) -> None:
        """Write no more; what was written stays."""
        self.is_on = False

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            self._panel.cell(name).set(value)


class Counting(logging.Handler):
    """Count the lines of a logger; add it after `log.setup`, which puts its own handler in place of all."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        """Count one line."""
        below: Level = "info" if record.levelno < logging.WARNING else "warning"
        self._reporter.message("error" if record.levelno > logging.WARNING else below)


def _silence(reporter: Reporter | None) -> None:
    """Keep a forked child from writing its parent's numbers: each would undo what the other counts."""
    if reporter is not None:
        reporter.is_on = False


def _warn(error: Exception) -> None:
    log.warning(f"no more metrics from this process: {type(error).__name__}: {' '.join(str(error).split())}")
