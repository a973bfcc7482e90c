"""Score a model on a test set; used by train and eval alike.

Every sample is counted once, whatever the number of ranks: nothing is padded, sums and counts are added up. What a score is
used for, and when, is decided by the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainer.codes import Stopped
from trainer.data import Batch
from trainer.group import Agreement, Group

Prepare = Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Score:
    """Hold the sums of one evaluation.

    Attributes:
        loss: mean cross-entropy over the samples, natural logarithm, without label smoothing.
        accuracy, top5: parts of the samples, 0 to 1; top5 counts the best min(5, classes) answers.
        samples: how many samples were counted.
        skipped: how many could not be read and were left out.
    """

    loss: float
    accuracy: float
    top5: float
    samples: int
    skipped: int = 0


def evaluate(
    model: nn.Module, batches: Iterator[Batch], *, group: Group, prepare: Prepare, stop: Callable[[], int]
) -> Score:
    """Score `model` (unwrapped, the same on every rank) on this rank's `batches` and add up over all ranks.

    Every rank must bring the same number of batches; they may be empty. `prepare` turns a batch into (inputs, labels)
    on the device; `stop` returns the stop signal that this rank received, or 0.

    Raises:
        Stopped: the ranks agreed to stop; nothing is scored.
        DataError: a rank could not read its data; or TrainerError, where its loader process ended.
        PeerLost: a rank did not take part.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        loss, right, right5, samples, skipped = _add_up(model, batches, group=group, prepare=prepare, stop=stop)
    finally:
        # As they were, one by one: a model may train with some of its parts in evaluation mode.
        for module, training in modes.items():
            module.training = training
    if not samples:
        return Score(loss=0.0, accuracy=0.0, top5=0.0, samples=0, skipped=int(skipped))
    means = {"loss": loss / samples, "accuracy": right / samples, "top5": right5 / samples}
    return Score(**means, samples=int(samples), skipped=int(skipped))


def _add_up(
    model: nn.Module, batches: Iterator[Batch], *, group: Group, prepare: Prepare, stop: Callable[[], int]
) -> list[float]:
    sums = torch.zeros(5, dtype=torch.float64, device=group.device)
    agreement, own_error = Agreement(group), None
    fine = torch.tensor(True)
    for number, batch in enumerate(batches, start=1):
        own_error = own_error or batch.error
        agreement.ask(step=number, stop=stop(), finite=fine, failed=batch.code)
        if len(batch.labels):
            sums[:4] += _count(model, *prepare(batch))
        if batch.skipped:
            sums[4] += batch.skipped
        verdict = agreement.previous()
        verdict.raise_if_bad(own_error, rank=group.rank)
        if verdict.stop:
            break
    verdict = agreement.settled()
    verdict.raise_if_bad(own_error, rank=group.rank)
    if verdict.stop:
        raise Stopped(verdict.stop)
    totals: list[float] = group.sum(sums).tolist()
    return totals


@torch.no_grad()
def _count(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(inputs).float()
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = ranked == labels[:, None]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    counts = [loss, hits[:, 0].sum(), hits.sum(), torch.tensor(len(labels), device=loss.device)]
    return torch.stack([count.to(torch.float64) for count in counts])
