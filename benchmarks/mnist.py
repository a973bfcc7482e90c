"""Time a whole `trainer train --dataset mnist`, start included, beside importing torch. Run by `make bench-mnist`.

TRAINER_TEST_DATA names the folder that holds mnist/ with the four files of the data set. Figures are shown, never judged.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from timing import IMPORT_TORCH, TRAINER, print_table, timed

SEEDS = (0, 1, 2)


def train(seed: int, *, data: Path) -> float:
    """Return the seconds of one whole run."""
    with tempfile.TemporaryDirectory() as runs:
        options = ["--dataset", "mnist", "--data-dir", str(data), "--runs-dir", runs, "--seed", str(seed)]
        return timed([*TRAINER, "train", *options, *sys.argv[1:]]).seconds


def main() -> None:
    """Run every seed, in turns with the import, and print the medians."""
    data = Path(os.environ.get("TRAINER_TEST_DATA", "")).resolve() / "mnist"
    if not data.is_dir():
        sys.exit(f"{data} is not there; TRAINER_TEST_DATA must name the folder that holds mnist/")
    rows, runs, imports = [["seed", "train s", "import torch, torchvision s"]], [], []
    for seed in SEEDS:
        print(f"seed {seed}", file=sys.stderr)
        imports.append(timed(IMPORT_TORCH).seconds)
        runs.append(train(seed, data=data))
        rows.append([str(seed), f"{runs[-1]:.1f}", f"{imports[-1]:.1f}"])
    print_table([*rows, ["median", f"{median(runs):.1f}", f"{median(imports):.1f}"]])


if __name__ == "__main__":
    main()
