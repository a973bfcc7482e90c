"""What a person sees: the live line on a terminal, and the table at the end. Log lines are `log.py`'s."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.live

_REFRESH_SECONDS = 0.1


def duration(seconds: float) -> str:
    """Write seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Live:
    """Show one line that changes in place, where stdout is a terminal; elsewhere show nothing.

    A context manager: log lines printed inside appear above the line.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.shown = wanted and sys.stdout.isatty()
        self._live: rich.live.Live | None = None
        self._text = ""
        self._next = 0.0

    def __enter__(self) -> Live:
        if self.shown:
            import rich.live

            # stderr stays where it is, unless it is this terminal too: then its lines must not cut the live one.
            live = rich.live.Live("", transient=True, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
            self.shown = not live.console.is_dumb_terminal
            if self.shown:
                self._live = live
                self._try(live.start)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._try(self._live.stop)

    def _try(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except (OSError, ValueError):  # the terminal has gone: training goes on, with log lines
            self._live, self.shown = None, False

    def update(
        self, *, step: int, steps: int, loss: float | None = None, rate: float = 0.0, left_seconds: float = 0.0
    ) -> None:
        """Show the step, and, where they are given, loss, samples/s and time left (kept until the next are)."""
        if self._live is None:
            return
        if loss is not None:
            self._text = f" · loss {loss:.4f} · {rate:,.0f} samples/s · {duration(left_seconds)} left"
        now = time.monotonic()
        if now >= self._next or step == steps:
            self._next = now + _REFRESH_SECONDS
            line = f"step {step}/{steps} ({100 * step // steps} %){self._text}"
            self._try(functools.partial(self._live.update, line, refresh=True))


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Lay out (name, value) rows in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
