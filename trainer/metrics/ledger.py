"""Where time goes: every moment since a beginning is charged to exactly one account. Pure: no clock, and no sums."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.metrics.table import State


class Ledger:
    """Share out the time since the last entry.

    Attributes:
        until: the moment up to which all is shared out.
    """

    def __init__(self, *, now: float) -> None:
        self.until = now

    def charge(self, rest: str, *, now: float, parts: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return what each account gets of the time until `now`: the parts as measured, and `rest` what they leave.

        The shares add up to the time that has passed; parts that say more, being measured by other means, are made
        smaller in proportion.
        """
        passed = max(0.0, now - self.until)
        self.until += passed
        if not parts:
            return {rest: passed}
        measured = sum(parts.values())
        scale = 1.0 if measured <= passed else passed / measured
        shares = {name: scale * seconds for name, seconds in parts.items()}
        shares[rest] = shares.get(rest, 0.0) + max(0.0, passed - measured)
        return shares


class Goodput:
    """Say what the time of rank 0 went into, from its first start on and over all starts anew.

    Args:
        since: when this start began.
        until: up to when the last start has charged its time, or None if this is the first.
        highest: the highest step that any start has done.
    """

    def __init__(self, *, since: float, until: float | None = None, highest: int = 0) -> None:
        self.down = 0.0 if until is None else max(0.0, since - until)
        self.highest = highest
        self._ledger = Ledger(now=since if until is None else max(since, until))
        self._state: State = "startup"

    def charge(self, state: State, *, now: float) -> dict[str, float]:
        """Charge the time until `now` to one state."""
        return self._ledger.charge(state, now=now)

    def step(self, step: int, *, now: float, data_wait: float) -> dict[str, float]:
        """Charge a step. The first of a start counts as part of the start, and one that was done before is all replay."""
        first, self._state = self._state == "startup", "replay" if step <= self.highest else "productive"
        self.highest = max(self.highest, step)
        if first:
            return self._ledger.charge("startup", now=now)
        if self._state == "replay":
            return self._ledger.charge("replay", now=now)
        return self._ledger.charge("productive", now=now, parts={"data_wait": data_wait})

    def pause(self, state: State, *, now: float, seconds: float) -> dict[str, float]:
        """Charge a pause of training that ends now; what came between the last step and it belongs to the steps."""
        return self._ledger.charge(self._state, now=now, parts={state: seconds})

    def rest(self, *, now: float) -> dict[str, float]:
        """Charge the time until `now` to what was going on."""
        return self._ledger.charge(self._state, now=now)
