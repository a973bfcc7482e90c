"""The tables, links and options in the pages are those of the code, and the recipes are good settings."""

from __future__ import annotations

import os
import re

import pytest

from tests.conftest import ROOT, Run
from tests.docs.pages import CHECKPOINTS, COMMANDS, FAKE_NVML, LAUNCHING, PAGES, RUNNING
from trainer import codes
from trainer.config import settings


def test_every_line_of_the_launcher_table_is_one_that_runs():
    text = (ROOT / LAUNCHING).read_text()
    lines = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", text, flags=re.M)
    assert len(lines) == 11
    assert [line for line in lines if line not in COMMANDS] == []


@pytest.mark.parametrize("processes", [2, 4, 5])
def test_ranks_take_the_visible_devices_in_their_order(processes, run_trainer: Run, tmp_path, trainer_env):
    (tmp_path / "pynvml.py").write_text(FAKE_NVML)
    env = {"CUDA_VISIBLE_DEVICES": "1,2,3,4", "PYTHONPATH": f"{tmp_path}{os.pathsep}{trainer_env['PYTHONPATH']}"}
    result = run_trainer("launch", "--nproc-per-node", str(processes), env=env)
    if processes == 5:
        assert (result.returncode, result.stdout) == (codes.SETTING, "")
        (line,) = result.stderr.splitlines()
        assert re.search(r"\b5 processes .*\b4 visible devices \(CUDA_VISIBLE_DEVICES=1,2,3,4\)", line)
        return
    assert result.returncode == 0, result.stderr
    rows = dict(re.split(" {2,}", line, maxsplit=1) for line in result.stdout.splitlines())
    assert rows["devices"] == "GPU-1fa5e, GPU-2fa5e, GPU-3fa5e, GPU-4fa5e"
    assert rows["ranks"] == f"{processes} on this node, {processes} in all"
    for rank in range(processes):
        one = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
        assert f"local rank {rank}, cuda:{rank} (" in run_trainer("launch", env=env | one).stdout


def test_settings_page_is_the_one_that_the_settings_make(run_trainer: Run):
    assert run_trainer("config", "--reference").stdout == (ROOT / "docs/settings.md").read_text(), "run `make docs`"


def test_exit_codes_of_the_page_are_those_of_the_code():
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / RUNNING).read_text(), flags=re.M)
    told = {int(code): meaning for code, meaning in rows}
    assert set(told) == set(codes.MEANINGS)
    assert {code: codes.MEANINGS[code] for code in told if not told[code].startswith(codes.MEANINGS[code])} == {}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_options_in_the_page_exist(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()] == []
    others = {"--env-file", "--help", "--local-rank", "--local_rank", "--use-env", "--standalone"}
    others |= {"--ntasks", "--nodes", "--ntasks-per-node", "--host", "--bind-to", "--mca"}  # of srun and mpirun
    assert set(re.findall(r"--[a-z][a-z0-9_-]+", text)) <= {item.flag for item in settings().values()} | others


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.env")), ids=lambda path: path.name)
def test_recipe_reads_the_same_here_and_in_docker(recipe, run_trainer: Run):
    lines = [line for line in recipe.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"TRAINER_[A-Z_]+=[^\s\"'$#]+", line)] == []
    result = run_trainer("config", "--env-file", recipe)
    assert (result.returncode, result.stderr) == (0, "")
    read = [line for line in result.stdout.splitlines() if str(recipe) in line]
    assert len(read) == len(lines) == len({line.partition("=")[0] for line in lines})


def test_glyphs_recipe_spells_out_the_defaults(run_trainer: Run):
    rows = run_trainer("config", "--env-file", ROOT / "recipes/glyphs.env").stdout.splitlines()
    values = {line.split()[0]: line.split()[1] for line in rows if "glyphs.env" in line}
    wanted = {item.flag: str(item.default) for item in settings().values() if item.flag in values}
    assert values == wanted
    experiment = {item.flag for item in settings().values() if item.tag == "experiment" and item.default is not None}
    for_others = {"--random-shape", "--random-classes", "--sync-batchnorm", "--freeze-backbone", "--min-crop"}
    assert set(values) == experiment - for_others


def test_every_promise_names_a_test_that_is_there():
    text = (ROOT / CHECKPOINTS).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| promise"))]
    assert [row for row in rows if "::test_" not in row] == []
    assert [name for path, name in named if f"\ndef {name}(" not in (ROOT / path).read_text()] == []
    assert len(named) > len(rows) > 20
