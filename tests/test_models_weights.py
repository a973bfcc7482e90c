"""First weights from files and by name, fitted to the model; what is frozen."""

from __future__ import annotations

import socket
import threading
import urllib.request
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer import models
from trainer.codes import CheckpointError, DataError, SettingError
from trainer.config import Config
from trainer.models import weights

SHAPE = (3, 32, 32)


def build(name: str = "cnn", *, classes: int = 10, seed: int = 0, **settings: str) -> nn.Module:
    return models.build_model(Config(model=name, seed=seed, **settings), classes=classes, shape=SHAPE)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("form", ["safetensors", "plain", "nested", "lightning", "old"])
def test_foreign_files_load_under_plain_names(prefix: str, form: str, tmp_path: Path) -> None:
    other = build(seed=1).state_dict()
    named = {prefix + name: value.contiguous() for name, value in other.items()}
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pth")
    if form == "safetensors":
        safetensors.torch.save_file(named, path)
    elif form == "plain":
        torch.save(named, path)
    elif form == "old":
        torch.save(named, path, _use_new_zipfile_serialization=False)
    else:
        rest = {"epoch": 3, "optimizer": {"state": {}}}
        torch.save({"model" if form == "nested" else "state_dict": named, **rest}, path)
    model = build()
    assert models.fit_weights(model, models.read_file(path), classes=10) == []
    assert same(model.state_dict(), other)
    assert not any(name.startswith(("module", "_orig_mod")) for name in model.state_dict())


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("code of the file was run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is cut, or not a file of torch.save"),
        (b"<html>not found</html>", "is cut, or not a file of torch.save"),
        ("half", "is cut, or not a file of torch.save"),
        (Harmful(), "is cut, or not a file of torch.save"),
        ([1, 2], "holds no state dict but list"),
        ({"epoch": 1, "best": 2.0}, "holds no state dict but dict; its items are epoch, best"),
        ({}, "holds no state dict but dict"),
    ],
    ids=["empty", "page", "half", "code", "list", "numbers", "nothing"],
)
def test_file_that_holds_no_weights_is_one_line(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "half":
        torch.save(build().state_dict(), path)
        path.write_bytes(path.read_bytes()[:20_000])
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"^--weights: {path} {message}") as caught:
        models.read_file(path)
    assert "\n" not in str(caught.value)
    assert "was run" not in capsys.readouterr().out


def test_cut_safetensors_and_missing_file_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(9)})[:-4])
    with pytest.raises(CheckpointError, match="is cut, or not a safetensors file"):
        models.read_file(path)
    with pytest.raises(CheckpointError, match="cannot be read .*No such file"):
        models.read_file(tmp_path / "gone.pth")


@pytest.mark.parametrize("name", ["cnn", "resnet18", "squeezenet1_0", "mobilenet_v3_small", "vit_b_32"])
def test_head_of_another_size_is_replaced_and_said(name: str) -> None:
    size = (3, 224, 224) if name.startswith("vit") else SHAPE
    model, other = (
        models.build_model(Config(model=name, seed=seed), classes=classes, shape=size)
        for seed, classes in ((0, 5), (1, 7))
    )
    own_head = {key: value.clone() for key, value in model.state_dict().items()}
    head = models.find_head(model, classes=5)
    (line,) = models.fit_weights(model, other.state_dict(), classes=5)
    assert line == f"the head {head} is new, for 5 classes: the file has one for 7 classes"
    for key, value in model.state_dict().items():
        wanted = own_head[key] if key.startswith(f"{head}.") else other.state_dict()[key]
        assert torch.equal(value, wanted), key


def test_head_of_the_same_size_is_taken_and_a_missing_one_is_new() -> None:
    model, other = build(classes=5), build(classes=5, seed=1)
    assert models.fit_weights(model, other.state_dict(), classes=5) == []
    assert torch.equal(model.state_dict()["head.weight"], other.state_dict()["head.weight"])
    headless = {name: value for name, value in other.state_dict().items() if not name.startswith("head.")}
    lines = models.fit_weights(build(classes=5), headless | {"aux.weight": torch.zeros(1)}, classes=5)
    assert lines == [
        "the head head is new, for 5 classes: the file has none",
        "left out of the file, since the model has no such weights: 1 (aux.weight ...)",
    ]


def test_weights_of_another_model_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"there is no 'conv1.weight', \[64, 3, 7, 7\] is needed \(\d+ of \d+"):
        models.fit_weights(build("resnet18"), build().state_dict(), classes=10)
    wider = build().state_dict() | {"features.3.weight": torch.zeros(64, 16, 3, 3)}
    with pytest.raises(
        CheckpointError, match=r"'features.3.weight' is \[64, 16, 3, 3\], \[64, 32, 3, 3\] is needed \(1 of"
    ):
        models.fit_weights(build(), wider, classes=10)


def test_first_convolution_for_gray_takes_the_sum_over_colours() -> None:
    gray = models.build_model(Config(model="resnet18"), classes=10, shape=(1, 32, 32))
    colour = build("resnet18", seed=1)
    assert models.fit_weights(gray, colour.state_dict(), classes=10) == []
    picture = torch.rand(2, 1, 32, 32)
    gray.eval(), colour.eval()
    assert torch.allclose(gray(picture), colour(picture.expand(-1, 3, -1, -1)), atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "resnet18", "squeezenet1_0"])
def test_frozen_backbone_trains_the_head_alone_and_keeps_its_statistics(name: str) -> None:
    model = build(name, classes=5)
    models.freeze_backbone(model, classes=5)
    head = models.find_head(model, classes=5)
    trained = {key for key, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {f"{head}.weight", f"{head}.bias"}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    model(torch.rand(4, *SHAPE)).square().mean().backward()
    optimizer.step()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == trained
    models.check_batchnorm(model, smallest=1, ranks=1, global_batch_size=1, device_batch_size=None)


def test_model_without_a_row_per_class_has_no_head() -> None:
    with pytest.raises(SettingError, match="no last layer with 3 outputs"):
        models.find_head(nn.Sequential(nn.Linear(4, 4)), classes=3)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("IMAGENET1K_V9", "resnet18", "allowed: DEFAULT, IMAGENET1K_V1$"),
        ("ResNet50_Weights.DEFAULT", "resnet18", "no weights of resnet18"),
        ("DEFAULT", "cnn", "--model cnn has no torchvision weights; name a file"),
        ("DEFAULT", "small:build", "--model small:build has no torchvision weights; name a file"),
        ("DEFAULT", "nonsense", "--model nonsense has no torchvision weights"),
    ],
)
def test_unknown_weights_are_a_wrong_setting(name: str, model: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        models.read_torchvision(name, model=model)


@pytest.mark.parametrize(
    "name", ["DEFAULT", "IMAGENET1K_V1", "ResNet18_Weights.IMAGENET1K_V1", "ResNet18_Weights.DEFAULT"]
)
def test_named_weights_come_from_torchs_cache(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = build("resnet18", classes=1000, seed=1).state_dict()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(other, tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    assert same(models.read_torchvision(name, model="resnet18"), other)


def test_server_that_never_answers_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy takes the connection and says nothing."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "FETCH_SECONDS", 0.3)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the proxies of its first use
    with socket.create_server(("127.0.0.1", 0)) as silent:
        proxy = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for variable in ("https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(variable, proxy)
        for variable in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        threads = threading.active_count()
        with pytest.raises(
            DataError, match=r"^--weights DEFAULT: https://.* cannot be fetched into .*timed out"
        ) as caught:
            models.read_torchvision("DEFAULT", model="resnet18")
    assert "\n" not in str(caught.value)
    assert threading.active_count() == threads
    assert socket.getdefaulttimeout() is None
    assert [*tmp_path.rglob("*.p*")] == []


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, dtype=torch.complex128),
    ],
    ids=["sparse", "complex"],
)
def test_tensor_that_is_not_plain_is_named(value: Tensor, tmp_path: Path) -> None:
    torch.save({"odd.weight": value}, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="holds 'odd.weight', which is no plain tensor"):
        models.read_file(tmp_path / "weights.pth")


def test_file_under_another_ending_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(safetensors.torch.save({"a": torch.zeros(9)}))
    with pytest.raises(CheckpointError, match="is cut, or not a file of torch.save"):
        models.read_file(tmp_path / "weights.pth")


def test_weights_of_a_deeper_model_are_refused() -> None:
    deeper = models.build_model(Config(model="resnet34"), classes=10, shape=SHAPE).state_dict()
    with pytest.raises(CheckpointError, match=r"the model has no 'layer1.2.bn1.bias' \(\d+ of \d+ have no place\)"):
        models.fit_weights(build("resnet18"), deeper, classes=10)


def test_whole_model_is_told_to_be_saved_as_a_state_dict(tmp_path: Path) -> None:
    torch.save(build(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"it may hold a whole model: save model.state_dict\(\) instead"):
        models.read_file(tmp_path / "model.pt")
