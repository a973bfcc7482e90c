"""What BatchNorm asks of a run: more than one sample at a time, and GPUs for statistics over all ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.codes import SettingError


def check_batchnorm(
    model: nn.Module, *, smallest: int, ranks: int, global_batch_size: int, device_batch_size: int | None
) -> None:
    """Refuse to train BatchNorm on single samples.

    `smallest` is the number of samples of the smallest micro-batch of any rank. One sample has no spread where a
    layer's picture is 1 x 1 (torch raises then, in the middle of a run), and hardly a meaningful one elsewhere.
    SyncBatchNorm takes its statistics over all ranks; a frozen layer takes none.

    Raises:
        SettingError: it has one sample; says which settings lead to it.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    synced = all(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    if not layers or smallest * (ranks if synced else 1) > 1:
        return
    device = "unset" if device_batch_size is None else device_batch_size
    raise SettingError(
        f"the model has BatchNorm, which needs 2 samples at a time, but the smallest micro-batch of a rank has "
        f"{smallest}: --global-batch-size is {global_batch_size}, ranks are {ranks}, --device-batch-size is {device}; "
        f"raise --global-batch-size to {2 * ranks} or more and --device-batch-size to 4 or more, or use a model "
        "without BatchNorm (--norm group)"
    )


def sync_batchnorm(model: nn.Module, *, device: torch.device) -> nn.Module:
    """Return `model` with every BatchNorm taking its statistics over all ranks; costs a collective per layer.

    Raises:
        SettingError: the device is no GPU.
    """
    if device.type != "cuda":
        raise SettingError(f"--sync-batchnorm needs GPUs, but the device is {device.type}; drop it or use --norm group")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted
