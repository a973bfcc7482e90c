"""What the benchmarks share: a clean environment, the time of one process, a table. No figure is judged here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The caller's variables that every measured process gets; the rest (launchers, settings, threads) would change what is measured.
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

TRAINER = (sys.executable, "-m", "trainer")
IMPORT_TORCH = (sys.executable, "-c", "import torch, torchvision")


@dataclass(frozen=True)
class Timed:
    """When a process started (seconds since 1970), how long it took, and what it printed."""

    started: float
    seconds: float
    stdout: str


def timed(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> Timed:
    """Run a command to its end on the CPU; a failure ends the benchmark with what the command printed."""
    clean = {name: os.environ[name] for name in KEPT if name in os.environ}
    clean |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | dict(env or {})
    started, clock = time.time(), time.perf_counter()
    run = subprocess.run([*map(str, command)], env=clean, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - clock
    if run.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {run.returncode}\n{run.stdout}{run.stderr}")
    return Timed(started, seconds, run.stdout)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        print(
            "  ".join(
                [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
            )
        )
