"""How much of a step a rank waits for its peers, beside what it computes: by DDP's own timers, which change no bit of a step.

DDP takes the times of a backward pass on the device (by CUDA's events there): how long its all-reduces were under way, and how much of
that the rank was still computing. What is left is waiting. In synchronous training the slow rank is the one that waits least.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: How many steps share one measurement; reading it costs about 0.1 ms.
_EVERY = 10
#: DDP's own: it measures each of the first so many passes, then every so many.
_COMM, _OVERLAP = "backward_comm_time", "backward_compute_comm_overlap_time"


class Waiting:
    """Tell which part of its computing a rank waits for its peers; it is measured every ten steps, and else taken to be as it was."""

    def __init__(self, network: nn.Module) -> None:
        self._ddp = network if isinstance(network, DistributedDataParallel) else None
        self._steps, self._measured, self._part = 0, 0.0, 0.0
        if self._ddp is not None:
            self._ddp._set_ddp_runtime_logging_sample_rate(_EVERY)

    def part(self, compute: float) -> float:
        """Return that part, 0 to 1, after a step whose forward and backward passes took `compute` seconds."""
        self._steps += 1
        if self._ddp is None:
            return 0.0
        if self._steps % _EVERY == 1:
            self._measured = compute  # DDP writes down what it has measured when the next step begins
        elif self._steps % _EVERY == 2:
            told = self._ddp._get_ddp_logging_data()
            nanoseconds = int(told.get(_COMM, 0)) - int(told.get(_OVERLAP, 0))
            self._part = min(1.0, max(0.0, nanoseconds / 1e9 / max(self._measured, 1e-9)))
        return self._part
