"""Command-line options made from the settings: precedence, sources, and values of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Say
from trainer.config import settings

#: One setting of each type, with a value for each source.
FOUR = {
    "steps": ("1", "2", "3"),
    "lr": ("0.1", "0.2", "0.3"),
    "norm": ("group", "batch", "group"),
    "runs_dir": ("cli", "env", "file"),
    "run_name": ("cli", "env", "file"),
}


def flag(name: str) -> str:
    return settings()[name].flag


@pytest.mark.parametrize("name", FOUR)
def test_command_line_before_environment_before_file_before_default(name: str, say: Say, tmp_path: Path) -> None:
    on_command_line, in_environment, in_file = FOUR[name]
    variable = settings()[name].variable
    (tmp_path / ".env").write_text(f"\n{variable}={in_file}\n")
    env = {variable: in_environment}
    assert say("config", flag(name), on_command_line, env=env).row(flag(name)) == (on_command_line, "command line")
    assert say("config", env=env).row(flag(name)) == (in_environment, f"environment variable {variable}")
    assert say("config").row(flag(name)) == (in_file, f".env, line 2, {variable}")
    (tmp_path / ".env").unlink()
    default = settings()[name].default
    assert say("config").row(flag(name)) == ("(unset)" if default is None else str(default), "default")


def test_precedence_of_a_boolean(say: Say, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TRAINER_COMPILE=on\n")
    assert say("config").row("--compile") == ("true", ".env, line 1, TRAINER_COMPILE")
    env = {"TRAINER_COMPILE": "no"}
    assert say("config", env=env).row("--compile") == ("false", "environment variable TRAINER_COMPILE")
    assert say("config", "--compile", env=env).row("--compile") == ("true", "command line")
    env = {"TRAINER_COMPILE": "1"}
    assert say("config", "--no-compile", env=env).row("--compile") == ("false", "command line")


def test_value_equal_to_the_default_still_tells_its_source(say: Say) -> None:
    assert say("config", "--seed", "0").row("--seed") == ("0", "command line")


def test_only_the_working_folders_file_is_read(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("TRAINER_STEPS=5\n")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert say("config", env={"HOME": str(tmp_path)}).row("--steps") == ("(unset)", "default")


def test_named_files_replace_the_working_folders_file(say: Say, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TRAINER_STEPS=5\nTRAINER_KEEP=5\n")
    (tmp_path / "a").write_text("TRAINER_STEPS=6\nTRAINER_SEED=6\n")
    (tmp_path / "b").write_text("TRAINER_STEPS=7\n")
    said = say("config", "--env-file", "a", "--env-file", "b")
    assert said.row("--steps") == ("7", "b, line 1, TRAINER_STEPS")
    assert said.row("--seed") == ("6", "a, line 2, TRAINER_SEED")
    assert said.row("--keep") == ("3", "default")


def test_file_may_come_anywhere_on_the_command_line(say: Say, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("TRAINER_STEPS=6\nTRAINER_SEED=6\n")
    said = say("config", "--seed", "1", "--env-file", "a")
    assert (said.row("--steps")[0], said.row("--seed")[0]) == ("6", "1")


@pytest.mark.parametrize("name", ["none.env", "."])
def test_named_file_that_is_missing_or_unreadable(name: str, say: Say) -> None:
    said = say("config", "--env-file", name)
    assert said.code == 2
    assert f"--env-file {name} cannot be read" in said.err


def test_folder_called_env_is_no_file(say: Say, tmp_path: Path) -> None:
    """A virtual environment may be called .env."""
    (tmp_path / ".env").mkdir()
    assert say("config").code == 0


def test_empty_file_name_is_unset(say: Say, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TRAINER_STEPS=5\n")
    assert say("config", "--env-file", "").row("--steps")[0] == "5"


def test_empty_values_are_unset(say: Say, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TRAINER_STEPS=5\nTRAINER_SEED=\n")
    said = say("config", "--run-name", "", env={"TRAINER_STEPS": "", "TRAINER_COMPILE": '""'})
    assert said.row("--steps") == ("5", ".env, line 1, TRAINER_STEPS")
    assert said.row("--seed") == ("0", "default")
    assert said.row("--run-name")[0] == "(unset)"
    assert said.row("--compile") == ("false", "default")


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
def test_legacy_launchers_argument_is_taken_on_both_sides(where: str, spelling: str, say: Say) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    argument = f"{spelling}=1"
    said = say(*((argument, "launch") if where == "before" else ("launch", argument)), env=env)
    assert said.code == 0, said.err
    assert "rank 1 of 2, local rank 1" in said.out


def test_legacy_launchers_argument_must_be_a_number(say: Say) -> None:
    said = say("--local_rank=x", "launch")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "--local-rank is 'x' (command line); allowed: a whole number >= 0" in said.err


@pytest.mark.parametrize("name", settings())
def test_every_setting_is_an_option_of_the_help(name: str, say: Say) -> None:
    assert f"{flag(name)} " in say("train", "--help").out
