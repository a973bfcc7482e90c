"""The count of starts without progress: when it rises, when it begins anew, and when it ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer import log
from trainer.checkpoint import count_start, take_back
from trainer.codes import NO_PROGRESS, NoProgress


def test_start_after_the_most_starts_without_a_new_checkpoint_gives_up(tmp_path: Path) -> None:
    assert [count_start(tmp_path, step=0, most=5) for _ in range(5)] == [1, 2, 3, 4, 5]
    for _ in range(2):
        with pytest.raises(NoProgress, match=r"5 starts of .* have ended at step 0 without a new checkpoint") as caught:
            count_start(tmp_path, step=0, most=5)
        assert caught.value.code == NO_PROGRESS
    assert count_start(tmp_path, step=0, most=6) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["starts.json"]


def test_new_checkpoint_begins_the_count_anew(tmp_path: Path) -> None:
    steps = [0, 0, 10, 10, 10, 11, 500]
    assert [count_start(tmp_path, step=step, most=5) for step in steps] == [1, 2, 1, 2, 3, 1, 1]


def test_falling_back_to_an_older_checkpoint_is_no_progress_but_going_on_from_it_is(tmp_path: Path) -> None:
    assert [count_start(tmp_path, step=step, most=5) for step in (500, 400, 400, 450)] == [1, 2, 3, 1]


def test_stopped_starts_are_taken_off(tmp_path: Path) -> None:
    for _ in range(8):
        assert count_start(tmp_path, step=0, most=1) == 1
        take_back(tmp_path)
    count_start(tmp_path, step=0, most=1)
    with pytest.raises(NoProgress):
        count_start(tmp_path, step=0, most=1)


def test_nothing_is_taken_off_no_start(tmp_path: Path) -> None:
    take_back(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"step": null, "starts": 1}', "\udcff"])
def test_damaged_count_begins_anew_with_a_warning(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("text", rank=0)
    (tmp_path / "starts.json").write_bytes(content.encode(errors="surrogateescape"))
    assert count_start(tmp_path, step=0, most=5) == 1
    assert f"{tmp_path / 'starts.json'} cannot be read" in capsys.readouterr().err
    assert json.loads((tmp_path / "starts.json").read_text()) == {"step": 0, "starts": 1}


def test_count_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("text", rank=0)
    assert count_start(tmp_path / "missing", step=0, most=5) == 1
    assert "starts.json cannot be written (No such file or directory)" in capsys.readouterr().err
