"""One step, and the loop over the steps: what a reader should see in order, with the collectives visible.

There are no hooks: in data-parallel training the order of the collectives across ranks is the program's correctness.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.codes import DATA, UNEXPECTED, Diverged, SettingError, Stopped, TrainerError
from trainer.config import Config
from trainer.data import Batch
from trainer.evaluate import Prepare, Score
from trainer.group import Agreement, Group
from trainer.optim import lr_at, set_lr
from trainer.stop import Stop
from trainer.train.meter import Meter
from trainer.train.plan import Plan


@dataclass
class State:
    """Hold what a step changes.

    Attributes:
        model: the plain model, which is saved and evaluated.
        network: what a step calls: the model, or a wrapper around it.
        step: optimizer steps done.
        score: the last evaluation, with the step it was made at.
        best: step, accuracy and loss of the best evaluation so far.
        skipped: how many samples could not be read and were replaced, over all ranks.
        checked: whether a step has shown that every weight takes part.
    """

    model: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    score: Score | None = None
    scored_at: int = 0
    best: dict[str, float] | None = None
    skipped: int = 0
    checked: bool = False


@dataclass(frozen=True)
class Update:
    """Do one optimizer step; holds what is the same in all of them."""

    config: Config
    plan: Plan
    group: Group
    prepare: Prepare
    classes: int

    def __call__(self, state: State, batch: Batch) -> torch.Tensor:
        """Take one step on this rank's part of a global batch and return its loss, 0-d, on the device.

        The loss is (sum over the rank's samples) x world / B: DDP's mean over the ranks then is the exact mean over the
        global batch, also where the ranks' parts differ in size. DDP's all-reduce is the collective in here.
        """
        reseed(self.config.seed, rank=self.group.rank, step=state.step)
        set_lr(state.optimizer, self.learning_rate(state.step))
        inputs, labels = self.prepare(batch)
        losses = []
        for part, is_last in _micro_batches(inputs, labels, self.plan.micro_batches):
            with _no_sync(state.network, when=not is_last):
                part_loss = self._loss(state, *part)
                part_loss.backward()
            losses.append(part_loss.detach())
        if not state.checked:
            _check_all_used(state, self.config)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(state.model.parameters(), self.config.clip_norm)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        return torch.stack(losses).sum()

    def _loss(self, state: State, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with autocast(self.config, self.group.device):
            logits = state.network(inputs)
        if not state.checked:
            _check_logits(logits, wanted=(len(labels), self.classes), model=self.config.model)
        smoothing = self.config.label_smoothing
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        return total * (self.group.world / self.plan.global_batch)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        config, plan = self.config, self.plan
        return lr_at(step, steps=plan.steps, peak=config.lr, warmup_steps=plan.warmup_steps, schedule=config.schedule)


class Saves(Protocol):
    """What `fit` asks of whoever saves; it is asked on every rank."""

    def reserve(self) -> None:
        """Get ready to save such a state: the optimizer has done its first step."""

    def __call__(self, *, last: bool) -> None:
        """Save the state; if it is the `last` save, wait for it."""


def fit(
    state: State,
    batches: Iterator[Batch],
    *,
    update: Update,
    stop: Stop,
    meter: Meter,
    evaluate: Callable[[], Score],
    save: Saves,
) -> None:
    """Train from `state.step` to the end of the plan; every rank runs the same steps.

    Raises:
        Stopped: the ranks agreed on a stop signal; the state is saved, but not where a rank's batch did not come.
        Diverged, DataError, TrainerError: on all ranks; nothing of the bad step is saved.
        PeerLost: a rank did not take part.
    """
    plan, group = update.plan, update.group
    agreement, own_error = Agreement(group, counting=update.config.bad_samples == "skip"), None
    skipped_before, own_skipped = state.skipped, 0
    _check_not_stopped(agreement, stop, step=state.step)
    while state.step < plan.steps:
        group.where = f"step {state.step + 1}"
        with meter.time("data"):
            batch = next(batches)
        # With an error the step goes on with empty pictures, so that no peer waits for this rank; all end below.
        own_error = own_error or batch.error
        with meter.time("compute"), group.waiting(), _naming_the_option():
            loss = update(state, batch)
        own_skipped += batch.skipped
        finite = torch.isfinite(loss)
        agreement.ask(step=state.step, stop=stop.signum, finite=finite, failed=batch.code, skipped=own_skipped)
        meter.step(loss, step=state.step, samples=len(batch.labels))
        if meter.steps == 1:
            save.reserve()
        with meter.time("agree"):
            verdict = agreement.previous()
        verdict.raise_if_bad(own_error, rank=group.rank)
        evaluates, saves = plan.evaluates_after(state.step), plan.saves_after(state.step)
        if verdict.stop or evaluates or saves:
            # Waits for this step's flags on all ranks: nothing is scored or saved from a step that is not known to be good.
            verdict = agreement.settled()
            verdict.raise_if_bad(own_error, rank=group.rank)
        state.skipped = skipped_before + verdict.skipped
        plan.check_skipped(state.skipped, step=verdict.step)
        if plan.logs_after(state.step):
            meter.log(step=state.step, learning_rate=update.learning_rate(state.step - 1))
        signum = verdict.stop
        if evaluates and not signum:
            group.where = f"the evaluation after step {state.step}"
            try:
                with meter.time("evaluate"):
                    state.score, state.scored_at = evaluate(), state.step
                saves = _is_best(state) or saves
            except Stopped as stopped:
                signum = stopped.signum
            except TrainerError as error:
                if error.code in (DATA, UNEXPECTED):
                    save(last=True)  # the step is good, whatever the test set is
                raise
        if signum or saves:
            with meter.time("save"):
                # Rank 0 writes; the others go on to the next collective.
                save(last=bool(signum) or state.step == plan.steps)
        if signum:
            raise Stopped(signum)


def _check_not_stopped(agreement: Agreement, stop: Stop, *, step: int) -> None:
    """Raise Stopped on all ranks where one was stopped while it started: nothing was done, and nothing is to be saved."""
    agreement.ask(step=step, stop=stop.signum, finite=torch.tensor(True))
    if signum := agreement.settled().stop:
        raise Stopped(signum)


def _is_best(state: State) -> bool:
    """Tell whether the last evaluation is the best so far, and remember it if it is."""
    score = state.score
    if score is None or not score.samples or (state.best is not None and score.accuracy <= state.best["accuracy"]):
        return False
    state.best = {"step": state.step, "accuracy": score.accuracy, "loss": score.loss}
    return True


@contextlib.contextmanager
def _naming_the_option() -> Iterator[None]:
    """Turn torch's refusal of an operation under --deterministic into a line that names the option."""
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        what = str(error).split(" does not have")[0]
        raise SettingError(
            f"--deterministic: {what} has no deterministic implementation; drop the option", shared=True
        ) from error


def check_finite(score: Score, *, step: int) -> None:
    """Raise Diverged, on all ranks alike, where a score shows that the weights are bad."""
    if not math.isfinite(score.loss):
        raise Diverged(f"the loss on the test set is not finite after step {step}; lower --lr", shared=True)


def _check_logits(logits: object, *, wanted: tuple[int, int], model: str) -> None:
    shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else None
    if shape != wanted:
        found = f"logits of shape {shape}" if shape is not None else f"a {type(logits).__name__}"
        raise SettingError(
            f"--model {model}: forward returned {found}; it must return a tensor of shape (samples, classes) = {wanted}",
            shared=True,
        )


def _check_all_used(state: State, config: Config) -> None:
    """Refuse a model whose forward leaves weights out: DDP would wait for their gradients and fail in the next step."""
    state.checked = True
    unused = [name for name, weight in state.model.named_parameters() if weight.requires_grad and weight.grad is None]
    if unused and isinstance(state.network, DistributedDataParallel) and not config.deterministic:
        names = ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else "")
        raise SettingError(
            f"--model {config.model}: forward does not use {len(unused)} of its weights ({names}), and DDP needs a "
            "gradient for each; remove or freeze them, or add --deterministic, which allows it",
            shared=True,
        )


def reseed(seed: int, *, rank: int, step: int) -> None:
    """Seed the device's generators for one step: dropout is a function of (seed, rank, step), so a resume draws the same."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + rank * 0x8CB92BA72F3D8DD7 + 1) & (2**63 - 1)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which forward runs at the configured precision."""
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


Part = tuple[tuple[torch.Tensor, torch.Tensor], bool]


def _micro_batches(inputs: torch.Tensor, labels: torch.Tensor, count: int) -> Iterator[Part]:
    """Split evenly into at most `count` parts; a rank with fewer samples than parts has fewer, and each one a last."""
    count = min(count, len(labels))
    parts = zip(inputs.tensor_split(count), labels.tensor_split(count), strict=True)
    for number, part in enumerate(parts, start=1):
        yield part, number == count


def _no_sync(network: nn.Module, *, when: bool) -> contextlib.AbstractContextManager[object]:
    if when and isinstance(network, DistributedDataParallel):
        return network.no_sync()
    return contextlib.nullcontext()
