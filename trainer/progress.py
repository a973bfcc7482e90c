"""What a person sees: the live line on a terminal, and the table at the end. Log lines are `log.py`'s."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
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

            self._live = rich.live.Live("", transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

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
            self._live.update(f"step {step}/{steps} ({100 * step // steps} %){self._text}", refresh=True)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Lay out (name, value) rows in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
