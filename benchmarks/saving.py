"""Time what saving costs the training thread, beside torch.save and fsync of the same state. Run by `make bench-saving`.

The state is resnet101's with the momentum of SGD (0.36 GB). "Stall" is how long the training thread stands still: for torch.save until
the bytes are on the disk, for ours until the state is copied. The memory for that was asked for one training step before the
first save, in the background (`reserve`). The two take turns.
Then the steps of a small CPU training on half of the CPUs are timed, without a save and while one is under way. Files go to the
folder given as argument, which should be on a disk. Nothing is judged here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from timing import print_table
from torch import Tensor, nn

from trainer.checkpoint import Writer
from trainer.config import build
from trainer.optim import build_optimizer, optimizer_tensors

Tensors = dict[str, Tensor]


def make_state(device: torch.device) -> tuple[Tensors, Tensors]:
    """Return the weights of resnet101, and its momentum after one step, as they are saved."""
    model = torchvision.models.resnet101(weights=None).to(device)
    optimizer = build_optimizer(model, build({}))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return model.state_dict(), optimizer_tensors(optimizer, model)


def seconds(act: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def save_by_torch(path: Path, *, model: Tensors, optimizer: Tensors) -> None:
    """Save as most training scripts do, and wait for the disk."""
    with path.open("wb") as file:
        torch.save({"model": model, "optimizer": optimizer}, file)
        file.flush()
        os.fsync(file.fileno())


def measure_stalls(writer: Writer, folder: Path, *, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each round: torch.save, our stall, and our whole save."""
    model, optimizer = make_state(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    theirs, stalls, whole = [], [], []
    writer.reserve(model=model, optimizer=optimizer)
    time.sleep(1)
    for step in range(1, rounds + 1):
        model["bn1.running_mean"].add_(1)
        theirs.append(seconds(lambda: save_by_torch(folder / "torch.pt", model=model, optimizer=optimizer)))
        stalls.append(seconds(lambda at=step: writer.submit(step=at, model=model, optimizer=optimizer, state={})))
        (outcome,) = writer.poll(wait=True)
        if outcome.error:
            raise SystemExit(str(outcome.error))
        whole.append(outcome.seconds)
    return theirs, stalls, whole


def make_step() -> Callable[[], None]:
    """Return a training step of a small network on pictures of CIFAR's size, about 50 ms long."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))

    def step() -> None:
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_steps(writer: Writer, *, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without a save and of those that begin and end while one is under way, in turns."""
    step, (model, optimizer) = make_step(), make_state(torch.device("cpu"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    for _ in range(5):
        step()
    normal, meanwhile = [], []
    for number in range(rounds):
        normal += [seconds(step) for _ in range(30)]
        model["bn1.running_mean"].add_(1)
        writer.submit(step=1000 + number, model=model, optimizer=optimizer, state={}, wait=True)
        while writer.is_busy:
            meanwhile.append(seconds(step))
        meanwhile.pop()
        writer.poll(wait=True)
    return normal, meanwhile


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to write; default: runs")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as name, Writer(Path(name) / "checkpoints", keep=1) as writer:
        theirs, stalls, whole = measure_stalls(writer, Path(name), rounds=given.rounds)
        normal, meanwhile = measure_steps(writer, rounds=given.rounds)
    rows = [("seconds", "torch.save + fsync", "our stall", "part", "our whole save")]
    for name, chosen in (("first save", slice(0, 1)), ("later saves, median", slice(1, None))):
        their, stall, all_of_it = (statistics.median(values[chosen]) for values in (theirs, stalls, whole))
        rows.append((name, f"{their:.3f}", f"{stall:.3f}", f"{stall / their:.3f}", f"{all_of_it:.3f}"))
    print_table(rows)
    usual, slowed = statistics.median(normal), statistics.median(meanwhile)
    print(
        f"\nmedian step: {usual * 1e3:.1f} ms without a save, {slowed * 1e3:.1f} ms during one ({slowed / usual:.2f} x, {len(meanwhile)} steps)"
    )
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads for the steps")


if __name__ == "__main__":
    main()
