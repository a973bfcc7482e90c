"""How a rank tells the others that it ends and why, and how it finds out who is gone: over the store, beside the collectives.

The store's calls have no limit of their own once its host is stopped or has vanished, so each is made in a thread that is
waited for, for so long. What an end means for the training is not known here.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from trainer.codes import PEER_LOST, UNEXPECTED, PeerLost, TrainerError, error_for
from trainer.group.rendezvous import FAREWELL_SECONDS, wait_for_keys
from trainer.stop import Stop

T = TypeVar("T")

_END, _QUESTION, _STOP = "end", "who is there", "stop"
_LISTEN_SECONDS = 0.5
#: A living rank answers within this, four times its listener's pace.
_ANSWER_SECONDS = 2.0
_STORE_SECONDS = 5.0


@dataclass
class Ends:
    """Publish this rank's end, hear of the others', and answer for this rank.

    Attributes:
        hosts: the ranks' hosts, by rank.
        told: the error that another rank published, once it was heard.
    """

    store: dist.Store
    rank: int
    hosts: Sequence[str]
    told: TrainerError | None = None
    _gone: set[int] = field(default_factory=set)
    _unreachable: bool = False
    _closing: threading.Event = field(default_factory=threading.Event)
    _listener: threading.Thread | None = None

    def listen(
        self, store: dist.Store, *, on_end: Callable[[int, str], None] | None = None, stop: Stop | None = None
    ) -> None:
        """Listen in a thread, over a connection of its own: the training thread may be stuck in the other one.

        `on_end` is called in that thread with (code, line) when another rank has published its end. `stop` is shared: a rank
        that waits for its data, or for the run's folder, hears of a stop signal by no collective.
        """
        self._listener = threading.Thread(
            target=self._listen, args=(store, on_end, stop or Stop()), daemon=True, name="listen"
        )
        self._listener.start()

    def _listen(self, store: dist.Store, on_end: Callable[[int, str], None] | None, stop: Stop) -> None:
        answered = shared = False
        try:
            # Asking again and again, not one long wait: a thread in native code when the process ends would abort it.
            while not store.check([_END]):
                if not answered and store.check([_QUESTION]):
                    store.set(_alive(self.rank), "")
                    answered = True
                if not stop.heard() and store.check([_STOP]):
                    stop.receive(int(store.get(_STOP)))
                elif stop.signum and not shared:
                    store.set(_STOP, str(int(stop.signum)))
                    shared = True
                if self._closing.wait(_LISTEN_SECONDS):
                    return
            self._hear(store)
        except RuntimeError:
            return  # the store has gone; the next collective tells
        if self.told is not None and on_end is not None:
            on_end(self.told.code, str(self.told))

    def _hear(self, store: dist.Store) -> None:
        told = json.loads(store.get(_END))
        if told["rank"] != self.rank:
            # Of a lost peer each rank says so, since rank 0 may be the lost one.
            line, code = f"rank {told['rank']} ended: {told['message']}", told["code"]
            self.told = error_for(code, line, shared=code != PEER_LOST)
        store.set(_left(self.rank), "")

    def explain(self, where: str, *, reason: str) -> TrainerError:
        """Say why a wait for the other ranks failed: another rank's published end, or who is gone; takes some seconds."""
        found = _within(_ANSWER_SECONDS + _STORE_SECONDS, lambda: self._ask_around(where, reason))
        if self.told is not None:
            return self.told
        if found is None:
            self._unreachable = True
            self._gone = {0}
            return PeerLost(f"lost {self._names([0])}, which holds the ranks' store, in {where}")
        return found

    def _ask_around(self, where: str, reason: str) -> TrainerError:
        self.store.set(_failed(self.rank), where)
        self.store.set(_QUESTION, "")
        waiting = set(range(len(self.hosts))) - {self.rank}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while waiting and time.monotonic() < deadline:
            if self.store.check([_END]):
                self._hear(self.store)
            if self.told is not None:
                return self.told
            waiting = {rank for rank in waiting if not self.store.check([_failed(rank)])}
            time.sleep(0.05)
        self._gone = {rank for rank in waiting if not self.store.check([_alive(rank)])}
        if self._gone:
            return PeerLost(f"lost {self._names(self._gone)} in {where}")
        if waiting:
            return PeerLost(
                f"waited in vain for {self._names(waiting)} in {where} (--collective-seconds); still running"
            )
        return PeerLost(f"the connection between the ranks failed in {where}, although all are there: {reason}")

    def _names(self, ranks: Iterable[int]) -> str:
        some = sorted(ranks)
        names = ", ".join(f"{rank} (on {self.hosts[rank]})" for rank in some[:8])
        return ("ranks " if len(some) > 1 else "rank ") + names + (" ..." if len(some) > 8 else "")

    def publish(self, error: BaseException) -> None:
        """Tell every rank that this one ends with `error`, so that all end, and with its code; the first to tell wins.

        Rank 0 may hold the store, so it stays until the others have heard, for some seconds at most.
        """
        if self._unreachable:
            return
        if error is self.told:
            _within(_STORE_SECONDS, self._stay)
            return
        line = " ".join(str(error).split())[:1000]
        code, message = UNEXPECTED, f"unexpected {type(error).__name__}: {line}"
        if isinstance(error, TrainerError):
            code, message = error.code, line
        note = json.dumps({"code": code, "message": message, "rank": self.rank})
        _within(_STORE_SECONDS, lambda: self._publish(note))

    def _publish(self, note: str) -> None:
        self.store.compare_set(_END, "", note)
        self.store.set(_left(self.rank), "")
        self._stay()

    def _stay(self) -> None:
        if self.rank == 0:
            others = set(range(len(self.hosts))) - self._gone
            wait_for_keys(self.store, [_left(rank) for rank in others], seconds=FAREWELL_SECONDS)

    def leave(self) -> None:
        """End listening after a good end; rank 0 goes last."""
        self._closing.set()
        if self._listener is not None:
            self._listener.join(timeout=_STORE_SECONDS)
        _within(_STORE_SECONDS, self._leave)

    def _leave(self) -> None:
        self.store.set(_left(self.rank), "")
        self._stay()


def _failed(rank: int) -> str:
    return f"failed/{rank}"


def _alive(rank: int) -> str:
    return f"alive/{rank}"


def _left(rank: int) -> str:
    return f"left/{rank}"


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return what `ask` returns, or None where the store has gone or does not answer for so long."""
    answers: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except RuntimeError:
            answers.put(None)

    threading.Thread(target=run, daemon=True, name="ask the store").start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return None
