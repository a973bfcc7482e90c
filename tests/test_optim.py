"""The learning rate is a pure function of the step, and an optimizer survives a save and a load to the bit."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer.codes import CheckpointError, SettingError
from trainer.config import Config
from trainer.optim import build_optimizer, load_optimizer_tensors, lr_at, optimizer_tensors, set_lr

KINDS = [
    Config(optimizer="sgd", momentum=0.9),
    Config(optimizer="sgd", momentum=0.0),
    Config(optimizer="adamw", lr=0.01),
    Config(optimizer="adam", lr=0.01),
]
GOLDEN_COSINE = [
    0.05,
    0.1,
    0.15000000000000002,
    0.2,
    0.19009688679024192,
    0.16234898018587338,
    0.12225209339563144,
    0.07774790660436857,
    0.037651019814126656,
    0.009903113209758098,
    0.0,
]
IDS = ["sgd", "plain sgd", "adamw", "adam"]


def _model(*, channels_last: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    return model.to(memory_format=torch.channels_last) if channels_last else model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        pictures = torch.randn(4, 3, 8, 8, generator=generator)
        set_lr(optimizer, lr_at(step, steps=10, peak=config.lr, warmup_steps=2, schedule="cosine"))
        nn.functional.cross_entropy(model(pictures), torch.tensor([0, 1, 2, 3])).backward()
        optimizer.step()
        optimizer.zero_grad()


def _through_bytes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.load(safetensors.torch.save(tensors))


def _bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def test_cosine_learning_rate_has_the_stored_values() -> None:
    rates = [lr_at(step, steps=10, peak=0.2, warmup_steps=3, schedule="cosine") for step in range(11)]
    assert rates == GOLDEN_COSINE


def test_constant_learning_rate_has_the_stored_values() -> None:
    rates = [lr_at(step, steps=6, peak=0.4, warmup_steps=3, schedule="constant") for step in range(6)]
    assert rates == [0.1, 0.2, 0.30000000000000004, 0.4, 0.4, 0.4]


def test_learning_rate_without_warmup_starts_at_the_peak() -> None:
    assert lr_at(0, steps=7, peak=0.3, warmup_steps=0, schedule="cosine") == 0.3


def test_learning_rate_never_rises_again_after_the_last_step() -> None:
    assert lr_at(50, steps=7, peak=0.3, warmup_steps=0, schedule="cosine") == 0.0


@pytest.mark.parametrize("warmup_steps", [5, 9])
def test_learning_rate_is_positive_when_all_steps_are_warmup(warmup_steps: int) -> None:
    rates = [lr_at(step, steps=5, peak=1.0, warmup_steps=warmup_steps, schedule="cosine") for step in range(5)]
    assert rates == sorted(rates)
    assert rates[0] > 0


def test_weights_alone_have_decay() -> None:
    optimizer = build_optimizer(_model(), Config(weight_decay=0.125))
    decays = {
        tuple(weight.shape): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]
    }
    assert decays == {(8, 3, 3, 3): 0.125, (5, 288): 0.125, (8,): 0.0, (5,): 0.0}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6


def test_frozen_weights_are_left_out() -> None:
    model = _model()
    model[0].requires_grad_(False)
    shapes = [
        tuple(weight.shape) for group in build_optimizer(model, Config()).param_groups for weight in group["params"]
    ]
    assert (8, 3, 3, 3) not in shapes


def test_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(SettingError, match="no weights to train"):
        build_optimizer(_model().requires_grad_(False), Config())


def test_sgd_is_nesterov_exactly_when_it_has_momentum() -> None:
    assert build_optimizer(_model(), Config(momentum=0.9)).defaults["nesterov"] is True
    assert build_optimizer(_model(), Config(momentum=0.0)).defaults["nesterov"] is False


def test_set_lr_reaches_every_group() -> None:
    optimizer = build_optimizer(_model(), Config())
    set_lr(optimizer, 0.0625)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0625, 0.0625]


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("saved_at", [0, 1, 5])
@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_resumed_run_equals_the_unbroken_one_to_the_bit(config: Config, saved_at: int, channels_last: bool) -> None:
    whole = _model(channels_last=channels_last)
    optimizer = build_optimizer(whole, config)
    _train(whole, optimizer, config, range(10))

    first = _model(channels_last=channels_last)
    before = build_optimizer(first, config)
    _train(first, before, config, range(saved_at))
    saved = _through_bytes(optimizer_tensors(before, first))

    second = _model(channels_last=channels_last)
    second.load_state_dict(first.state_dict())
    after = build_optimizer(second, config)
    load_optimizer_tensors(after, second, tensors=saved)
    _train(second, after, config, range(saved_at, 10))
    assert _bits(second.state_dict()) == _bits(whole.state_dict())
    assert _bits(optimizer_tensors(after, second)) == _bits(optimizer_tensors(optimizer, whole))


@pytest.mark.parametrize("config", KINDS, ids=IDS)
def test_there_is_no_state_before_the_first_step(config: Config) -> None:
    model = _model()
    assert optimizer_tensors(build_optimizer(model, config), model) == {}


def test_state_is_named_by_kind_and_weight() -> None:
    model, config = nn.Linear(3, 2), Config(optimizer="adamw")
    optimizer = build_optimizer(model, config)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "step/weight": (),
        "step/bias": (),
        "exp_avg/weight": (2, 3),
        "exp_avg/bias": (2,),
        "exp_avg_sq/weight": (2, 3),
        "exp_avg_sq/bias": (2,),
    }
    assert tensors["step/weight"].item() == 1


def test_weight_that_never_had_a_gradient_survives_a_round_trip() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = build_optimizer(model, Config(optimizer="adamw"))
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = _through_bytes(optimizer_tensors(optimizer, model))
    load_optimizer_tensors(build_optimizer(model, Config(optimizer="adamw")), model, tensors=saved)
    assert saved["step/unused.weight"].item() == 0


def _saved(config: Config) -> tuple[nn.Module, dict[str, Tensor]]:
    model = _model()
    optimizer = build_optimizer(model, config)
    _train(model, optimizer, config, range(1))
    return model, optimizer_tensors(optimizer, model)


@pytest.mark.parametrize("name", ["exp_avg/0.weight", "step/1.bias", "exp_avg_sq/4.weight"])
def test_missing_tensor_is_named(name: str) -> None:
    model, saved = _saved(Config(optimizer="adamw"))
    del saved[name]
    with pytest.raises(CheckpointError, match=f"lacks the optimizer tensor '{name}'"):
        load_optimizer_tensors(build_optimizer(model, Config(optimizer="adamw")), model, tensors=saved)


def test_extra_tensor_is_named() -> None:
    model, saved = _saved(Config())
    saved["momentum_buffer/9.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"'momentum_buffer/9\.weight'"):
        load_optimizer_tensors(build_optimizer(model, Config()), model, tensors=saved)


def test_tensor_of_another_shape_is_named_with_both_shapes() -> None:
    model, saved = _saved(Config())
    saved["momentum_buffer/4.weight"] = torch.zeros(7, 288)
    with pytest.raises(CheckpointError, match=r"'momentum_buffer/4\.weight' has shape \(7, 288\).*needs \(5, 288\)"):
        load_optimizer_tensors(build_optimizer(model, Config()), model, tensors=saved)


def test_state_of_another_optimizer_is_refused() -> None:
    model, saved = _saved(Config(optimizer="adamw"))
    with pytest.raises(CheckpointError, match="--optimizer"):
        load_optimizer_tensors(build_optimizer(model, Config()), model, tensors=saved)
