"""A long list costs the same memory from the first steps to the last, in all loader processes together, with few open files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from tests.conftest import ROOT

ENTRIES = 200_000

#: Prints the memory of the process and its loader processes after 20 steps and after each epoch, in kB. Pages that processes share
#: count once; those of files, which the kernel drops and reads again as it likes, do not.
SCRIPT = """
import json, sys
from multiprocessing import active_children
from pathlib import Path
from trainer import data
from trainer.config import Config

def memory():
    pids = [child.pid for child in active_children()]
    lines = [line.split() for pid in ("self", *pids) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return len(pids), sum(int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))

root = Path(sys.argv[1])
config = Config(dataset="list", data_dir=root, train_list=root / "list", test_list=root / "short", image_size=8)
dataset = data.load(config, cache_dir=None)
batch, epochs, found = 250, 3, []
steps = epochs * len(dataset.train) // batch
options = {"seed": 0, "global_batch": batch, "rank": 0, "world": 1, "start": 0, "steps": steps, "workers": 2, "pin": False}
with data.train_batches(dataset, **options) as batches:
    for number, made in enumerate(batches, start=1):
        assert made.error is None, made.error
        if number == 20 or number * batch % len(dataset.train) == 0:
            found.append(memory())
print(json.dumps([len(dataset.train), found]))
"""


def limit_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def test_memory_of_a_long_list_does_not_grow_and_256_open_files_are_enough(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    places = [f"training-pictures/class-{number % 4}/picture-{number:012d}.jpg" for number in range(16)]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / place)
    rows = [f"{place} {number % 4}\n" for number, place in enumerate(places)]
    (tmp_path / "list").write_text("".join(rows * (ENTRIES // len(rows))))
    (tmp_path / "short").write_text("".join(rows))
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, preexec_fn=limit_open_files)
    assert (run.returncode, run.stderr) == (0, "")
    count, found = json.loads(run.stdout)
    processes, kilobytes = zip(*found, strict=True)
    told = f"MB after 20 steps and after each epoch: {[round(value / 1024) for value in kilobytes]}"
    print(told)  # noqa: T201 - to be read with -s
    assert count == ENTRIES
    assert processes == (2, 2, 2, 2)
    assert max(kilobytes[2:]) < 1.1 * kilobytes[1]
