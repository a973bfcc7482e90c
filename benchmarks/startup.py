"""Time from start to help, and from start to the end of the first optimizer step, beside a bare script. Run by `make bench-startup`.

Rounds in turns, so that a slow minute of the machine meets everything alike; medians are printed. Figures are shown, never judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from timing import TRAINER, print_table, timed

BARE = Path(__file__).with_name("bare.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COMMANDS = {
    "import typer, rich": (sys.executable, "-c", "import typer, rich"),
    "trainer --help": (*TRAINER, "--help"),
    "trainer train --help": (*TRAINER, "train", "--help"),
}
FIRST_STEPS = ("bare script, python", "trainer, 1 rank", "bare script, torchrun, 2 ranks", "trainer, 2 ranks")


def whole(*command: str) -> float:
    """Return the seconds from the start of a command to its end."""
    return timed(command).seconds


def bare(*launcher: str) -> float:
    """Return the seconds from the start of a bare script to the end of its step."""
    run = timed([*launcher, BARE])
    return float(run.stdout.split()[-1]) - run.started


def ours(ranks: int, *, cache: Path) -> float:
    """Return the seconds from the start of `trainer train` to the end of its first step."""
    with tempfile.TemporaryDirectory() as runs:
        options = f"--steps 1 --run-name bench --runs-dir {runs} --device cpu --nproc-per-node {ranks}"
        run = timed([*TRAINER, "train", *options.split()], env={"TRAINER_CACHE_DIR": str(cache)})
        summary = json.loads((Path(runs) / "bench" / "summary.json").read_text())
    return float(summary["first_step_unix_seconds"]) - run.started


def measure(rounds: int, *, cache: Path) -> dict[str, list[float]]:
    """Run everything in turns; return the seconds of each round by name."""
    bare_one, bare_two = partial(bare, sys.executable), partial(bare, *TORCHRUN)
    first_steps = (bare_one, partial(ours, 1, cache=cache), bare_two, partial(ours, 2, cache=cache))
    tasks: dict[str, Callable[[], float]] = {name: partial(whole, *command) for name, command in COMMANDS.items()}
    tasks |= dict(zip(FIRST_STEPS, first_steps, strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(1, rounds + 1):
        print(f"round {number} of {rounds}", file=sys.stderr)
        for name, task in tasks.items():
            seconds[name].append(task())
    return seconds


def rows_of(names: tuple[str, ...], *, seconds: dict[str, list[float]], beside: str) -> list[list[str]]:
    """Return table rows: the median, its spread, and how it compares with the median named `beside`."""
    middle = median(seconds[beside])
    rows = []
    for name in names:
        own = median(seconds[name])
        spread = f"{min(seconds[name]):.2f}-{max(seconds[name]):.2f}"
        rows.append([name, f"{own:.2f}", spread, f"{own / middle:.2f}", f"{own - middle:+.2f}"])
    return rows


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        cold = ours(1, cache=Path(folder))
        seconds = measure(rounds, cache=Path(folder))
    head = ["s", "min-max", "ratio", "s more"]
    helps = tuple(COMMANDS)
    print_table([["start to end", *head], *rows_of(helps, seconds=seconds, beside=helps[0])])
    print("aim: a ratio of 2\n")
    one, two = FIRST_STEPS[:2], FIRST_STEPS[2:]
    pairs = rows_of(one, seconds=seconds, beside=one[0]) + rows_of(two, seconds=seconds, beside=two[0])
    print_table([["start to the end of the first step", *head], *pairs])
    print(f"with an empty cache, 1 rank: {cold:.2f} s")
    print("aims: at most 0.7 s more with 1 rank, no more than torchrun with 2")


if __name__ == "__main__":
    main()
