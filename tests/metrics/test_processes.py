"""The ranks of a node as real processes: counters go on over a restart, last values outlive a kill, and all of it is a small scrape."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.metrics.conftest import fetch, parse
from trainer.metrics import AgentRecorder

RANKS = 8

#: A rank that begins, takes a step for each line that it reads, and says so; its loss is not a number.
RANK = """
import sys
from pathlib import Path
from trainer.metrics import Recorder
assert "torch" not in sys.modules
rank, step = int(sys.argv[2]), int(sys.argv[3])
recorder = Recorder.open(Path(sys.argv[1]), rank=rank, local_rank=rank)
recorder.build(version="0.1.0", torch="2.14.1+cu130", cuda="13.0", nccl="2.28.9", python="3.11.9")
recorder.run(run="x" * 200, model="resnet50", dataset="folder", strategy="ddp", backend="nccl", precision="bf16")
recorder.device(device=f"cuda:{rank}", uuid=f"GPU-{rank:032x}", model="NVIDIA H200 SXM5 141GB")
for stage in ("import", "rendezvous", "data", "model"):
    recorder.stage(stage)
recorder.world(size=8, expected=8, global_batch_size=256)
recorder.restored(step or None, saved_at=1e9)
recorder.phase("train")
recorder.begin(step, target_steps=1000, epochs_per_step=0.001, checkpoint_every=5, clips=True)
recorder.memory(allocated=1 << 30, reserved=1 << 31)
print("ready", flush=True)
for line in sys.stdin:
    step += 1
    recorder.step(step, samples=32, data_wait=0.001, compute=0.002, comm_wait=0.001)
    recorder.interval(loss=float("nan"), learning_rate=0.1, remaining_seconds=3.0, gradient_norm=1.0, bottleneck="data")
    if step % 5 == 0:
        recorder.evaluated(0.001, loss=float("inf"), accuracy=0.5, best=0.5)
        recorder.waited_for_save(0.001, snapshot=0.001)
        recorder.saved(step, seconds=0.1, size=1000)
    print(step, flush=True)
recorder.close()
"""


class Rank:
    """A rank's process."""

    def __init__(self, folder: Path, rank: int, *, step: int = 0) -> None:
        command = [sys.executable, "-c", RANK, folder, str(rank), str(step)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def take_steps(self, count: int) -> None:
        assert self.process.stdin is not None
        for _ in range(count):
            self.process.stdin.write("\n")
            assert self.hear().isdigit()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks(folder) -> Iterator[list[Rank]]:
    ranks = [Rank(folder, rank) for rank in range(RANKS)]
    try:
        assert [rank.hear() for rank in ranks] == ["ready"] * RANKS
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def steps_of(values: dict[str, float]) -> list[float]:
    return [values[f"trainer_steps_total{{rank={rank}}}"] for rank in range(RANKS)]


def counters_of(values: dict[str, float]) -> dict[str, float]:
    endings = ("_total", "_count", "_sum", "_bucket")
    return {name: value for name, value in values.items() if name.partition("{")[0].endswith(endings)}


def went_back(before: dict[str, float], after: dict[str, float]) -> list[str]:
    ours = {name: value for name, value in counters_of(before).items() if name.startswith("trainer_")}
    return [name for name, value in ours.items() if after[name] < value]


def test_node_of_8_ranks_is_a_small_scrape_that_promtool_likes(folder, exporter, ranks, promtool):
    agent = AgentRecorder.open(folder)
    agent.phase("init")
    first = parse(fetch(exporter.port, "/metrics")[1])
    for rank in ranks:
        rank.take_steps(10)
    body = fetch(exporter.port, "/metrics")[1]
    last = parse(body)
    assert last.keys() == first.keys()
    assert len(last) < 350
    assert len(body) < 40_000
    assert promtool(body) == ""
    assert steps_of(last) == [10] * RANKS
    assert last["trainer_step_duration_seconds_count"] == 10 * RANKS
    assert math.isnan(last["trainer_loss"])
    assert last["trainer_nonfinite_losses_total"] == 10


def test_counters_go_on_where_a_killed_rank_left_them(folder, exporter, ranks):
    for rank in ranks:
        rank.take_steps(7)
    ranks[0].kill()
    ranks[3].kill()
    dead = parse(fetch(exporter.port, "/metrics")[1])
    assert steps_of(dead) == [7] * RANKS
    assert dead["trainer_step"] == 7
    time.sleep(0.3)
    ranks[0], ranks[3] = Rank(folder, 0, step=5), Rank(folder, 3, step=5)
    assert ranks[0].hear() == ranks[3].hear() == "ready"
    new = parse(fetch(exporter.port, "/metrics")[1])
    assert went_back(dead, new) == []
    ranks[0].take_steps(3)
    ranks[3].take_steps(3)
    values = parse(fetch(exporter.port, "/metrics")[1])
    assert went_back(new, values) == []
    assert values.keys() == dead.keys()
    assert [values[f"trainer_steps_total{{rank={rank}}}"] for rank in (0, 1, 3)] == [10, 7, 10]
    assert values["trainer_replayed_steps_total"] == 2
    assert values["trainer_restores_total{result=ok}"] == 1
    assert values["trainer_step"] == 8
    assert values["trainer_time_seconds_total{state=down}"] >= 0.3


def test_states_of_the_time_add_up_to_the_wall_clock_over_a_restart(folder, exporter):
    began = time.monotonic()
    for step in (0, 3):
        rank = Rank(folder, 0, step=step)
        assert rank.hear() == "ready"
        rank.take_steps(4)
        if not step:
            opened = parse(fetch(exporter.port, "/metrics")[1])
            rank.kill()
    rank.process.communicate("")
    wall = time.monotonic() - began
    values = parse(fetch(exporter.port, "/metrics")[1])
    total = sum(value for name, value in values.items() if name.startswith("trainer_time_seconds_total"))
    assert total > sum(value for name, value in opened.items() if name.startswith("trainer_time_seconds_total"))
    # The recorder is opened after the interpreter has started and before the process has ended.
    assert wall - 1.5 < total < wall


FORKS = """
import os, sys
from pathlib import Path
from trainer.metrics import Recorder
recorder = Recorder.open(Path(sys.argv[1]), rank=0, local_rank=0)
recorder.message("info")
child = os.fork()
recorder.message("info")
if not child:
    recorder.world(size=1, expected=1, global_batch_size=1)
    os._exit(recorder.is_on)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_forked_child_writes_nothing(folder, exporter):
    assert subprocess.run([sys.executable, "-c", FORKS, folder], cwd=ROOT, check=False, timeout=60).returncode == 0
    values = parse(fetch(exporter.port, "/metrics")[1])
    assert values["trainer_log_messages_total{level=info}"] == 2
    assert "trainer_world_size" not in values


FULL = """
import os, sys
from pathlib import Path
from trainer import log
from trainer.metrics import Recorder
log.setup("text")
folder = Path(sys.argv[1])
recorders = [Recorder.open(folder, rank=rank, local_rank=rank) for rank in range(8)]
for recorder in recorders:
    recorder.begin(0, target_steps=1, epochs_per_step=1.0, checkpoint_every=1)
    recorder.step(1, samples=1, data_wait=0.0, compute=0.0)
print(*(recorder.is_on for recorder in recorders))
"""


def test_full_disk_costs_the_metrics_and_not_the_process(tmp_path):
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=200k tmpfs "$0" && exec "$@"', tmp_path]
    command = [*mount, sys.executable, "-c", FULL, tmp_path]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", *["False"] * 6]
    assert done.stderr.count("No space left on device") == 6
