"""What a rank's time went into, as numbers on its panel: by what it did, by what it was good for, and by stage of the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from trainer.metrics.ledger import Goodput, Ledger
from trainer.metrics.panel import Panel
from trainer.metrics.table import Spent, Stage, State


class Times:
    """Charge a rank's time; `now` is always a moment of the monotonic clock.

    Args:
        since: when this start of the rank began.
    """

    def __init__(self, panel: Panel, *, since: float, now: float) -> None:
        self._panel = panel
        self._stage_began, self._stages = since, dict[Stage, float]()
        self._is_first_step = True
        self._spent = Ledger(now=now)
        self._kinds = {kind: panel.cell("trainer_phase_seconds_total", kind) for kind in get_args(Spent)}
        self._states = {state: panel.cell("trainer_time_seconds_total", state) for state in get_args(State)}
        self._replayed = panel.cell("trainer_replayed_steps_total")
        # The marks beside these counters tell of the last start: up to when it has charged its time, and its highest step.
        until, highest = max(cell.mark for cell in self._states.values()), int(self._replayed.mark)
        self._goodput = Goodput(since=since, until=until or None, highest=highest)
        self._charge({"down": self._goodput.down}, now=since)

    def stage(self, stage: Stage, *, now: float) -> None:
        """End a stage of the start; the next one begins."""
        self._tell(stage, now - self._stage_began)
        self._stage_began = now
        self._charge(self._goodput.charge("restore" if stage == "restore" else "startup", now=now), now=now)

    def begin(self, *, now: float) -> None:
        """Begin the first step of this start; from here on the rank's time counts as spent on training."""
        self._stage_began, self._spent = now, Ledger(now=now)
        self._panel.cell("trainer_startup_duration_seconds", "first_step").set(float("nan"))
        self._charge(self._goodput.charge("startup", now=now), now=now)

    def step(self, step: int, *, now: float, parts: Mapping[str, float]) -> float:
        """End a step and return how many seconds it took."""
        seconds = max(0.0, now - self._spent.until)
        self._spend(parts, now=now)
        replayed = 1.0 if step <= self._goodput.highest else 0.0
        self._charge(self._goodput.step(step, now=now, data_wait=parts["data_wait"]), now=now)
        self._replayed.add(replayed)
        self._replayed.note(self._goodput.highest)
        if self._is_first_step:
            self._is_first_step = False
            self._tell("first_step", now - self._stage_began)
        return seconds

    def pause(self, kind: Literal["eval", "checkpoint"], *, now: float, seconds: float) -> None:
        """End a pause of training."""
        self._spend({kind: seconds}, now=now)
        self._charge(self._goodput.pause(kind, now=now, seconds=seconds), now=now)

    def settle(self, *, now: float) -> None:
        """Charge what has passed since the last event."""
        self._charge(self._goodput.rest(now=now), now=now)

    def _tell(self, stage: Stage, seconds: float) -> None:
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds
        self._panel.cell("trainer_startup_duration_seconds", stage).set(self._stages[stage])

    def _spend(self, parts: Mapping[str, float], *, now: float) -> None:
        for kind, seconds in self._spent.charge("other", now=now, parts=parts).items():
            self._kinds[kind].add(seconds)

    def _charge(self, shares: Mapping[str, float], *, now: float) -> None:
        for state, seconds in shares.items():
            cell = self._states[state]
            cell.add(seconds)
            cell.note(now)
