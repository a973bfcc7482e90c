"""The settings table: what each kind of value accepts, and what the error's line says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trainer.codes import SettingError
from trainer.config import Config, build, experiment, parse, settings

WHERE = "environment variable X"


def read(name: str, text: str) -> object:
    return parse(settings()[name], text, origin=WHERE)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "7", 7),
        ("steps", " 7\n", 7),
        ("lr", "1e-3", 0.001),
        ("lr", "3", 3.0),
        ("deterministic", "on", True),
        ("data_dir", "a b/c", Path("a b/c")),
        ("norm", "group", "group"),
        ("resume", "runs/x", "runs/x"),
        ("run_name", "...", "..."),
        ("run_name", "größe 7", "größe 7"),
        ("nproc_per_node", "auto", "auto"),
        ("nproc_per_node", "08", "08"),
        ("random_shape", "1x28x28", "1x28x28"),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("master_port", "65535", 65535),
    ],
)
def test_value_is_read_with_its_type(name: str, text: str, value: object) -> None:
    assert read(name, text) == value
    assert type(read(name, text)) is type(value)


@pytest.mark.parametrize("text", ["1", "true", "T", "Yes", "y", "ON", " true "])
def test_usual_spellings_of_true(text: str) -> None:
    assert read("compile", text) is True


@pytest.mark.parametrize("text", ["0", "false", "F", "No", "n", "OFF", " false "])
def test_usual_spellings_of_false(text: str) -> None:
    assert read("compile", text) is False


@pytest.mark.parametrize("name", settings())
def test_empty_text_is_the_default(name: str) -> None:
    assert read(name, "") == read(name, "  \t") == settings()[name].default


@pytest.mark.parametrize("name", settings())
def test_default_is_allowed_and_has_the_fields_type(name: str) -> None:
    item = settings()[name]
    assert (item.default is None) == item.optional
    if item.default is not None:
        assert isinstance(item.default, item.kind)
        assert read(name, str(item.default)) == item.default
    assert item.help.endswith(".")
    assert item.tag in ("experiment", "operation")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps", "0"),
        ("steps", "-1"),
        ("steps", "3.5"),
        ("steps", "1e3"),
        ("steps", "ten"),
        ("steps", "9" * 400),  # no float can hold it
        ("steps", "9" * 5000),  # more digits than Python reads
        ("seed", str(2**63)),  # equal to the bound once rounded to a float
        ("lr", "0"),
        ("lr", "-1"),
        ("lr", "nan"),
        ("lr", "inf"),
        ("lr", "1e999"),
        ("lr", "0,1"),
        ("weight_decay", "-1e-9"),
        ("warmup", "1.1"),
        ("grace", "1e300"),  # more seconds than a system call takes
        ("master_port", "0"),
        ("master_port", "99999"),
        ("deterministic", "maybe"),
        ("deterministic", "2"),
        ("norm", "Batch"),
        ("launcher", "kubernetes"),
        ("run_name", ".."),
        ("run_name", "."),
        ("run_name", "a/b"),
        ("run_name", "a\nb"),
        ("run_name", "a\0b"),
        ("run_name", "x" * 201),
        ("random_shape", "3x32"),
        ("random_shape", "3x0x32"),
        ("random_shape", "3X32X32"),
        ("nproc_per_node", "0"),
        ("nproc_per_node", "all"),
        ("nproc_per_node", "-2"),
    ],
)
def test_wrong_value_is_one_line_with_flag_value_source_and_what_is_allowed(name: str, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        read(name, text)
    line, item = str(caught.value), settings()[name]
    assert line.startswith(f"{item.flag} is {text!r:.40}"[:40])
    assert f"({WHERE})" in line
    assert line.endswith(f"allowed: {item.allowed}")
    assert "\n" not in line
    assert len(line) < 400


def test_allowed_is_told_in_words() -> None:
    table = {name: item.allowed for name, item in settings().items()}
    assert table["norm"] == "one of batch, group"
    assert table["compile"] == "true or false"
    assert table["keep"] == "a whole number >= 1"
    assert table["lr"] == "a number > 0"
    assert table["dropout"] == "a number >= 0 and <= 0.99"
    assert table["seed"] == "a whole number >= 0 and <= 9223372036854775807"
    assert table["runs_dir"] == "a path"
    assert table["dataset"] == "a text"
    assert table["random_shape"] == "channels x height x width, like 3x32x32"


def test_names_of_one_setting() -> None:
    item = settings()["global_batch_size"]
    assert (item.flag, item.variable) == ("--global-batch-size", "TRAINER_GLOBAL_BATCH_SIZE")


def test_table_follows_the_fields() -> None:
    assert list(settings()) == [item.name for item in dataclasses.fields(Config)]
    assert len({item.help for item in settings().values()}) == len(settings())


def test_panels_are_contiguous() -> None:
    panels = [item.panel for item in settings().values()]
    starts = [panel for number, panel in enumerate(panels) if number == 0 or panels[number - 1] != panel]
    assert len(starts) == len(set(starts))


def test_build_takes_defaults_for_the_rest() -> None:
    config = build({"steps": 3})
    assert config == dataclasses.replace(Config(), steps=3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device": "cpu", "backend": "nccl"}, ("--backend nccl", "--device is cpu")),
        ({"strategy": "dp", "compile": True}, ("--strategy dp", "--compile")),
        ({"strategy": "single", "nnodes": 2}, ("--strategy single", "--nnodes is 2")),
        ({"strategy": "dp", "nnodes": 2}, ("--strategy dp", "--nnodes is 2")),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as caught:
        build(values)
    assert all(word in str(caught.value) for word in words)


def test_experiment_holds_what_resume_must_match() -> None:
    kept = experiment(build({"lr": 0.5, "runs_dir": Path("x")}))
    assert kept["lr"] == 0.5
    assert {"seed", "steps", "global_batch_size", "model", "dataset", "optimizer"} <= kept.keys()
    assert not {"runs_dir", "run_name", "workers", "device", "nproc_per_node", "log_every"} & kept.keys()
