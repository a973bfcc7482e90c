"""The flight recorder: who is asked, and what is waited for. Pipes are real; that torch reads them takes NCCL, and so a GPU."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from trainer.agent import flight, flight_recorder

PIPE, DUMP, ENTRIES = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what stays out of the machine's own folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextlib.contextmanager
def rank(number: int, environment: Mapping[str, str]) -> Iterator[None]:
    """Be a rank that uses NCCL, as torch is: make the pipe, look at it now and then, write the file when it is asked."""
    pipe = Path(f"{environment[PIPE]}{number}.pipe")
    os.mkfifo(pipe)
    reader, ended = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), threading.Event()

    def look() -> None:
        while not ended.wait(0.3):
            if os.read(reader, 128):
                Path(f"{environment[DUMP]}{number}").write_bytes(b"collectives")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(reader)


def test_ranks_that_can_be_asked_are_waited_for_and_their_files_stay() -> None:
    with flight_recorder({}) as made:
        assert made is not None
        stem, folder = made.environment[DUMP], Path(made.environment[DUMP]).parent
        with rank(3, made.environment), rank(4, made.environment):
            made.ask([2, 3, 4])
            assert made.written() == [Path(f"{stem}3"), Path(f"{stem}4")]
    assert sorted(folder.iterdir()) == [Path(f"{stem}3"), Path(f"{stem}4")]  # for whoever looks into it; no pipes


def test_a_file_of_an_earlier_hang_is_not_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_WAIT_SECONDS", 0.5)
    with flight_recorder({}) as made:
        assert made is not None
        old = Path(f"{made.environment[DUMP]}0")
        with rank(0, made.environment | {DUMP: str(old.with_name("elsewhere"))}):
            old.write_bytes(b"collectives")
            os.utime(old, (time.time() - 60,) * 2)
            made.ask([0])
            assert made.written() == []


def test_nothing_stays_where_nothing_was_written() -> None:
    with flight_recorder({}) as made:
        assert made is not None
        folder = Path(made.environment[DUMP]).parent
        assert folder.is_dir()
        made.ask(range(8))  # gloo: no pipes
        assert made.written() == []
    assert not folder.exists()


USERS = {
    "nothing": ({}, {PIPE: "/f/pipe_", DUMP: "/f/rank_", ENTRIES: "2000"}),
    "another place": ({DUMP: "/mine/"}, {PIPE: "/f/pipe_", ENTRIES: "2000"}),
    "another place, by the old name": (
        {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/"},
        {PIPE: "/f/pipe_", ENTRIES: "2000"},
    ),
    "off": ({"TORCH_FR_BUFFER_SIZE": "0"}, {PIPE: "/f/pipe_", DUMP: "/f/rank_", ENTRIES: "0"}),
    "all, one of them empty": ({PIPE: "/p", DUMP: "", ENTRIES: "9"}, {DUMP: "/f/rank_"}),
}


@pytest.mark.parametrize("name", USERS)
def test_what_the_user_has_set_stays(name: str) -> None:
    environ, wanted = USERS[name]
    assert flight.FlightRecorder(environ, Path("/f")).environment == wanted


def test_the_users_own_pipe_is_asked(tmp_path: Path) -> None:
    own = {PIPE: f"{tmp_path}/own-", DUMP: f"{tmp_path}/dump-"}
    with flight_recorder(own) as made, rank(0, own):
        assert made is not None
        made.ask([0])
        assert made.written() == [tmp_path / "dump-0"]


def test_without_a_place_for_files_there_is_no_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with flight_recorder({}) as made:
        assert made is None


@pytest.mark.timeout(20)
def test_a_pipe_that_is_full_or_that_nobody_reads_is_not_waited_for() -> None:
    with flight_recorder({}) as made:
        assert made is not None
        for number in (0, 1):
            os.mkfifo(f"{made.environment[PIPE]}{number}.pipe")
        reader = os.open(f"{made.environment[PIPE]}1.pipe", os.O_RDONLY | os.O_NONBLOCK)
        filler = os.open(f"{made.environment[PIPE]}1.pipe", os.O_WRONLY | os.O_NONBLOCK)
        os.write(filler, bytes(65536))
        made.ask([0, 1])
        os.close(reader)
        os.close(filler)
