"""Settings from the environment and from .env files, as texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli.environment import nearest, read_environment, read_file, read_files
from trainer.codes import SettingError


def test_nothing_set_says_nothing() -> None:
    found = read_environment({"PATH": "/bin", "TRAINING_STEPS": "3"})
    assert (found.values, found.dropped, found.warnings) == ({}, [], [])


def test_every_kind_of_value() -> None:
    found = read_environment(
        {
            "TRAINER_STEPS": " 3 ",
            "TRAINER_LR": "1e-3",
            "TRAINER_RUNS_DIR": "/a b",
            "TRAINER_NORM": "group",
            "TRAINER_RUN_NAME": "x",
        }
    )
    assert found.values == {"steps": "3", "lr": "1e-3", "runs_dir": "/a b", "norm": "group", "run_name": "x"}
    assert found.origins["lr"] == "environment variable TRAINER_LR"
    assert not found.warnings


@pytest.mark.parametrize("text", ["1", "TRUE", "Yes", "on"])
def test_booleans_are_brought_to_one_spelling_for_the_parser(text: str) -> None:
    assert read_environment({"TRAINER_COMPILE": text}).values == {"compile": "true"}


@pytest.mark.parametrize("text", ["", "  ", '""', "''"])
def test_empty_is_unset(text: str) -> None:
    found = read_environment({"TRAINER_STEPS": text, "TRAINER_COMPILE": text})
    assert found.values == {}
    assert found.dropped == ["TRAINER_COMPILE", "TRAINER_STEPS"]


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("TRAINER_STEPS", '"3"', "3"),
        ("TRAINER_LR", "'0.1'", "0.1"),
        ("TRAINER_COMPILE", '"yes"', "true"),
        ("TRAINER_RUNS_DIR", '"/a b"', "/a b"),
        ("TRAINER_NORM", "'group'", "group"),
        ("TRAINER_RUN_NAME", "\"'x'\"", "'x'"),  # one pair alone
    ],
)
def test_one_pair_of_outer_quotes_is_removed_with_a_warning(variable: str, text: str, value: str) -> None:
    found = read_environment({variable: text})
    assert list(found.values.values()) == [value]
    assert len(found.warnings) == 1
    assert variable in found.warnings[0]
    assert "quotes" in found.warnings[0]


@pytest.mark.parametrize("text", ["it's", "\"a'", "'", '"'])
def test_quotes_that_are_no_pair_stay(text: str) -> None:
    found = read_environment({"TRAINER_RUN_NAME": text})
    assert found.values == {"run_name": text}
    assert not found.warnings


@pytest.mark.parametrize(
    ("variable", "text"), [("TRAINER_COMPILE", "maybe"), ("TRAINER_STEPS", '"x"'), ("TRAINER_NORM", "none")]
)
def test_wrong_value_names_variable_and_value(variable: str, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_environment({variable: text})
    assert f"environment variable {variable}" in str(caught.value)
    assert repr(text.strip('"')) in str(caught.value)


def test_unknown_variable_is_a_warning_with_the_nearest_name() -> None:
    found = read_environment({"TRAINER_STEP": "3", "TRAINER_ZZZZ": "3"})
    assert found.values == {}
    assert found.warnings == [
        "environment variable TRAINER_STEP is no setting of the trainer (did you mean TRAINER_STEPS?): ignored",
        "environment variable TRAINER_ZZZZ is no setting of the trainer: ignored",
    ]


def test_what_is_passed_over_in_silence() -> None:
    ours = {"TRAINER_TEST_DATA": "/d", "TRAINER_AGENT_PID": "1", "TRAINER_AGENT_JOB": "{}", "TRAINER_STORE_FD": "5"}
    links = {
        "TRAINER_SERVICE_HOST": "10.0.0.1",
        "TRAINER_SERVICE_PORT": "80",
        "TRAINER_SERVICE_PORT_HTTP": "80",
        "TRAINER_METRICS_SERVICE_PORT_METRICS": "80",
        "TRAINER_PORT": "tcp://10.0.0.1:80",
        "TRAINER_PORT_80_TCP": "tcp://10.0.0.1:80",
        "TRAINER_PORT_80_TCP_PROTO": "tcp",
        "TRAINER_PORT_80_TCP_ADDR": "10.0.0.1",
        "TRAINER_METRICS_PORT_8080_TCP_PORT": "8080",
        "TRAINER_WHATEVER": "udp://10.0.0.1:53",
    }
    found = read_environment(ours | links)
    assert (found.values, found.warnings, found.dropped) == ({}, [], [])


def test_service_link_in_the_place_of_a_setting_is_dropped_with_a_warning() -> None:
    """A Service called trainer-master sets TRAINER_MASTER_PORT."""
    found = read_environment({"TRAINER_MASTER_PORT": "tcp://10.0.0.1:80"})
    assert (found.values, found.dropped) == ({}, ["TRAINER_MASTER_PORT"])
    assert "Kubernetes" in found.warnings[0]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("TRAINER_BATCH_SIZE", "_BATCH_SIZE"),
        ("TRAINER_LEARNING", ""),
        ("TRAINER_EPOCH", "TRAINER_EPOCHS"),
        ("TRAINER_steps", ""),
        ("TRAINER_RUNNAME", "TRAINER_RUN_NAME"),
    ],
)
def test_nearest_name(name: str, near: str) -> None:
    assert near in nearest(name)
    assert near or not nearest(name)


def write(folder: Path, content: str | bytes, name: str = "x.env") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_file_with_all_that_a_line_may_hold(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "\ufeff# a comment\r\n\r\nexport TRAINER_STEPS=3  # why\r\n  TRAINER_RUN_NAME = \"a b\" \r\nTRAINER_LR='0.1'\r\n"
        "TRAINER_COMPILE=Yes\nTRAINER_KEEP=\nTRAINER_TEST_DATA=/d\nTRAINER_SEED=1\nTRAINER_SEED=2\nNCCL_DEBUG=INFO\n",
    )
    found = read_file(path)
    assert found.values == {"steps": "3", "run_name": "a b", "lr": "0.1", "compile": "true", "seed": "2"}
    assert found.origins["steps"] == f"{path}, line 3, TRAINER_STEPS"
    assert found.origins["run_name"] == f"{path}, line 4, TRAINER_RUN_NAME"
    assert found.others == {"NCCL_DEBUG": "INFO"}


def test_texts_are_not_expanded(tmp_path: Path) -> None:
    """As docker and Kubernetes do: what stands there is the value."""
    found = read_file(write(tmp_path, "TRAINER_RUN_NAME=${HOME}-$USER\nX=${TRAINER_RUN_NAME}\n"))
    assert found.values == {"run_name": "${HOME}-$USER"}
    assert found.others == {"X": "${TRAINER_RUN_NAME}"}


def test_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "")).values == {}


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ('TRAINER_STEPS=3\n\nFOO="open\nBAR=1\n', 3, "quote"),
        ("TRAINER_STEPS=3\n\n# c\nTRAINER_SEED\n", 4, "TRAINER_SEED=VALUE"),
        ("NCCL_DEBUG\n", 1, "NCCL_DEBUG=VALUE"),
        ("A=1\n=5\n", 2, "KEY=VALUE"),
        ("\n\nTRAINER_STEP=3\n", 3, "did you mean TRAINER_STEPS?"),
        ("A=1\nTRAINER_AGENT_PID=1\n", 2, "TRAINER_AGENT_PID"),
        ("A=1\n\nTRAINER_STEPS=three\n", 3, "'three'"),
        ("A=1\nTRAINER_RUN_NAME=caf\xe9\n".encode("latin-1"), 2, "UTF-8"),
        ("TRAINER_STEPS=3\n".encode("utf-16"), 1, "UTF-8"),
        ("\nTRAINER_STEPS=3\n".encode("utf-16-le"), 2, "UTF-8"),
        (b"A=1\nB=\0\n", 2, "UTF-8"),
    ],
    ids=[
        "open quote", "bare key", "bare foreign key", "no key", "unknown key", "not for files", "wrong value", "latin-1",
        "UTF-16 with mark", "UTF-16 without", "NUL",
    ],
)  # fmt: skip
def test_bad_line_is_one_line_with_file_and_number(content: str | bytes, line: int, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(SettingError) as caught:
        read_file(path)
    assert f"{path}, line {line}" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder_and_loop(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "none", tmp_path, tmp_path / "loop", tmp_path / ("x" * 300)):
        with pytest.raises(SettingError, match=r"^--env-file .* cannot be read: \w"):
            read_file(path)


def test_unreadable_file(tmp_path: Path) -> None:
    """Mode 0 stops no root; reading this file of the kernel's fails for all."""
    with pytest.raises(SettingError, match="cannot be read"):
        read_file(Path("/proc/self/mem"))


def test_later_file_wins_key_by_key(tmp_path: Path) -> None:
    first = write(tmp_path, "TRAINER_STEPS=1\nTRAINER_LR=0.1\nA=1\nB=1\n", "first")
    second = write(tmp_path, "TRAINER_STEPS=2\nA=2\nTRAINER_SEED='\"7\"'\n", "second")
    found = read_files([first, second])
    assert found.values == {"steps": "2", "lr": "0.1", "seed": "7"}
    assert found.others == {"A": "2", "B": "1"}
    assert found.origins["steps"].startswith(str(second))
    assert len(found.warnings) == 1
