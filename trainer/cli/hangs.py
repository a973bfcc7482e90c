"""Hangs, as a rank itself can see them, and what an agent needs from it: stacks on request, and how long what may take.

Under our agent a hang is found from outside. In place, where another launcher started the rank, a thread of the rank watches. It
sees a rank whose main thread waits or runs without an end, prints the stacks of all threads and ends the process with 170. While
native code holds the interpreter's lock no Python thread runs; then a timer of faulthandler's, which needs no lock, prints the
stacks and ends the process with 1, the only code it knows. Nothing in a stopped process (SIGSTOP) can see that it is stopped:
its peers do, when they have waited `--collective-seconds` for it, and when it is continued after its time it ends with 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Iterator

from trainer import codes, log
from trainer.beat import Allowance, Pulse, Sign, Watch
from trainer.config import Config

_STDERR = 2
_LOOK_SECONDS = 1.0
#: How much later than the thread the timer fires, so that it does so only where the thread could not.
_LATER_SECONDS = 5.0
#: How much longer than its limit a rank may wait for another node's: in that time it ends by itself and names it.
_NAMING_SECONDS = 15.0


def allowance_for(config: Config, *, single_node: bool) -> Allowance:
    """Return how long what may take under these settings."""
    return Allowance(
        config.hang_timeout,
        compiles=config.compile,
        rendezvous_seconds=config.rendezvous_seconds,
        peer_seconds=0.0 if single_node else config.collective_seconds + _NAMING_SECONDS,
    )


def print_stacks_on_request() -> None:
    """Print the stacks of all threads to stderr on SIGUSR1, from now on, whatever the threads are doing."""
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)


@contextlib.contextmanager
def watched(pulse: Pulse) -> Iterator[None]:
    """Have a thread end this process, with 170 and all stacks, when a sign of life of `pulse` is overdue."""
    done = threading.Event()
    _set_timer(pulse.read(), now=time.monotonic())
    thread = threading.Thread(target=_watch, args=(pulse, done), name="hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(pulse: Pulse, done: threading.Event) -> None:
    watch = Watch()
    while not done.wait(_LOOK_SECONDS):
        sign, now = pulse.read(), time.monotonic()
        if watch.is_overdue(sign, now=now):
            log.error(f"hung: {sign.silence(now)}; stacks of all threads:")
            faulthandler.dump_traceback(file=_STDERR, all_threads=True)
            os._exit(codes.PEER_LOST)
        _set_timer(sign, now=now)


def _set_timer(sign: Sign, *, now: float) -> None:
    # Set anew at each look, so it fires only where the thread is kept from looking for all the time that was left.
    left = max(sign.due - now, 0.0) + _LATER_SECONDS
    faulthandler.dump_traceback_later(left, exit=True, file=_STDERR)
