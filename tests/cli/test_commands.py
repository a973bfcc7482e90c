"""The commands without training: help, config, launch, and errors of usage as one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Said, Say
from trainer import __version__
from trainer.config import settings

ROOT = Path(__file__).resolve().parent.parent.parent


def assert_one_line(said: Said, *words: str) -> None:
    """Assert exit code 2 and one line on stderr: no box, no traceback."""
    assert (said.code, said.out) == (2, "")
    assert re.fullmatch(r"\d\d:\d\d:\d\d error [^\n]+\n", said.err), said.err
    assert not set("╭│╰") & set(said.err)
    for word in words:
        assert word in said.err


@pytest.mark.parametrize(
    "args", [("--help",), ("-h",), ("train", "--help"), ("eval", "-h"), ("config", "--help"), ("launch", "-h")]
)
def test_help_fits_80_columns(args: tuple[str, ...], say: Say) -> None:
    said = say(*args)
    assert (said.code, said.err) == (0, "")
    assert max(len(line) for line in said.out.splitlines()) <= 80
    assert "Usage: trainer" in said.out
    assert "…" not in said.out, "something is cut off"
    assert "[OPTIONS]" in said.out


def test_help_lists_the_commands_and_says_how_settings_are_given(say: Say) -> None:
    out = " ".join(say("--help").out.split())
    assert all(f"│ {name} " in out for name in ("train", "eval", "config", "launch"))
    assert "--lr is TRAINER_LR" in out
    assert "--local-rank" not in out


def test_help_of_train_shows_defaults_and_choices_by_panel(say: Say) -> None:
    out = say("train", "--help").out
    panels = list(dict.fromkeys(item.panel for item in settings().values()))
    assert [line for line in re.findall(r"╭─ ([\w ]+) ─", out) if line != "Options"] == panels
    assert "fail|skip" in out
    assert "Peak learning rate. (default: 0.2)" in " ".join(out.replace("│", " ").split())


def test_no_arguments_show_the_help_and_are_an_error(say: Say) -> None:
    said = say()
    assert (said.code, said.err) == (2, "")
    assert "Usage: trainer" in said.out


def test_version(say: Say) -> None:
    assert say("--version") == Said(0, f"trainer {__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("confg",), ("confg", "config", "`trainer --help`")),
        (("config", "--stepz", "3"), ("--stepz", "--steps", "`trainer config --help`")),
        (("config", "extra"), ("extra",)),
        (("config", "--steps"), ("--steps",)),
        (("eval",), ("CHECKPOINT_OR_RUN",)),
        (("config", "--compile=yes"), ("--compile",)),
        (("config", "--steps", "x"), ("--steps is 'x' (command line)", "allowed: a whole number >= 1")),
        (("config", "--lr", "-1"), ("--lr is '-1' (command line)", "allowed: a number > 0")),
        (("config", "--device", "cpu", "--backend", "nccl"), ("--backend", "--device")),
        (("launch", "--local-rank", "1"), ("--local-rank is 1",)),
        (("train", "--nnodes", "2"), ("--nnodes",)),
    ],
)
def test_wrong_usage_is_one_line(args: tuple[str, ...], words: tuple[str, ...], say: Say) -> None:
    assert_one_line(say(*args), *words)


def test_launch_error_of_train_comes_before_anything_starts(say: Say) -> None:
    said = say("train", "--strategy", "single", "--nproc-per-node", "2")
    assert said.code == 2
    assert re.fullmatch(r"\S+ error --strategy single [^\n]+ --strategy ddp\n", said.err)


def test_wrong_value_in_the_environment_is_one_line(say: Say) -> None:
    said = say("config", env={"TRAINER_COMPILE": "maybe"})
    assert_one_line(said, "--compile is 'maybe'", "environment variable TRAINER_COMPILE", "true or false")


def test_wrong_value_in_a_file_is_one_line(say: Say, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("\nTRAINER_OPTIMIZER=lion\n")
    assert_one_line(say("config"), "--optimizer is 'lion' (.env, line 2, TRAINER_OPTIMIZER)", "sgd, adamw, adam")


def test_config_shows_every_setting_with_value_and_source(say: Say) -> None:
    said = say("config", "--lr", "0.5", env={"TRAINER_STEPS": "9"})
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()] == [item.flag for item in settings().values()]
    assert said.row("--lr") == ("0.5", "command line")
    assert said.row("--steps") == ("9", "environment variable TRAINER_STEPS")
    assert said.row("--deterministic") == ("false", "default")


def test_config_warns_once_of_what_it_passes_over(say: Say, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TRAINER_SEED='\"7\"'\n")
    said = say("config", env={"TRAINER_STEP": "9", "TRAINER_LR": '"0.5"', "TRAINER_MASTER_PORT": "tcp://10.0.0.1:80"})
    assert said.code == 0
    assert [said.row(flag)[0] for flag in ("--lr", "--seed", "--master-port")] == ["0.5", "7", "(unset)"]
    warnings = said.err.splitlines()
    assert len(warnings) == 4
    for line, word in zip(warnings, ("TRAINER_LR", "TRAINER_MASTER_PORT", "TRAINER_STEP", ".env, line 1"), strict=True):
        assert " warning " in line
        assert word in line


def test_reference_page_has_a_row_for_every_setting(say: Say) -> None:
    page = say("config", "--reference").out
    assert page.startswith("# Settings\n")
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    assert [re.match(r"\| `(\S+)`", row)[1] for row in rows] == [item.flag for item in settings().values()]  # type: ignore[index]
    assert all(re.sub(r"\\\|", "", row).count("|") == 6 for row in rows)


def test_launch_shows_what_is_found_and_starts_nothing(say: Say) -> None:
    env = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "3",
        "PET_MASTER_ADDR": "m",
        "OMP_NUM_THREADS": "3",
    }
    rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in say("launch", env=env).out.splitlines())
    assert rows["nodes"] == "2, this is node 1"
    assert rows["ranks"] == "3 on this node, 6 in all"
    assert rows["threads"].startswith("3 per rank")
    assert rows["address"] == "m, 29500"
    assert rows["read from"] == "PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_NPROC_PER_NODE"


def test_launch_reads_other_keys_of_a_file_too(say: Say, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PET_NNODES=2\nPET_NODE_RANK=1\nPET_MASTER_ADDR=m\nOMP_NUM_THREADS=7\n")
    said = say("launch", env={"OMP_NUM_THREADS": "3"})
    assert "2, this is node 1" in said.out
    assert "3 per rank" in said.out  # the environment wins


def test_half_set_launch_is_one_line_with_the_list(say: Say) -> None:
    said = say("launch", env={"RANK": "1", "MASTER_ADDR": "m"})
    assert_one_line(said, "RANK=1", "MASTER_ADDR=m", "not WORLD_SIZE, LOCAL_RANK")


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_ipv6_address_with_and_without_brackets(address: str, say: Say) -> None:
    said = say("launch", "--nnodes", "2", "--node-rank", "0", "--master-addr", address)
    assert "master [::1]:29500" in said.out


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, text=True, check=False, **({"capture_output": True} | options)
    )  # type: ignore[call-overload]


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["config"], ["launch"]])
def test_no_torch_is_imported_where_nothing_is_trained(args: list[str]) -> None:
    ended = python(f"import sys; from trainer.cli import main; main({args}); print(*sys.modules, file=sys.stderr)")
    assert not {"torch", "numpy", "torchvision", "PIL", "trainer.train"} & set(ended.stderr.split())
    assert "trainer.cli" in ended.stderr.split()


RUN = "import sys; from trainer.cli import main; sys.exit(main({}))"


def test_page_for_a_reader_that_has_gone_ends_in_silence() -> None:
    reader, out = os.pipe()
    os.close(reader)
    ended = python(RUN.format(["config"]), stdout=out, stderr=subprocess.PIPE, capture_output=False)
    os.close(out)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_page_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        ended = python(RUN.format(["config"]), stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert ended.returncode == 1
    assert re.fullmatch(r"\S+ error the output cannot be written: [^\n]+\n", ended.stderr)


def test_closed_streams_are_opened_so_that_no_socket_takes_their_place() -> None:
    code = "import os, sys; os.closerange(0, 2); sys.stdin = sys.stdout = None; from trainer.cli import main\n"
    code += "assert main(['config']) == 0; print('there', file=sys.stderr); print(os.readlink('/proc/self/fd/1'), file=sys.stderr)"
    ended = python(code)
    assert (ended.returncode, ended.stderr) == (0, "there\n/dev/null\n")


def test_names_that_are_no_text_can_be_printed(say: Say) -> None:
    said = say("config", "--data-dir", os.fsdecode(b"caf\xe9"))
    assert said.code == 0
    assert "caf\\udce9" in said.out


@pytest.mark.parametrize("address", ["no-such-host.invalid", "192.0.2.1"])
def test_address_that_is_not_this_hosts_is_told_before_anything_starts(address: str) -> None:
    ended = python(RUN.format(["train", "--master-addr", address]))
    assert ended.returncode == 2
    line = rf"\S+ error rank 0 cannot listen on {address}, any port of this host \(.+\); see --master-addr .+\n"
    assert re.fullmatch(line, ended.stderr)
