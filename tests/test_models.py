"""Models fit the data that they are built for, are the same on every rank, and refuse what cannot train."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.codes import CheckpointError, SettingError
from trainer.config import Config
from trainer.models import (
    build_model,
    check_batchnorm,
    fit_first_convolution,
    strip_prefixes,
    sync_batchnorm,
)

MNIST = (1, 28, 28)


def _cnn(**settings: Any) -> nn.Module:
    return build_model(Config(**settings), classes=10, shape=MNIST)


class _WeightsOnMeta(TorchFunctionMode):
    """Give the layers' weights a shape but no memory; a default device of "meta" would stop regnet and swin."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", torchvision.models.list_models(module=torchvision.models))
def test_torchvision_model_takes_one_channel_and_seven_classes(name: str) -> None:
    with _WeightsOnMeta():
        model = build_model(Config(model=name), classes=7, shape=MNIST)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    heads = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    assert convolutions[0].in_channels == 1
    assert convolutions[0].weight.shape[:2] == (convolutions[0].out_channels, 1)
    assert heads[-1].weight.shape[0] == 7


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v3_small"])
def test_torchvision_model_trains_on_grey_pictures(name: str) -> None:
    model = build_model(Config(model=name), classes=7, shape=(1, 64, 64))
    logits = model(torch.randn(2, 1, 64, 64))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_googlenet_trains_with_one_output() -> None:
    logits = build_model(Config(model="googlenet"), classes=7, shape=(2, 64, 64))(torch.randn(2, 2, 64, 64))
    assert logits.shape == (2, 7)


def test_three_channels_leave_the_first_convolution_as_it_is() -> None:
    torch.manual_seed(3)
    plain = torchvision.models.resnet18(weights=None, num_classes=7)
    built = build_model(Config(model="resnet18", seed=3), classes=7, shape=(3, 64, 64))
    assert torch.equal(built.conv1.weight, plain.conv1.weight)


@pytest.mark.parametrize("channels", [1, 5])
def test_fitted_convolution_keeps_the_size_of_its_outputs(channels: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 256, 5, stride=2, padding=2, bias=False))
    before = model(torch.randn(8, 3, 32, 32)).std().item()
    fit_first_convolution(model, channels)
    after = model(torch.randn(8, channels, 32, 32)).std().item()
    assert model[0].stride == (2, 2)
    assert after == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (2, 2), (6, 2), (3, 1)])
def test_fitted_convolution_keeps_its_groups_where_they_divide_the_channels(channels: int, groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2))
    fit_first_convolution(model, channels)
    assert model[0].groups == groups
    assert model(torch.randn(1, channels, 5, 5)).shape == (1, 8, 3, 3)


def test_unknown_model_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(SettingError, match=r"--model is 'resnet81'; did you mean .*resnet18"):
        build_model(Config(model="resnet81"), classes=10, shape=MNIST)


def test_torchvision_models_that_do_not_classify_are_unknown() -> None:
    with pytest.raises(SettingError, match="fcos_resnet50_fpn"):
        build_model(Config(model="fcos_resnet50_fpn"), classes=10, shape=MNIST)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_cnn_has_about_100_thousand_weights(norm: str) -> None:
    count = sum(weight.numel() for weight in _cnn(norm=norm).parameters())
    assert 80_000 <= count <= 120_000


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 13), (1, 28, 28), (4, 33, 40), (3, 96, 64)])
def test_cnn_trains_on_any_picture_of_8_pixels_or_more(shape: tuple[int, int, int], norm: str) -> None:
    model = build_model(Config(norm=norm), classes=3, shape=shape)
    logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, 3)
    logits.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.features.parameters())


def test_cnn_learns_eight_pictures_by_heart() -> None:
    model, pictures, labels = _cnn(), torch.randn(8, 1, 28, 28), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_dropout_acts_in_training_alone() -> None:
    model, picture = _cnn(norm="group", dropout=0.5), torch.ones(1, 1, 28, 28)
    assert not torch.equal(model(picture), model(picture))
    model.eval()
    assert torch.equal(model(picture), model(picture))


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().reshape(-1) for weight in model.parameters()])


@pytest.mark.parametrize("name", ["cnn", "squeezenet1_1"])
def test_weights_are_a_function_of_the_seed(name: str) -> None:
    build = lambda seed: _weights(build_model(Config(model=name, seed=seed), classes=10, shape=MNIST))  # noqa: E731
    torch.manual_seed(17)
    first = build(1)
    torch.manual_seed(4)
    assert torch.equal(build(1), first)
    assert not torch.equal(build(2), first)


def test_building_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _cnn()
    assert torch.equal(torch.rand(3), expected)


def test_cnn_does_not_import_torchvision() -> None:
    code = (
        "import sys; from trainer.models import build_model; from trainer.config import Config; "
        "build_model(Config(), classes=10, shape=(1, 28, 28)); print('torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


MINE = """
import torch

def plain(config, *, classes, shape):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1] * shape[2], classes))

def wrapped(config, *, classes, shape):
    return torch.nn.DataParallel(plain(config, classes=classes, shape=shape))

def number(config, *, classes, shape):
    return 7

def broken(config, *, classes, shape):
    raise AttributeError("a fault of the user's")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_models.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_models", None)


@pytest.mark.usefixtures("mine")
def test_users_function_gets_the_classes_the_shape_and_the_seed() -> None:
    build = lambda seed: build_model(Config(model="my_models:plain", seed=seed), classes=4, shape=(2, 3, 5))  # noqa: E731
    assert build(0)(torch.randn(6, 2, 3, 5)).shape == (6, 4)
    assert torch.equal(_weights(build(0)), _weights(build(0)))
    assert not torch.equal(_weights(build(0)), _weights(build(1)))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("my_models:missing", "missing"),
        ("no_such_module:plain", "no_such_module"),
        (":plain", "cannot be imported"),
        ("my_models:", "cannot be imported"),
        ("my_models:number", "returned int; it must return a torch.nn.Module"),
        ("my_models:wrapped", "module.1.weight"),
    ],
)
def test_users_function_that_cannot_be_used_is_refused_by_name(model: str, fault: str) -> None:
    with pytest.raises(SettingError, match=f"--model.*{fault}") as caught:
        build_model(Config(model=model), classes=4, shape=MNIST)
    assert model in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("mine")
def test_fault_inside_the_users_function_is_one_line_with_its_place() -> None:
    with pytest.raises(SettingError, match=r"AttributeError: a fault of the user's.* \(.*my_models\.py, line \d+\)$"):
        build_model(Config(model="my_models:broken"), classes=4, shape=MNIST)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrapped_weights_load_into_the_plain_model(prefix: str) -> None:
    model = _cnn(seed=1)
    foreign = {prefix + name: tensor for name, tensor in _cnn(seed=2).state_dict().items()}
    model.load_state_dict(strip_prefixes(foreign))
    assert torch.equal(_weights(model), _weights(_cnn(seed=2)))


def test_names_that_only_hold_a_prefix_further_in_are_kept() -> None:
    names = ["encoder.module.weight", "modules.weight", "my_orig_mod.weight"]
    assert list(strip_prefixes({name: torch.zeros(1) for name in names})) == names


def test_part_that_was_compiled_on_its_own_is_unwrapped() -> None:
    assert list(strip_prefixes({"layer1._orig_mod.weight": torch.zeros(1)})) == ["layer1.weight"]


def test_two_names_for_one_weight_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'weight' twice, as 'module\.weight'"):
        strip_prefixes({"weight": torch.zeros(1), "module.weight": torch.zeros(1)})


def test_batchnorm_on_single_samples_is_refused_with_the_numbers() -> None:
    with pytest.raises(SettingError, match=r"has 1: --global-batch-size is 7, ranks are 3, .*is 2; .* to 6 or more"):
        check_batchnorm(_cnn(), smallest=1, ranks=3, global_batch_size=7, device_batch_size=2)


def _smallest(ranks: int, batch: int, device: int) -> int:
    parts = [len(range(rank, batch, ranks)) for rank in range(ranks)]
    micro = -(-max(parts) // device)
    return min(part // micro for part in parts)


def test_the_advice_for_batchnorm_always_helps() -> None:
    sizes = [
        (ranks, batch, device) for ranks in range(1, 6) for batch in range(2 * ranks, 70) for device in range(4, 12)
    ]
    assert min(_smallest(*size) for size in sizes) == 2


@pytest.mark.parametrize(("norm", "smallest"), [("group", 1), ("batch", 2)])
def test_what_can_train_is_not_refused(norm: str, smallest: int) -> None:
    check_batchnorm(_cnn(norm=norm), smallest=smallest, ranks=1, global_batch_size=smallest, device_batch_size=None)


def test_synced_batchnorm_counts_the_samples_of_all_ranks() -> None:
    model = sync_batchnorm(_cnn(), device=torch.device("cuda"))
    assert all(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules() if "BatchNorm" in type(layer).__name__)
    check_batchnorm(model, smallest=1, ranks=2, global_batch_size=2, device_batch_size=None)
    with pytest.raises(SettingError, match="--global-batch-size is 1"):
        check_batchnorm(model, smallest=1, ranks=1, global_batch_size=1, device_batch_size=None)


def test_synced_batchnorm_needs_a_gpu() -> None:
    with pytest.raises(SettingError, match="--sync-batchnorm needs GPUs, but the device is cpu"):
        sync_batchnorm(_cnn(), device=torch.device("cpu"))
