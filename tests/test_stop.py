"""The stop flag: a signal sets it and nothing else happens."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from trainer.stop import SIGNALS, Stop, restore_defaults


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Put this process's own handlers back."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_flag_is_clear_until_a_signal_comes() -> None:
    stop = Stop()
    stop.install()
    assert stop.signum == 0


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_sets_the_flag_and_the_process_goes_on(signum: signal.Signals) -> None:
    stop = Stop()
    stop.install()
    os.kill(os.getpid(), signum)
    assert stop.signum == signum


def test_the_last_signal_is_remembered() -> None:
    stop = Stop()
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.signum == signal.SIGINT


def test_another_thread_hears_a_signal_while_the_main_thread_waits_in_native_code() -> None:
    """There no handler of Python's runs: a rank that waits for its peers in a collective would hear nothing."""
    stop, libc, lock, heard = Stop(), ctypes.CDLL(None), ctypes.create_string_buffer(64), []
    stop.install()

    def listen() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not stop.signum and time.monotonic() < deadline:
            heard.append(stop.signum or stop.heard())
        libc.pthread_mutex_unlock(lock)

    libc.pthread_mutex_lock(lock)
    listener = threading.Thread(target=listen)
    listener.start()
    libc.pthread_mutex_lock(lock)  # until the listener opens it
    listener.join()
    assert heard[-1] == signal.SIGTERM


def test_a_stop_that_is_not_installed_changes_nothing() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    Stop()
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


@pytest.mark.parametrize("signum", SIGNALS)
def test_defaults_end_the_process_at_once(signum: signal.Signals) -> None:
    code = f"""
import os, signal
from trainer.stop import Stop, restore_defaults
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Stop().install()
restore_defaults()
os.kill(os.getpid(), {int(signum)})
print("still here")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signum, "", "")


def test_restore_defaults_undoes_an_inherited_ignore() -> None:
    """A shell's background job, or nohup, starts with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    restore_defaults()
    assert all(signal.getsignal(signum) is signal.SIG_DFL for signum in SIGNALS)
