"""The least a DDP script can do: import torch and torchvision, one step on random pictures, print when it ended.

`startup.py` sets ours beside this, under python (one rank) and under torchrun. Nothing of the trainer is used here.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import torchvision  # noqa: F401  what a script of this kind imports
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 256


def cnn() -> nn.Sequential:
    """Build a network of the size of the trainer's default one."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel in ((1, 32, 5), (32, 64, 3), (64, 128, 3)):
        convolution = nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128 * 2 * 2, 10))


def main() -> None:
    """Take one step and let rank 0 print the seconds since 1970 at its end."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    model = DistributedDataParallel(cnn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    count = GLOBAL_BATCH // dist.get_world_size()
    pictures, labels = torch.randn(count, 1, 28, 28), torch.randint(10, (count,))
    loss = nn.functional.cross_entropy(model(pictures), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if dist.get_rank() == 0:
        print(time.time())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
