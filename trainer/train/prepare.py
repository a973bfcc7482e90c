"""From a batch of uint8 pictures to what the model receives, on the device; and the trace of it."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
import torch.nn.functional as F

from trainer.codes import SettingError, TrainerError
from trainer.data import Batch, DataSet


class Prepare:
    """Move a batch to the device and normalise it there: uint8 over the bus is a quarter of the bytes of floats.

    Args:
        trace: gets a line `step,sample,crc32` for each sample as it is passed to forward, or None. Costs a sync per step.
    """

    def __init__(
        self, dataset: DataSet, device: torch.device, *, channels_last: bool, trace: TextIO | None = None
    ) -> None:
        shape = (1, -1, 1, 1)
        self._mean = torch.tensor(dataset.mean, device=device).mul_(255).view(shape)
        self._scale = torch.tensor(dataset.std, device=device).mul_(255).reciprocal_().view(shape)
        self._device, self._resize = device, dataset.resize
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._trace = trace

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs float32 [n, c, h, w], labels int64 [n]) on the device."""
        images = batch.images.to(self._device, non_blocking=True)
        labels = batch.labels.to(self._device, non_blocking=True)
        inputs = images.to(torch.float32, memory_format=self._format).sub_(self._mean).mul_(self._scale)
        if self._resize is not None:
            size = [self._resize, self._resize]
            inputs = F.interpolate(inputs, size, mode="bilinear", antialias=True).contiguous(memory_format=self._format)
        if self._trace is not None:
            _write(self._trace, batch, inputs)
        return inputs, labels


def _write(trace: TextIO, batch: Batch, inputs: torch.Tensor) -> None:
    rows = zip(batch.ids.tolist(), inputs.cpu().contiguous().numpy(), strict=True)
    try:
        trace.writelines(f"{batch.step},{sample},{zlib.crc32(row)}\n" for sample, row in rows)
        trace.flush()
    except OSError as error:
        raise TrainerError(
            f"--trace: {trace.name} cannot be written ({error.strerror}); make room, or drop it"
        ) from error


@contextlib.contextmanager
def open_trace(folder: Path | None, *, rank: int) -> Iterator[TextIO | None]:
    """Open this rank's trace file in `folder` for more lines; None without a folder.

    Raises:
        SettingError: it cannot be written.
    """
    if folder is None:
        yield None
        return
    path = folder / f"rank-{rank}.csv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="ascii")
    except OSError as error:
        raise SettingError(f"--trace: {path} cannot be written ({error.strerror}); choose another folder") from error
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # said when it was written
            file.close()
