"""The commands of the pages, each with what keeps it short in a test, and the blocks that they stand in."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from trainer import codes

README, RUNNING = "README.md", "docs/running.md"
LAUNCHING, EXTENDING = "docs/launching.md", "docs/extending.md"
DATA, CHECKPOINTS, METRICS = "docs/data.md", "docs/checkpoints.md", "docs/metrics.md"
PAGES = (README, RUNNING, LAUNCHING, EXTENDING, DATA, CHECKPOINTS, METRICS)

TINY = " --steps 2 --log-every 1 --limit-test 10"
SAVED_TWICE = f"{TINY} --checkpoint-every 1"
#: Both nodes on this machine; an option wins over a pod's variable.
HERE = f"{TINY} --master-addr 127.0.0.1 --master-port {{port}}"

FAKE_NVML = """
class NVMLError(Exception): ...
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlDeviceGetCount(): return 8
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(index): return f"GPU-{index}fa5e"
def nvmlDeviceGetName(index): return "Fake"
def nvmlSystemGetDriverVersion(): return "1.0"
"""


def draw_pictures(folder: Path) -> None:
    """Lay out what the pages read: 2 classes, a few PNG files in each split, lists of them and an archive."""
    from PIL import Image

    if (folder / "pictures").exists():
        return
    for split, count in (("train", 12), ("val", 4)):
        for name, colour in (("cat", "orange"), ("dog", "gray")):
            place = folder / "pictures" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40 + number, 30), colour).save(place / f"{number}.png")
    rows = {split: sorted((folder / "pictures" / split).glob("*/*.png")) for split in ("train", "val")}
    named = {
        split: [(path.relative_to(folder / "pictures"), path.parent.name) for path in rows[split]] for split in rows
    }
    (folder / "train.txt").write_text("".join(f"{path} {label}\n" for path, label in named["train"]))
    (folder / "test.csv").write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in named["val"]))
    shutil.make_archive(str(folder / "pictures"), "zip", folder / "pictures")


@dataclass(frozen=True)
class Case:
    """Say how a command of a page is run.

    Attributes:
        extra: appended to it; {port} is a free port, {data} the folder of the test data.
        code: its exit code.
        waits: whether the next command begins after its end.
        gpus: whether the machine seems to have 8 GPUs (which torch cannot use).
        prepare: called with the folder first.
        by_launchers: whether it takes Slurm or MPI, or time, and is a line of tests/launchers/rows.py instead.
    """

    extra: str = ""
    code: int = 0
    waits: bool = True
    gpus: bool = False
    prepare: Callable[[Path], None] | None = None
    by_launchers: bool = False


PET = "PET_NNODES=2 PET_NODE_RANK={} PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=node0 PET_MASTER_PORT=23456 trainer train"
INDEXED = "JOB_COMPLETION_INDEX={} PET_NNODES=2 PET_MASTER_ADDR=node0 PET_MASTER_PORT=29500 trainer train"
HOSTS = "mpirun -n 2 --host node0,node1 -x MASTER_ADDR=node0 {}"
OLD = "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 trainer {}=0 train"
LEGACY = "python -m torch.distributed.launch {}--nproc-per-node 2 -m trainer train"
VISIBLE = "CUDA_VISIBLE_DEVICES=1,2,3,4 "
RESNET = (
    "trainer train --dataset mnist --data-dir data --model resnet101 --optimizer adam --lr 1e-3 --schedule constant "
    "--warmup 0 --weight-decay 0 --augment none --global-batch-size 256"
)

FOLDER = "trainer train --dataset folder --data-dir pictures --image-size 64 --global-batch-size 8 --lr 0.02"
PICTURES = Case(f"{TINY} --global-batch-size 8", prepare=draw_pictures)
RECIPE = Case(f"{TINY} --global-batch-size 8 --image-size 32 --weights=", prepare=draw_pictures)

CASES = {
    "make train": Case(" ARGS='--steps 2 --log-every 1 --limit-test 10 --cache-dir cold'"),
    "make test": Case(" ARGS='tests/test_launch_hostlist.py'"),
    "trainer train --env-file recipes/mnist.env --data-dir data": Case(f"{TINY} --data-dir {{data}}/mnist"),
    "TRAINER_LR=0.1 trainer config --env-file recipes/glyphs.env": Case(),
    "trainer train --run-name first": Case(SAVED_TWICE),
    "trainer eval runs/first": Case(),
    "trainer train --run-name again": Case(SAVED_TWICE),
    "trainer train --run-name other --resume runs/again/checkpoints/step-00000500": Case(
        f"{TINY} --resume runs/again/checkpoints/step-00000001"
    ),
    "trainer train --run-name traced --trace trace": Case(TINY),
    "head -n 2 trace/rank-0.csv": Case(),
    "trainer launch --nproc-per-node 2": Case(),
    "trainer train": Case(TINY),
    "trainer train --nproc-per-node 2": Case(TINY),
    "trainer train --nnodes 2 --node-rank 0 --master-addr node0": Case(HERE, waits=False),
    "trainer train --nnodes 2 --node-rank 1 --master-addr node0": Case(HERE),
    PET.format(0): Case(HERE, waits=False),
    PET.format(1): Case(HERE),
    "torchrun --standalone --nproc-per-node 2 -m trainer train": Case(TINY),
    LEGACY.format(""): Case(TINY),
    LEGACY.format("--use-env "): Case(TINY),
    OLD.format("--local_rank"): Case(TINY),
    OLD.format("--local-rank"): Case(TINY),
    **dict.fromkeys(
        (
            INDEXED.format(0),
            INDEXED.format(1),
            "srun --ntasks 2 trainer train",
            "srun --nodes 2 --ntasks-per-node 1 trainer train --nproc-per-node 2",
            "sbatch train.sbatch",
            "sbatch mpi.sbatch",
            "mpirun -n 2 trainer train",
            HOSTS.format("trainer train"),
            HOSTS.format("--bind-to none trainer train --nproc-per-node 2"),
        ),
        Case(by_launchers=True),
    ),
    "trainer train --launcher spawn --nproc-per-node 2": Case(TINY),
    "trainer train --launcher none": Case(TINY),
    # A whole batch takes a CPU 20 s per step and more.
    RESNET: Case(f"{TINY} --data-dir {{data}}/mnist --global-batch-size 8"),
    "trainer train --strategy dp": Case(TINY, code=codes.SETTING),
    f"{VISIBLE}trainer launch --nproc-per-node 2": Case(gpus=True),
    f"{VISIBLE}trainer launch --nproc-per-node 4": Case(gpus=True),
    f"{VISIBLE}RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 MASTER_ADDR=127.0.0.1 trainer launch": Case(gpus=True),
    f"{VISIBLE}trainer train --nproc-per-node 5": Case(TINY, code=codes.SETTING, gpus=True),
    "trainer train --model small:build --dropout 0.1 --lr 0.02": Case(TINY),
    "trainer train --model small:build --nproc-per-node 2": Case(TINY),
    "trainer train --dataset shapes:load": Case(TINY),
    FOLDER: PICTURES,
    FOLDER.replace("folder", "list").replace(
        "--image", "--train-list train.txt --test-list test.csv --image"
    ): PICTURES,
    "trainer prepare --dataset folder --data-dir unpacked --archive pictures.zip --image-size 64": Case(
        prepare=draw_pictures
    ),
    "trainer train --dataset folder --data-dir unpacked --archive pictures.zip --image-size 64": PICTURES,
    f"{FOLDER} --model resnet18 --run-name base": PICTURES,
    f"{FOLDER} --model resnet18 --weights runs/base --freeze-backbone": PICTURES,
    # The weights' names want a network.
    "trainer train --env-file recipes/folder-finetune.env --data-dir pictures": RECIPE,
    "trainer train --env-file recipes/list-efficientnet-b0.env --data-dir pictures --train-list train.txt --test-list test.csv": RECIPE,
    "trainer train --dataset mine:load --data-dir pictures --workers 2": Case(
        f"{TINY} --global-batch-size 16", prepare=draw_pictures
    ),
}


@dataclass(frozen=True)
class Block:
    """Hold a console block: where it is, and its commands with the lines shown below each."""

    page: str
    line: int
    commands: tuple[tuple[str, tuple[str, ...]], ...]


def fenced(page: str, language: str) -> Iterator[tuple[int, list[str]]]:
    """Give (line number, lines) of each block of a language in a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S):
        yield text[: match.start()].count("\n") + 2, match[1].splitlines()


def console_blocks(page: str) -> list[Block]:
    blocks = []
    for number, lines in fenced(page, "console"):
        assert lines[0].startswith("$ "), f"{page}:{number} begins with no command"
        commands: list[tuple[str, list[str]]] = []
        for line in lines:
            if line.startswith("$ "):
                commands.append((line[2:], []))
            elif line != "...":
                commands[-1][1].append(line)
        blocks.append(Block(page, number, tuple((command, tuple(shown)) for command, shown in commands)))
    return blocks


def is_by_launchers(block: Block) -> bool:
    return any(CASES.get(command, Case()).by_launchers for command, _ in block.commands)


ALL_BLOCKS = [block for page in PAGES for block in console_blocks(page)]
BLOCKS = [block for block in ALL_BLOCKS if not is_by_launchers(block)]
LAUNCHER_BLOCKS = [block for block in ALL_BLOCKS if is_by_launchers(block)]
COMMANDS = [command for block in ALL_BLOCKS for command, _ in block.commands]


def like(shown: str) -> str:
    """Return a pattern for what a shown line may be: other numbers and column widths, one thread or more, anything for "..."."""
    number = r"\d+(?:[.:]\d+)*(?:e[+-]?\d+)?"
    wild = {"...": ".*", "threads": "threads?"}
    parts = re.split(rf"(\.\.\.|threads|  +|{number})", shown.rstrip())
    return "".join(
        "  +" if part[:2] == "  " else number if re.fullmatch(number, part) else wild.get(part, re.escape(part))
        for part in parts
    )
