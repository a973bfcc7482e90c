"""The flight recorder: who is asked, and that nobody is waited for. Pipes are real; that torch reads them takes NCCL, and so a GPU."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from trainer.agent import flight_recorder


def test_a_rank_that_reads_its_pipe_is_asked_and_what_it_writes_is_found() -> None:
    with flight_recorder() as made:
        stem, dump = (made.environment[name] for name in ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"))
        # As torch does: made by the rank, opened for reading without waiting, looked at now and then.
        os.mkfifo(f"{stem}3.pipe")
        pipe = os.open(f"{stem}3.pipe", os.O_RDONLY | os.O_NONBLOCK)
        made.ask([2, 3])
        assert os.read(pipe, 128) == b"1"
        os.close(pipe)
        assert made.written() == []
        Path(f"{dump}3").write_bytes(b"collectives")
        assert made.written() == [Path(f"{dump}3")]
    assert Path(f"{dump}3").exists()  # for whoever looks into it


def test_nothing_stays_where_nothing_was_written() -> None:
    with flight_recorder() as made:
        folder = Path(made.environment["TORCH_FR_DUMP_TEMP_FILE"]).parent
        assert folder.is_dir()
        made.ask(range(8))  # gloo: no pipes
    assert not folder.exists()


@pytest.mark.timeout(20)
def test_a_pipe_that_is_full_or_that_nobody_reads_is_not_waited_for() -> None:
    with flight_recorder() as made:
        stem = made.environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
        for rank in (0, 1):
            os.mkfifo(f"{stem}{rank}.pipe")
        reader = os.open(f"{stem}1.pipe", os.O_RDONLY | os.O_NONBLOCK)
        filler = os.open(f"{stem}1.pipe", os.O_WRONLY | os.O_NONBLOCK)
        os.write(filler, bytes(65536))
        asking = threading.Thread(target=made.ask, args=([0, 1],))
        asking.start()
        asking.join(10)
        assert not asking.is_alive()
        os.close(reader)
        os.close(filler)
