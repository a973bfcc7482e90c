"""Signs of life: how a rank tells whoever watches it that it goes on, cheaply enough for every step (about 3 microseconds).

A record in memory that both processes share says what the rank did last and until when its next sign is due. `Pulse` writes
it, `Records` are the watcher's side, `Allowance` knows how long what may take, `Watch` tells whether a sign is overdue. What
is done about a rank that is hung is decided by the watchers: the agent, and where there is none a thread of the rank.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import tempfile
import time
from collections import deque
from dataclasses import dataclass

#: A record: five numbers of 8 bytes each, the length of a text, then the text. Each number is one aligned store, which no
#: reader sees by half, and the due time alone decides; that numbers of two signs may be seen together only blurs a message.
_STEP, _SAVED, _PHASE, _SINCE, _DUE, _LENGTH = range(6)
_TEXT_START, _TEXT_SIZE = 48, 256
_RECORD_SIZE = 320  # whole cache lines: ranks do not write to one that another rank writes to

#: A watcher that looks this much later than it should have was stopped itself, and so were the ranks, perhaps.
_LATE_SECONDS = 5.0
_WARM_UP_STEPS = 10


class Phase(enum.IntEnum):
    """Say what a rank is about to do. A phase lasts until the next sign of life, so each begins with one."""

    SETUP = 0
    PREPARE = 1
    FIRST_STEPS = 2
    STEP = 3
    EVALUATION = 4
    SAVING = 5
    END = 6

    @property
    def words(self) -> str:
        """Return the phase in words that follow "in"."""
        return _WORDS[self]


_STEPPING = (Phase.FIRST_STEPS, Phase.STEP)
_WORDS = {
    Phase.SETUP: "its setup",
    Phase.PREPARE: "preparing data",
    Phase.FIRST_STEPS: "its first steps",
    Phase.STEP: "training",
    Phase.EVALUATION: "an evaluation",
    Phase.SAVING: "saving",
    Phase.END: "ending",
}

#: The least seconds that a phase may take. Setup: imports, rendezvous, reading the data's index and the checkpoint. Prepare:
#: unpacking or drawing a data set, and waiting while another process does. First steps: autotuning, loader processes.
#: Evaluation: until its next batch. Saving: all of a save, and on ranks that do not save the step in which they wait for it.
LEAST_SECONDS = {
    Phase.SETUP: 1800.0,
    Phase.PREPARE: 6 * 3600.0,
    Phase.FIRST_STEPS: 600.0,
    Phase.STEP: 60.0,
    Phase.EVALUATION: 600.0,
    Phase.SAVING: 600.0,
    Phase.END: 600.0,
}
#: Instead of that for the first steps, where they compile the model.
COMPILE_SECONDS = 3600.0
#: How many times longer than its slowest recent one a step, an evaluation's batch or a save may take.
SLOWER = 10.0
#: How many are recent.
RECENT = 50


class Allowance:
    """Know how long a phase may take: a fixed time, or ten times the slowest of the last 50 of its kind, and never less than its least.

    Args:
        timeout: seconds for a step, whatever the earlier ones took, and the least for every other phase; None: by measurement.
        compiles: whether the first steps compile the model.
        rendezvous_seconds: how long ranks may wait for each other in the setup.
        peer_seconds: how long this rank waits for ranks on other nodes before it ends and names them; it must come to that.
    """

    def __init__(
        self,
        timeout: float | None = None,
        *,
        compiles: bool = False,
        rendezvous_seconds: float = 0.0,
        peer_seconds: float = 0.0,
    ) -> None:
        self._timeout = timeout
        floor = max(timeout or 0.0, peer_seconds)
        self._least = {phase: max(seconds, floor) for phase, seconds in LEAST_SECONDS.items()}
        if compiles:
            self._least[Phase.FIRST_STEPS] = max(COMPILE_SECONDS, floor)
        # Rank 0, which counts them, may itself have come late, and gives the others the whole limit.
        self._least[Phase.SETUP] += 2 * rendezvous_seconds
        self._recent = {phase: deque[float](maxlen=RECENT) for phase in Phase}

    def note(self, phase: Phase, seconds: float) -> None:
        """Take note of how long a phase took."""
        self._recent[phase].append(seconds)

    def seconds(self, phase: Phase) -> float:
        """Return how long `phase` may take from now on, in seconds."""
        if phase is Phase.STEP and self._timeout is not None:
            return self._timeout
        return max(self._least[phase], SLOWER * max(self._recent[phase], default=0.0))


@dataclass(frozen=True)
class Sign:
    """Hold a rank's last sign of life.

    Attributes:
        step: optimizer steps done, -1 before the first word of it.
        saved: step of the newest checkpoint that this start of the rank has saved, or -1.
        since: when the sign was given; `due`: when the next one is due; by the monotonic clock, which all processes share.
        text: what the rank told, or "".
    """

    step: int
    saved: int
    phase: Phase
    since: float
    due: float
    text: str

    def silence(self, now: float) -> str:
        """Say how long there has been no other sign, in which phase, and how long there might have been none."""
        after = f", after step {self.step}" if self.step >= 0 else ""
        line = f"no sign of life for {now - self.since:.0f} s in {self.phase.words}{after}"
        return f"{line}; {self.due - self.since:.0f} s are allowed (--hang-timeout)"


class _Record:
    def __init__(self, memory: memoryview) -> None:
        self._numbers, self._times = memory[:_TEXT_START].cast("q"), memory[:_TEXT_START].cast("d")
        self._text = memory[_TEXT_START:]

    def begin(self, phase: Phase, *, seconds: float) -> None:
        now = time.monotonic()
        self._numbers[_STEP] = self._numbers[_SAVED] = -1
        self._numbers[_PHASE], self._numbers[_LENGTH] = phase, 0
        self._times[_SINCE], self._times[_DUE] = now, now + seconds

    def write(self, phase: Phase, *, now: float, seconds: float) -> None:
        self._numbers[_PHASE], self._times[_SINCE], self._times[_DUE] = phase, now, now + seconds

    def write_step(self, step: int) -> None:
        self._numbers[_STEP] = step

    def write_saved(self, step: int) -> None:
        self._numbers[_SAVED] = step

    def write_text(self, text: str) -> None:
        content = os.fsencode(text)
        assert len(content) <= _TEXT_SIZE
        self._text[: len(content)] = content
        self._numbers[_LENGTH] = len(content)

    def read(self) -> Sign:
        numbers, times = self._numbers, self._times
        text = os.fsdecode(bytes(self._text[: numbers[_LENGTH]]))
        return Sign(numbers[_STEP], numbers[_SAVED], Phase(numbers[_PHASE]), times[_SINCE], times[_DUE], text)


class Records:
    """Hold a record for each rank that this process is going to start; the ranks find them by `fd`.

    The memory has no name, so nothing is left of it when the processes have ended, however they end.

    Args:
        count: number of ranks.
        seconds: how long a rank may take to its own first sign of life.
    """

    def __init__(self, count: int, *, seconds: float) -> None:
        self.fd = _open_memory(count * _RECORD_SIZE)
        self._records = [_Record(_map(self.fd, index)) for index in range(count)]
        for record in self._records:
            record.begin(Phase.SETUP, seconds=seconds)

    def close(self) -> None:
        """Close `fd`, once the ranks have it; reading goes on."""
        os.close(self.fd)

    def read(self) -> list[Sign]:
        """Return each rank's last sign of life."""
        return [record.read() for record in self._records]


def _open_memory(size: int) -> int:
    try:
        fd = os.memfd_create("trainer-beat")
    except OSError:  # a sandbox may not have it
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


def _map(fd: int, index: int) -> memoryview:
    start = index * _RECORD_SIZE
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))[start : start + _RECORD_SIZE]


class Pulse:
    """Give a rank's signs of life.

    Args:
        allowance: how long what may take.
        fd: descriptor of the agent's records, closed here; None: the record is this process's own, for a thread of it.
        index: which record is this rank's: its number on the node.
    """

    def __init__(self, allowance: Allowance, *, fd: int | None = None, index: int = 0) -> None:
        if fd is None:
            self._record = _Record(memoryview(bytearray(_RECORD_SIZE)))
            self._record.begin(Phase.SETUP, seconds=allowance.seconds(Phase.SETUP))
        else:
            self._record = _Record(_map(fd, index))
            with contextlib.suppress(OSError):
                os.close(fd)
        self._allowance, self._steps, self._last = allowance, 0, Phase.SETUP
        self._since = time.monotonic()
        self.beat(Phase.SETUP)

    def beat(self, phase: Phase) -> None:
        """Give a sign of life at the beginning of `phase`, or at the next part of it that counts for itself."""
        now = time.monotonic()
        if self._last not in _STEPPING:
            self._allowance.note(self._last, now - self._since)
        self._write(phase, now)

    def step(self, step: int) -> None:
        """Give the sign of life of one more optimizer step; `step` is how many are done in the run."""
        now = time.monotonic()
        if self._last not in _STEPPING:
            self._allowance.note(self._last, now - self._since)
        elif self._steps:  # the very first says nothing of the others
            self._allowance.note(Phase.STEP, now - self._since)
        self._steps += 1
        self._record.write_step(step)
        self._write(Phase.STEP if self._steps >= _WARM_UP_STEPS else Phase.FIRST_STEPS, now)

    def saved(self, step: int) -> None:
        """Say that the checkpoint of `step` is safe; any thread may. It gives the agent's restarts their budget back."""
        self._record.write_saved(step)

    def tell(self, text: str) -> None:
        """Leave a word of at most 256 bytes for the agent: the name of the run's folder, in which a restart goes on."""
        self._record.write_text(text)

    def read(self) -> Sign:
        """Return the last sign of life."""
        return self._record.read()

    def _write(self, phase: Phase, now: float) -> None:
        self._last, self._since = phase, now
        self._record.write(phase, now=now, seconds=self._allowance.seconds(phase))


class Watch:
    """Tell whether one rank's next sign of life is overdue; looks at it every second or so.

    A watcher that was itself kept from looking (the container was paused, the job suspended) takes it that the rank was kept
    from going on as long.
    """

    def __init__(self) -> None:
        self._looked, self._due, self._credit = time.monotonic(), 0.0, 0.0

    def is_overdue(self, sign: Sign, *, now: float) -> bool:
        """Look at the rank's last sign of life at time `now` of the monotonic clock."""
        away, self._looked = now - self._looked, now
        if sign.due != self._due:
            self._due, self._credit = sign.due, 0.0
        if away > _LATE_SECONDS:
            self._credit += away
        return now > sign.due + self._credit
