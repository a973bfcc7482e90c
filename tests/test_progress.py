"""What a person sees: the live line on a terminal, nothing elsewhere, and the table at the end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.progress import Live, duration, table

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (0.6, "0:00:01"), (59.4, "0:00:59"), (59.6, "0:01:00"), (3661, "1:01:01"), (360_000, "100:00:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_table_has_two_columns() -> None:
    assert table([("loss", "0.5"), ("accuracy", "99 %")]) == "loss      0.5\naccuracy  99 %"


def test_live_shows_nothing_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Live(wanted=True) as live:
        assert not live.shown
        live.update(step=1, steps=2, loss=0.5)
    assert capsys.readouterr().out == ""


def on_terminal(code: str) -> str:
    """Run a program whose stdout is a terminal, and return what it wrote there, without colours."""
    master, slave = pty.openpty()
    env = {"TERM": "xterm", "COLUMNS": "80", "PATH": os.environ["PATH"]}
    program = subprocess.Popen([sys.executable, "-c", code], stdout=slave, cwd=ROOT, env=env)
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 4096):
            written += chunk
    except OSError:
        pass  # Linux tells the end of a terminal by an error
    os.close(master)
    assert program.wait(timeout=60) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def test_live_line_tells_step_loss_speed_and_time_left() -> None:
    text = on_terminal(
        "from trainer.progress import Live\n"
        "with Live(wanted=True) as live:\n"
        "    assert live.shown\n"
        "    live.update(step=5, steps=20, loss=0.5, rate=1234.5, left_seconds=61)\n"
        "    live.update(step=20, steps=20)\n"
    )
    assert "step 5/20 (25 %) · loss 0.5000 · 1,234 samples/s · 0:01:01 left" in text
    assert "step 20/20 (100 %) · loss 0.5000 · 1,234 samples/s" in text  # the last step is always shown


def test_log_lines_appear_beside_the_live_line() -> None:
    text = on_terminal(
        "from trainer import log\nfrom trainer.progress import Live\nlog.setup('text', rank=0)\n"
        "with Live(wanted=True) as live:\n"
        "    live.update(step=1, steps=2, loss=0.5)\n"
        "    log.info('saved it')\n"
    )
    assert "saved it\r\n" in text


def test_unwanted_live_line_is_not_shown_on_a_terminal() -> None:
    text = on_terminal(
        "import sys\nfrom trainer.progress import Live\n"
        "with Live(wanted=False) as live:\n    live.update(step=1, steps=2)\n"
        "assert 'rich' not in sys.modules\n"
    )
    assert text == ""
