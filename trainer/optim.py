"""The optimizer, its learning rate as a function of the step, and its state as named tensors.

No stateful scheduler lives here: the loop asks `lr_at` before every step, so that the step alone decides the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.codes import CheckpointError, SettingError
from trainer.config import Config


def lr_at(step: int, *, steps: int, peak: float, warmup_steps: int, schedule: str) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises in equal parts over the first `warmup_steps` steps, is `peak` at step `warmup_steps`, and then stays
    ("constant") or falls along half a cosine wave that would reach 0 at step `steps` ("cosine", Loshchilov and Hutter,
    2017), so that no step is spent at a rate of 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    assert schedule == "cosine", schedule
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Build the optimizer of `config` over the weights of `model` that are not frozen.

    Norms and biases (1 dimension or less) have no weight decay. Put the model on its device first: on a GPU the
    update is one fused kernel. The learning rate is only a start; `set_lr` sets it before every step.

    Raises:
        SettingError: the model has nothing to train.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not trained:
        raise SettingError(f"--model {config.model!r} has no weights to train: all are frozen; unfreeze some")
    groups = [
        {"params": [weight for weight in trained if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trained if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # None leaves the choice to torch, which on CPUs takes the plain loop.
    fused = True if all(weight.is_cuda for weight in trained) else None
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, fused=fused)
    if config.optimizer == "adam":
        return torch.optim.Adam(groups, lr=config.lr, fused=fused)
    assert config.optimizer == "sgd", config.optimizer
    nesterov = config.momentum > 0
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=fused)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as flat tensors, such as "momentum_buffer/conv.weight" or "step/conv.weight".

    Before the first step there is none. Afterwards a weight that never had a gradient is given zeros, which is the
    state that it would start from. `model` gives the names; it is the model as built, without DDP around it.
    """
    if not optimizer.state:
        return {}
    keys = _keys(optimizer)
    return {
        f"{key}/{name}": _state(optimizer, weight, key) for name, weight in _named(optimizer, model) for key in keys
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` returned; the next step is then the one that the saved run would have made.

    Raises:
        CheckpointError: a tensor is missing, is not of this optimizer and model, or has another shape; names it.
    """
    named = _named(optimizer, model)
    keys = _keys(optimizer) if tensors else ()
    shapes = {f"{key}/{name}": _shape(weight, key) for name, weight in named for key in keys}
    _check_names(shapes, tensors)
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"the checkpoint's optimizer tensor {name!r} has shape {tuple(tensors[name].shape)}, but this model "
                f"needs {tuple(shape)}; resume with the settings that it was saved with"
            )
    state = {
        place: {key: _placed(tensors[f"{key}/{name}"], weight, key) for key in keys}
        for place, (name, weight) in enumerate(named)
        if keys
    }
    # torch's own loader puts "step" where the fused kernels want it.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _check_names(wanted: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    for names, fault in ((missing, "lacks"), (extra, "has, but this optimizer and model do not know,")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"the checkpoint {fault} the optimizer tensor {names[0]!r}{more}; "
                "resume with the --optimizer and --model that it was saved with"
            )


def _keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that this optimizer keeps per weight."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    assert isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)), type(optimizer)
    return ("step", "exp_avg", "exp_avg_sq")


def _named(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the optimizer's weights with their names, in the order in which torch numbers them."""
    names = {weight: name for name, weight in model.named_parameters()}
    return [(names[weight], weight) for group in optimizer.param_groups for weight in group["params"]]


def _shape(weight: Tensor, key: str) -> torch.Size:
    return torch.Size() if key == "step" else weight.shape


def _state(optimizer: torch.optim.Optimizer, weight: nn.Parameter, key: str) -> Tensor:
    value = optimizer.state.get(weight, {}).get(key)
    if value is None:
        return torch.zeros(_shape(weight, key), dtype=torch.float32 if key == "step" else weight.dtype)
    assert isinstance(value, Tensor), key
    return value.detach()


def _placed(value: Tensor, weight: Tensor, key: str) -> Tensor:
    """Copy a saved tensor to where, and into the memory order in which, its weight lies."""
    return value.clone() if key == "step" else torch.empty_like(weight, requires_grad=False).copy_(value)
