"""Crash points: a process killed at every file effect, and the power gone after every one, with what was not synced lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.simulated import Disk, Effect, Recorded, put
from trainer.checkpoint import Files, Writer, find, parse, prune, read, read_newest, save, sweep
from trainer.codes import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

#: What a checkpoint is told by: its step, and a number in its weights. None: there is no checkpoint.
Told = tuple[int, int] | None


def _contents(step: int, seed: int = 0) -> dict[str, Any]:
    model = {"weight": torch.arange(6.0), "seed": torch.tensor(seed)}
    return {"step": step, "model": model, "optimizer": {"step/weight": torch.tensor(1.0)}, "state": {"best": None}}


class Unsynced(Files):
    """Do not wait for the disk: for what comes before and after the effects that are looked at."""

    def sync(self, path: Path) -> None:
        pass


QUICK = Unsynced()


def _save(run: Path, step: int, seed: int = 0, files: Files = QUICK) -> Path:
    return save(run / "checkpoints", **_contents(step, seed), files=files)


def _write_and_prune(run: Path, files: Files) -> None:
    with Writer(run / "checkpoints", keep=1, files=files) as writer:
        writer.save(**_contents(4) | {"state": {"best": {"step": 2}}})


def _three(run: Path) -> None:
    for step in (1, 2, 3):
        _save(run, step)


def _second_damaged(run: Path) -> None:
    _save(run, 1)
    (_save(run, 2) / "state.json").write_bytes(b"")


def _half_replaced(run: Path, *, arrived: bool) -> None:
    path = _save(run, 2)
    aside = path.rename(run / "aside")
    if arrived:
        _save(run, 2, seed=1)
    aside.rename(f"{path}.old")
    left = path.with_name(".tmp-gone-step-00000001")
    left.mkdir()
    (left / "state.json").write_text("{}")


#: Name -> what was there before, what is done, how many syncs that takes.
CASES: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Files], Any], int]] = {
    "first": (lambda run: None, lambda run, files: _save(run, 1, files=files), 1 + 4 + 2),
    "next": (lambda run: _save(run, 1), lambda run, files: _save(run, 2, files=files), 4 + 2),
    "replaced": (lambda run: _save(run, 1), lambda run, files: _save(run, 1, seed=1, files=files), 4 + 2 + 1),
    "damaged": (_second_damaged, lambda run, files: _save(run, 2, files=files), 4 + 2 + 1),
    "pruned": (_three, lambda run, files: prune(run / "checkpoints", keep=1, best=2, files=files), 1),
    "writer": (_three, _write_and_prune, 4 + 2 + 1),
    "swept": (
        lambda run: _half_replaced(run, arrived=True),
        lambda run, files: sweep(run / "checkpoints", files=files),
        1,
    ),
    "put back": (
        lambda run: _half_replaced(run, arrived=False),
        lambda run, files: sweep(run / "checkpoints", files=files),
        0,
    ),
}
#: What is damaged anyway could go without a sync; the same line of the code is needed in "replaced", "pruned", "writer" and "swept".
NEEDLESS = {("damaged", 5)}

every_case = pytest.mark.parametrize("name", CASES)


def _loaded(run: Path) -> Told:
    path, files, _ = read_newest(run / "checkpoints")
    if path is None:
        return None
    loaded = parse(files)
    return loaded.step, int(loaded.model["seed"])


def _damaged(run: Path) -> set[str]:
    """Return the names of checkpoints that are not whole."""
    damaged = set()
    for path in find(run / "checkpoints"):
        try:
            read(path)
        except CheckpointError:
            damaged.add(path.name)
    return damaged


def _check_found(run: Path, *, allowed: set[Told], damaged: set[str]) -> None:
    """Check that the old or the new checkpoint is loaded, and that no other half one can be seen."""
    told = _loaded(run)
    assert told in allowed, f"{told} was loaded, not one of {allowed}"
    assert _damaged(run) <= damaged


def _check_mended(run: Path) -> None:
    """Check that the next start and its first save leave the checkpoints alone and nothing temporary."""
    told = _loaded(run)
    sweep(run / "checkpoints", files=QUICK)
    assert _loaded(run) == told
    _save(run, 9)
    left = [path.name for path in (run / "checkpoints").iterdir()]
    assert not [name for name in left if name.startswith(".tmp") or name.endswith(".old")]


# A process that ends at an effect.


class Ending(Files):
    """End the process at effect number `at`; a file is half written by then, a folder half removed."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> bool:
        self.left -= 1
        return self.left < 0

    def mkdir(self, path: Path) -> None:
        if self._count():
            os._exit(9)
        super().mkdir(path)

    def write(self, path: Path, data: bytes | memoryview) -> None:
        if self._count():
            super().write(path, data[: len(data) // 2])
            os._exit(9)
        super().write(path, data)

    def sync(self, path: Path) -> None:
        if self._count():
            os._exit(9)
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._count():
            os._exit(9)
        super().rename(source, target)

    def rmtree(self, path: Path) -> None:
        if self._count():
            next(iter(path.iterdir())).unlink()
            os._exit(9)
        super().rmtree(path)


def _in_child(act: Callable[[], Any]) -> int:
    pid = os.fork()
    if not pid:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@every_case
def test_process_killed_at_any_effect_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, name: str) -> None:
    prepare, act, _ = CASES[name]
    run, points, new = tmp_path / "run", 0, _told_after(name, tmp_path / "new")
    while True:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        prepare(run)
        old, damaged = _loaded(run), _damaged(run)
        code = _in_child(lambda at=points: act(run, Ending(at)))
        if code == 0:
            break
        assert code == 9
        _check_found(run, allowed={old, new}, damaged=damaged)
        _check_mended(run)
        points += 1
    print(f"{name}: {points} crash points of a process")  # noqa: T201 - shown by pytest -rP
    assert points >= 2


def _told_after(name: str, run: Path) -> Told:
    prepare, act, _ = CASES[name]
    run.mkdir()
    prepare(run)
    act(run, QUICK)
    return _loaded(run)


# A power failure after an effect.


def _check_power(tmp_path: Path, name: str, *, without: int | None = None) -> int:
    """Check every state that a power failure during a case can leave, and return how many there are.

    `without` is the number of a sync that is left out, as if the code did not have it.
    """
    prepare, act, syncs = CASES[name]
    run, points = tmp_path / "run", 0
    run.mkdir()
    prepare(run)
    old, damaged, disk, recorded = _loaded(run), _damaged(run), Disk(tmp_path), Recorded()
    act(run, recorded)
    new, effects = _loaded(run), recorded.effects
    numbers = [number for number, effect in enumerate(effects) if effect[0] == "sync"]
    assert len(numbers) == syncs
    if without is not None:
        del effects[numbers[without]]
    for place, effect in enumerate([None, *effects]):
        if effect is not None:
            disk.apply(effect)
        allowed = {new} if place == len(effects) else {old, new}
        for tree in disk.left():
            left = tmp_path / f"left-{points}"
            put(tree, left)
            _check_found(left / "run", allowed=allowed, damaged=damaged)
            if without is None:
                _check_mended(left / "run")
            points += 1
    return points


@every_case
def test_power_failure_after_any_effect_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, name: str) -> None:
    points = _check_power(tmp_path, name)
    print(f"{name}: {points} states after a power failure")  # noqa: T201 - as above
    assert points >= 3


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in CASES for number in range(CASES[name][2])])
def test_no_sync_can_be_left_out(tmp_path: Path, name: str, number: int) -> None:
    if (name, number) in NEEDLESS:
        _check_power(tmp_path, name, without=number)
        return
    with pytest.raises((AssertionError, CheckpointError)):
        _check_power(tmp_path, name, without=number)


def test_simulated_disk_loses_what_was_not_synced_and_keeps_what_was(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    disk, a = Disk(tmp_path), tmp_path / "kept" / "a"
    steps: list[tuple[Effect, list[dict[str, bytes]]]] = [
        (("write", a, b"x"), [{}, {"a": b""}]),
        (("sync", a, None), [{}, {"a": b"x"}]),
        (("sync", a.parent, None), [{"a": b"x"}]),
        (("rename", a, a.with_name("b")), [{"a": b"x"}, {"b": b"x"}]),
        (("rmtree", a.with_name("b"), None), [{"a": b"x"}, {"b": b"x"}, {}]),
    ]
    for effect, left in steps:
        disk.apply(effect)
        found = [tree["kept"] for tree in disk.left()]
        assert all(state in found for state in left)
        assert all(state in [*left, {"a": b"x"}] for state in found)
