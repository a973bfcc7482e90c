"""One step: gradients, micro-batches, clipping, random numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainer.codes import SettingError
from trainer.config import build
from trainer.data import Batch
from trainer.group import Group, alone
from trainer.optim import build_optimizer
from trainer.train.loop import State, Update, reseed
from trainer.train.plan import make_plan

BATCH = 29


class Identity:
    """Pass float64 pictures on: the arithmetic, not the rounding, is tested."""

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.images.double(), batch.labels


def make_batch(ids: torch.Tensor) -> Batch:
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(0, 256, (BATCH, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (BATCH,), generator=generator)
    return Batch(step=0, ids=ids, images=images[ids], labels=labels[ids])


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def weights_after_a_step(model: nn.Module, ids: torch.Tensor, *, group: Group | None = None, **settings):
    settings = {"steps": 10, "global_batch_size": BATCH, "momentum": 0.0, "weight_decay": 0.0, "lr": 1e-4} | settings
    config = build(settings)
    model = copy.deepcopy(model)
    state = State(model, model, build_optimizer(model, config))
    group = group or alone(torch.device("cpu"))
    update = Update(config, make_plan(config, samples=100, world=group.world), group, Identity(), classes=3)
    loss = update(state, make_batch(ids))
    assert state.step == 1
    return [weight.detach() for weight in model.parameters()], float(loss)


@pytest.mark.parametrize("device_batch_size", [1, 2, 10, 28, 29, 100])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a26_micro_batches_make_the_step_of_one_whole_batch(device_batch_size, clip_norm):
    model, ids = make_model(), torch.arange(BATCH)
    whole, loss = weights_after_a_step(model, ids, clip_norm=clip_norm)
    parts, same = weights_after_a_step(model, ids, clip_norm=clip_norm, device_batch_size=device_batch_size)
    assert same == pytest.approx(loss, rel=1e-6)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_clipping_bounds_the_whole_gradient():
    model, ids = make_model(), torch.arange(BATCH)
    lr = build({"steps": 10, "lr": 1e-4}).lr / 2  # the first of one warm-up step
    parts, _ = weights_after_a_step(model, ids, clip_norm=0.5, device_batch_size=2)
    moved = torch.cat(
        [(new - old).flatten() for new, old in zip(parts, list(model.parameters()), strict=True)]
    ).detach()
    assert float(moved.norm()) == pytest.approx(0.5 * lr, rel=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_over_ranks_is_the_exact_mean_over_the_batch(world):
    model = make_model()
    whole, loss = weights_after_a_step(model, torch.arange(BATCH))
    ranks = [
        weights_after_a_step(
            model, torch.arange(BATCH)[rank::world], group=Group(rank, world, rank, torch.device("cpu"))
        )
        for rank in range(world)
    ]
    assert sum(loss for _, loss in ranks) / world == pytest.approx(loss, rel=1e-12)
    for index, expected in enumerate(whole):
        # With plain SGD the weights move by the gradient, so the mean of the weights shows the mean of the gradients.
        mean = torch.stack([weights[index] for weights, _ in ranks]).mean(dim=0)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-14)


def test_random_numbers_are_a_function_of_seed_rank_and_step():
    def draw(seed, rank, step):
        reseed(seed, rank=rank, step=step)
        return torch.rand(4).tolist()

    assert draw(1, 0, 5) == draw(1, 0, 5)
    different = [draw(1, 0, 5), draw(2, 0, 5), draw(1, 1, 5), draw(1, 0, 6)]
    assert len({tuple(numbers) for numbers in different}) == 4
    assert all(0 <= number < 1 for number in draw(2**63 - 1, 4095, 10**9))


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (nn.Linear(16, 2), r"logits of shape \(29, 2\)"),
        (nn.Linear(16, 4), r"logits of shape \(29, 4\)"),
        (nn.Sequential(nn.Linear(16, 16), nn.Unflatten(1, (4, 4))), r"logits of shape \(29, 4, 4\)"),
        (nn.LSTM(16, 3), "a tuple"),
    ],
)
def test_a_model_whose_output_does_not_fit_the_classes_is_refused_in_the_first_step(head, found):
    model = nn.Sequential(nn.Flatten(), head).double()
    with pytest.raises(SettingError, match=rf"forward returned {found}; .* \(samples, classes\) = \(29, 3\)"):
        weights_after_a_step(model, torch.arange(BATCH))


class Accumulates(nn.Module):
    """Use an operation that torch refuses under deterministic algorithms."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, pictures):
        logits = self.head(pictures.flatten(1))
        return logits + torch.zeros_like(logits).put_(torch.tensor([0]), torch.ones(1, dtype=logits.dtype))


def test_an_operation_without_a_deterministic_kernel_is_named_with_the_option():
    from trainer.train.loop import _naming_the_option

    torch.use_deterministic_algorithms(True)
    try:
        with (
            pytest.raises(SettingError, match=r"^--deterministic: put_ has no deterministic implementation"),
            _naming_the_option(),
        ):
            weights_after_a_step(Accumulates().double(), torch.arange(BATCH))
    finally:
        torch.use_deterministic_algorithms(False)
