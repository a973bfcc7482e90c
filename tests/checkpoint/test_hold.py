"""Who holds a run's folder: the second waits and says for whom; the dead, and their children, hold nothing."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer import log
from trainer.checkpoint import hold
from trainer.codes import PEER_LOST, PeerLost, SettingError, Stopped

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

Holder = Callable[..., int]


@pytest.fixture
def holder() -> Iterator[Holder]:
    """Give a function that starts a process which holds a folder, and returns its pid once it does."""
    pids: list[int] = []

    def start(folder: Path, *, seconds: float = 60, with_child: bool = False) -> int:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                with hold(folder, wait_seconds=0):
                    if with_child and not os.fork():
                        time.sleep(5)
                        os._exit(0)
                    os.write(write_end, b"x")
                    time.sleep(seconds)
            finally:
                os._exit(0)
        pids.append(pid)
        os.close(write_end)
        assert os.read(read_end, 1) == b"x"
        os.close(read_end)
        return pid

    yield start
    for pid in pids:
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # it has been


def test_second_waits_then_says_who_holds_it(
    tmp_path: Path, holder: Holder, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = holder(tmp_path)
    log.setup("text", rank=0)
    with pytest.raises(PeerLost) as caught, hold(tmp_path, wait_seconds=0.5):
        pass
    assert caught.value.code == PEER_LOST
    line = str(caught.value)
    assert line.startswith(f"{tmp_path} is held by process {pid} on host {socket.gethostname()} since 20")
    assert line.endswith("; waited 0.5 s for it; end that run, or choose another --run-name")
    assert f"is held by process {pid} on host" in capsys.readouterr().out


def test_second_goes_on_when_the_first_ends(tmp_path: Path, holder: Holder) -> None:
    holder(tmp_path, seconds=0.3)
    with hold(tmp_path, wait_seconds=60):
        pass


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_second_goes_on_when_a_signal_ends_the_first(tmp_path: Path, holder: Holder, signum: int) -> None:
    pid = holder(tmp_path)
    threading.Timer(0.2, os.kill, (pid, signum)).start()
    with hold(tmp_path, wait_seconds=60):
        pass


def test_dead_holder_does_not_count(tmp_path: Path, holder: Holder) -> None:
    _kill(holder(tmp_path))
    with hold(tmp_path, wait_seconds=0):
        pass
    with hold(tmp_path, wait_seconds=0):  # nor one that has let go
        pass


def test_child_that_outlives_its_killed_parent_holds_nothing(tmp_path: Path, holder: Holder) -> None:
    _kill(holder(tmp_path, with_child=True))
    with hold(tmp_path, wait_seconds=0):
        pass


def test_stop_signal_ends_the_waiting(tmp_path: Path, holder: Holder) -> None:
    holder(tmp_path)
    with pytest.raises(Stopped) as caught, hold(tmp_path, wait_seconds=60, stop=lambda: signal.SIGTERM):
        pass
    assert caught.value.code == 143


def test_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lockf(descriptor: int, command: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    log.setup("text", rank=0)
    with hold(tmp_path, wait_seconds=60):
        pass
    assert f"warning [rank 0] {tmp_path} cannot be locked (No locks available)" in capsys.readouterr().err


def test_lock_can_be_taken_by_the_group_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        with hold(tmp_path, wait_seconds=0):
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o660
    finally:
        os.umask(old)


def test_folder_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingError, match=r"missing cannot be written \(No such file"),
        hold(tmp_path / "missing", wait_seconds=0),
    ):
        pass
