"""The choice of device, backend and strategy, on a machine whose GPUs are hidden."""

from __future__ import annotations

import re

import pytest
import torch

from trainer.beat import Allowance, Pulse
from trainer.codes import SettingError
from trainer.config import build
from trainer.launch import Rank
from trainer.stop import Stop
from trainer.train.start import Start, choose, identity, versions


def start(*, world=1, devices=(), **settings):
    rank = Rank(0, world, 0, world, 0, 1)
    return Start(
        config=build(settings), sources={}, rank=rank, stop=Stop(), devices=devices, cpus=2, cache_dir=None,
        listen_fd=None, on_end=lambda code, line: None, pulse=Pulse(Allowance()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world", "settings", "backend", "strategy"),
    [
        (1, {}, None, "single"),
        (2, {}, "gloo", "ddp"),
        (1, {"strategy": "ddp"}, "gloo", "ddp"),
        (2, {"device": "cpu", "backend": "gloo"}, "gloo", "ddp"),
    ],
)
def test_without_a_gpu_the_cpu_is_chosen_and_the_reason_told(world, settings, backend, strategy):
    found = choose(start(world=world, **settings))
    assert (found.device, found.backend, found.strategy) == (torch.device("cpu"), backend, strategy)
    assert re.search("no GPU is visible|--device is cpu", found.why)
    assert identity(found) == ""


@pytest.mark.parametrize(
    ("world", "settings", "line"),
    [
        (1, {"device": "cuda"}, r"--device is cuda, but .*torch \d.*NVIDIA driver.*--device cpu"),
        (2, {"backend": "nccl"}, r"--backend nccl needs a GPU, but the device is cpu \(torch \d.*--backend gloo"),
        (1, {"strategy": "dp"}, r"--strategy dp \(nn\.DataParallel\) .*no GPU is visible.*--strategy ddp"),
        (2, {"strategy": "single"}, r"--strategy single is for one process, but there are 2 ranks"),
    ],
)
def test_a11_what_cannot_be_had_is_refused_with_the_facts(world, settings, line):
    with pytest.raises(SettingError, match=line):
        choose(start(world=world, **settings))


def test_a_visible_gpu_that_torch_cannot_use_is_told_and_the_cpu_taken():
    assert not torch.cuda.is_available()
    found = choose(start(devices=("GPU-1",)))
    assert found.device.type == "cpu"
    assert "cannot use the GPU" in found.why


def test_versions_name_what_a_result_depends_on():
    assert {"torch", "torchvision", "numpy", "pillow"} <= versions().keys()
