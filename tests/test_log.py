"""Log lines: their two forms, who says what where, and output that cannot be written."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer import log

ROOT = Path(__file__).resolve().parent.parent

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def logger() -> Iterator[None]:
    """Put the logger back."""
    logger = log.LOGGER
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_text_has_the_time_and_the_message_alone(capfd: Captured) -> None:
    log.setup("text", rank=0)
    log.info("step 3/7 loss 0.5", step=3)
    assert re.fullmatch(r"\d\d:\d\d:\d\d step 3/7 loss 0\.5\n", capfd.readouterr().out)


def test_warnings_and_errors_name_the_rank_and_go_to_stderr(capfd: Captured) -> None:
    log.setup("text", rank=3)
    log.warning("low")
    log.error("gone")
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"\S+ warning \[rank 3\] low\n\S+ error \[rank 3\] gone\n", err)


def test_a_process_that_is_no_rank_names_none(capfd: Captured) -> None:
    log.setup("text")
    log.info("starting")
    log.error("gone")
    out, err = capfd.readouterr()
    assert out.endswith(" starting\n")
    assert re.fullmatch(r"\S+ error gone\n", err)


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), (0, 1), (1, 0), (7, 0)])
@pytest.mark.parametrize("form", ["text", "json"])
def test_information_comes_from_rank_0_alone(form: str, rank: int | None, lines: int, capfd: Captured) -> None:
    log.setup(form, rank=rank)
    log.info("hello")
    assert len(capfd.readouterr().out.splitlines()) == lines


def test_json_lines_share_one_schema(capfd: Captured) -> None:
    log.setup("json", rank=0)
    log.info("step", step=3, loss=0.5)
    log.warning('a "quoted"\nline')
    out, err = capfd.readouterr()
    first, second = json.loads(out), json.loads(err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {"level": "info", "rank": 0, "message": "step", "step": 3, "loss": 0.5}
    assert (second["level"], second["message"]) == ("warning", 'a "quoted"\nline')
    assert err.count("\n") == 1


def test_json_stays_json_when_the_loss_is_not_finite(capfd: Captured) -> None:
    log.setup("json", rank=0)
    log.info("step", loss=float("nan"), rate=float("inf"), evaluation={"loss": float("nan")})

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    line = json.loads(capfd.readouterr().out, parse_constant=refuse)
    assert (line["loss"], line["rate"], line["evaluation"]) == (None, None, {"loss": None})


def _fail() -> None:
    password = "of-the-" + "frame"
    raise KeyError("nope", len(password))


@pytest.mark.parametrize("form", ["text", "json"])
def test_failure_shows_where_but_no_values(form: str, capfd: Captured) -> None:
    log.setup(form, rank=1)
    try:
        _fail()
    except KeyError:
        log.failure("unexpected KeyError")
    err = capfd.readouterr().err
    assert "unexpected KeyError" in err
    assert "in _fail" in err
    assert "of-the-frame" not in err
    if form == "json":
        assert json.loads(err)["traceback"].splitlines()[-1].startswith("KeyError:")
    else:
        assert "[rank 1]" in err.splitlines()[0]


def test_show_writes_the_text_as_it_stands(capfd: Captured) -> None:
    log.show("\na table\n")
    assert capfd.readouterr().out == "\na table\n"


def test_setup_again_replaces_the_form(capfd: Captured) -> None:
    log.setup("text")
    log.setup("json", rank=0)
    log.info("once")
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["message"] == "once"


def test_other_loggers_are_left_alone() -> None:
    log.setup("json", rank=0)
    assert log.LOGGER.name == "trainer"
    assert not log.LOGGER.propagate
    assert not any(isinstance(handler, log._Stream) for handler in logging.getLogger().handlers)


class _Stuck(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("closed file")]
)
@pytest.mark.parametrize("write", [log.info, log.show])
def test_output_that_cannot_be_written_stops_nothing(
    error: Exception, write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.setup("text", rank=0)
    monkeypatch.setattr(sys, "stdout", _Stuck(error))
    write("hello")


def test_process_ends_well_though_the_reader_has_gone() -> None:
    """What stays in the buffer must not turn the interpreter's end into code 120."""
    code = "from trainer import log; log.setup('text'); log.info('1'); log.info('2'); log.show('3'); print('4')"
    reader, out = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    os.close(out)
    assert (ended.returncode, ended.stderr) == (0, "")
