"""The node's folder: a new one for each launch, none left behind, none of another launch taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainer.metrics import keep_ranks, new_folder, places


def test_folder_is_new_private_and_gone_afterwards(tmp_path):
    with new_folder([tmp_path]) as one, new_folder([tmp_path]) as other:
        assert one != other
        assert one.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_folder_is_in_memory_where_there_is_some():
    with new_folder(places()) as folder:
        assert folder is not None
        assert folder.parent == Path("/dev/shm")


def test_place_that_cannot_be_written_is_passed_over(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with new_folder([blocked, tmp_path / "missing", tmp_path]) as folder:
        assert folder is not None
        assert folder.parent == tmp_path
    with new_folder([blocked]) as folder:
        assert folder is None


def make_old(folder: Path) -> None:
    os.utime(folder, times=(time.time() - 3600,) * 2)


def test_folder_of_a_killed_launch_is_removed_and_that_of_a_living_one_stays(tmp_path):
    code = "import sys, time\nfrom pathlib import Path\nfrom trainer.metrics import new_folder\n"
    code += "with new_folder([Path(sys.argv[1])]) as folder: print(folder, flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as launch:
        assert launch.stdout is not None
        killed = Path(launch.stdout.readline().strip())
        launch.kill()
    with new_folder([tmp_path]) as living:
        (living / "counter_rank0.db").write_text("")
        make_old(living)
        with new_folder([tmp_path]):
            assert killed.exists(), "it may be one that is being made"
        make_old(killed)
        with new_folder([tmp_path]):
            assert not killed.exists()
            assert (living / "counter_rank0.db").exists()


@pytest.mark.parametrize(
    ("ranks", "left"), [([2, 3], ["agent", "rank2", "rank3"]), ([], ["agent"]), ([10], ["agent", "rank10"])]
)
def test_ranks_of_other_nodes_are_dropped(tmp_path, ranks, left):
    names = ["agent", "rank1", "rank2", "rank3", "rank10"]
    for name in names:
        for kind in ("counter", "gauge_mostrecent", "histogram"):
            (tmp_path / f"{kind}_{name}.db").write_text("")
    keep_ranks(tmp_path, ranks)
    assert sorted(path.name for path in tmp_path.glob("gauge_*")) == [f"gauge_mostrecent_{name}.db" for name in left]
    assert len(list(tmp_path.iterdir())) == 3 * len(left)
