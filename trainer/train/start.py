"""What a rank is given to start with, and the choices that follow from it: device, backend, strategy."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from trainer import __version__
from trainer.beat import Pulse
from trainer.codes import SettingError
from trainer.config import Config
from trainer.devices import cuda_facts, device_index
from trainer.launch import Rank
from trainer.metrics import Recorder
from trainer.stop import Stop


@dataclass(frozen=True)
class Start:
    """Hold what came in through the command line and the environment.

    Attributes:
        sources: where each setting's value came from, by name.
        rank: who this process is.
        devices: the visible devices (UUIDs).
        cpus: CPUs that this node's ranks may use together.
        cache_dir: folder for drawn data, or None where there is none to write.
        listen_fd: rank 0's listening socket from the agent, or None.
        on_end: called with (code, line) when another rank ends for good.
        pulse: takes this rank's signs of life.
        recorder: takes this rank's numbers.
        restarts: why each start before this one ended, where our agent starts the ranks anew.
    """

    config: Config
    sources: Mapping[str, str]
    rank: Rank
    stop: Stop
    devices: tuple[str, ...]
    cpus: int
    cache_dir: Path | None
    listen_fd: int | None
    on_end: Callable[[int, str], None]
    pulse: Pulse
    restarts: tuple[str, ...] = ()
    recorder: Recorder = field(default_factory=Recorder.off)


@dataclass(frozen=True)
class Choice:
    """Hold where and how a rank computes.

    Attributes:
        backend: "nccl", "gloo", or None without a process group.
        strategy: "single", "dp" or "ddp".
        why: the reason for the device, for the log.
    """

    device: torch.device
    backend: str | None
    strategy: str
    why: str


def choose(start: Start) -> Choice:
    """Choose device, backend and strategy.

    Raises:
        SettingError: what was asked for is not to be had here; the line has the build's and the driver's facts.
    """
    config, rank = start.config, start.rank
    strategy = config.strategy
    if strategy == "auto":
        strategy = "ddp" if rank.world_size > 1 else "single"
    if strategy != "ddp" and rank.world_size > 1:
        raise SettingError(
            f"--strategy {strategy} is for one process, but there are {rank.world_size} ranks; use --strategy ddp or --nproc-per-node 1"
        )
    device, why = _device(start)
    if strategy == "dp" and device.type != "cuda":
        raise SettingError(
            f"--strategy dp (nn.DataParallel) copies the model to several GPUs, but {why}; use --strategy ddp"
        )
    if strategy == "dp":
        device = torch.device("cuda", 0)
    backend = _backend(config, device)  # also without a group: what was asked for must be there
    return Choice(device, backend if strategy == "ddp" else None, strategy, why)


def _device(start: Start) -> tuple[torch.device, str]:
    asked, visible = start.config.device, len(start.devices)
    if asked == "cpu":
        return torch.device("cpu"), "--device is cpu"
    if asked == "auto" and not visible:
        return torch.device("cpu"), f"no GPU is visible: {cuda_facts().split(' (')[0]}"
    if not torch.cuda.is_available():
        build = (
            f"torch {torch.__version__} {'for CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}"
        )
        if asked == "auto":
            return torch.device("cpu"), f"{build} cannot use the GPU ({cuda_facts()})"
        raise SettingError(
            f"--device is cuda, but there is no GPU to use: {build}; {cuda_facts()}; use --device cpu or auto"
        )
    index = device_index(start.rank.local_rank, visible)
    return torch.device("cuda", index), f"{visible} GPUs are visible" if visible > 1 else "1 GPU is visible"


def _backend(config: Config, device: torch.device) -> str:
    if config.backend == "nccl" and device.type != "cuda":
        raise SettingError(
            f"--backend nccl needs a GPU, but the device is {device.type} (torch {torch.__version__}; {cuda_facts()}); use --backend gloo or auto"
        )
    if config.backend != "auto":
        return config.backend
    return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def identity(choice: Choice) -> str:
    """Return the device's UUID, to find two ranks on one GPU; "" on a CPU."""
    if choice.device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(choice.device).uuid)


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    names = ("torch", "torchvision", "numpy", "pillow")
    found = {"trainer": __version__, "python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in names}
    cuda = torch.version.cuda
    return found | ({"cuda": cuda} if cuda else {})
