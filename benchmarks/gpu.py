"""Compare `fit` with a bare loop on the same model, batch and device: samples per second, in turns in one run.

The bare loop has one batch on the device and does forward, backward, step; nothing else. What `fit` does beside that (order,
loading, copying, normalising, the agreement, the log) is the difference. Without a GPU it runs on the CPU and says so.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from trainer import log
from trainer.beat import Allowance, Pulse
from trainer.config import Config, build
from trainer.data import load, train_batches
from trainer.evaluate import Score
from trainer.group import alone
from trainer.metrics import Recorder
from trainer.models import build_model
from trainer.optim import build_optimizer
from trainer.progress import Live
from trainer.stop import Stop
from trainer.train import State, Update, fit, make_plan
from trainer.train.loop import autocast
from trainer.train.meter import Meter
from trainer.train.prepare import Prepare
from trainer.train.split import Waiting


def make_state(config: Config, device: torch.device) -> State:
    """Build model and optimizer of the benchmark's data set."""
    dataset = load(config, cache_dir=None)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = build_model(config, classes=dataset.classes, shape=dataset.shape).to(device, memory_format=layout)
    return State(model, model, build_optimizer(model, config))


def wait(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class NoSaves:
    """Save nothing."""

    def reserve(self) -> None:
        """Do nothing."""

    def __call__(self, *, last: bool) -> None:
        """Do nothing."""


def run_fit(config: Config, device: torch.device) -> float:
    """Train `config.steps` steps with `fit` and return the seconds from the first call to the end."""
    dataset, group = load(config, cache_dir=None), alone(device)
    plan, state = make_plan(config, samples=len(dataset.train), world=1), make_state(config, device)
    prepare = Prepare(dataset, device, channels_last=config.channels_last)
    stream = {"seed": 0, "global_batch": plan.global_batch, "rank": 0, "world": 1, "start": 0, "steps": plan.steps}
    live = Live(wanted=False)
    with train_batches(dataset, **stream, workers=config.workers or 0, pin=device.type == "cuda") as batches:
        began = time.monotonic()
        update, meter = (
            Update(config, plan, group, prepare, classes=dataset.classes),
            Meter(
                plan,
                group,
                start=0,
                live=live,
                pulse=Pulse(Allowance()),
                recorder=Recorder.off(),
                waiting=Waiting(state.network),
            ),
        )
        nothing = Score(0.0, 0.0, 0.0, 0)
        fit(state, batches, update=update, stop=Stop(), meter=meter, evaluate=lambda: nothing, save=NoSaves())
        wait(device)
        return time.monotonic() - began


def run_bare(config: Config, device: torch.device) -> float:
    """Train as many steps on one batch that lies on the device and return the seconds."""
    state, batch = make_state(config, device), config.global_batch_size
    dataset = load(config, cache_dir=None)
    inputs = torch.rand(batch, *dataset.shape, device=device)
    if config.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, dataset.classes, (batch,), device=device)
    began = time.monotonic()
    for _ in range(config.steps or 0):
        with autocast(config, device):
            loss = F.cross_entropy(state.model(inputs), labels)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
    wait(device)
    return time.monotonic() - began


def compare(name: str, config: Config, device: torch.device, *, rounds: int) -> None:
    """Run both in turns and print the medians and their ratio."""
    for run in (run_fit, run_bare):
        run(config, device)  # once for the caches
    times: dict[str, list[float]] = {"fit": [], "bare": []}
    for _ in range(rounds):
        times["fit"].append(run_fit(config, device))
        times["bare"].append(run_bare(config, device))
    samples = config.global_batch_size * (config.steps or 0)
    fit_rate, bare_rate = (samples / statistics.median(times[kind]) for kind in ("fit", "bare"))
    print(f"{name:<34} {fit_rate:>12,.0f} {bare_rate:>12,.0f} {fit_rate / bare_rate:>8.3f}", flush=True)


def main() -> None:
    """Print one line per case: samples/s of fit, of the bare loop, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps per round; 0 takes 200 on a GPU, 10 on a CPU")
    given = parser.parse_args()
    log.setup("text", rank=1)  # rank 0 would log its steps
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    print(
        f"device: {torch.cuda.get_device_name(device) if on_gpu else 'cpu (no GPU is usable)'}, torch {torch.__version__}"
    )
    print(f"{'case':<34} {'fit, /s':>12} {'bare, /s':>12} {'ratio':>8}")
    common = {
        "dataset": "random",
        "limit_train": 50_000,
        "limit_test": 10,
        "steps": given.steps or (200 if on_gpu else 10),
    }
    cases = {
        "cnn 1x28x28 batch 1024": {"random_shape": "1x28x28", "global_batch_size": 1024},
        "resnet18 3x64x64 batch 256": {"model": "resnet18", "random_shape": "3x64x64", "global_batch_size": 256},
    }
    if on_gpu:
        fast = {"precision": "bf16", "channels_last": True, "workers": 4}
        cases["resnet18 3x64x64 batch 256 bf16"] = cases["resnet18 3x64x64 batch 256"] | fast
        cases["resnet50 3x224x224 batch 128 bf16"] = {
            "model": "resnet50",
            "random_shape": "3x224x224",
            "global_batch_size": 128,
            **fast,
        }
    else:
        cases = {"cnn 1x28x28 batch 256": {"random_shape": "1x28x28"}}
    for name, settings in cases.items():
        compare(name, build(common | settings), device, rounds=given.rounds)


if __name__ == "__main__":
    main()
