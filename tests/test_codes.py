"""The table of exit codes, and the exceptions that carry one."""

from __future__ import annotations

import signal

import pytest

from trainer import codes
from trainer.codes import (
    CheckpointError,
    DataError,
    Diverged,
    NoProgress,
    PeerLost,
    SettingError,
    Stopped,
    TrainerError,
    error_for,
    from_process,
)

#: What manifests and people rely on.
PUBLISHED = {"OK": 0, "UNEXPECTED": 1, "SETTING": 2, "DATA": 3, "DIVERGED": 4, "NO_PROGRESS": 5} | {
    "INTERRUPTED": 130,
    "TERMINATED": 143,
    "PEER_LOST": 170,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_codes_stay(name: str) -> None:
    assert getattr(codes, name) == PUBLISHED[name]
    assert codes.MEANINGS[PUBLISHED[name]]


def test_every_code_of_ours_has_a_meaning_and_a_name() -> None:
    assert codes.MEANINGS.keys() == set(PUBLISHED.values())


def test_what_a_new_start_cannot_mend_is_permanent() -> None:
    assert {2, 3, 4, 5} == codes.PERMANENT


@pytest.mark.parametrize(
    ("kind", "code", "family"),
    [
        (TrainerError, 1, Exception),
        (SettingError, 2, ValueError),
        (DataError, 3, ValueError),
        (CheckpointError, 3, ValueError),
        (Diverged, 4, ArithmeticError),
        (NoProgress, 5, TrainerError),
        (PeerLost, 170, ConnectionError),
    ],
)
def test_exceptions_carry_their_code(kind: type[TrainerError], code: int, family: type[Exception]) -> None:
    error = kind("one line")
    assert (error.code, str(error), error.shared) == (code, "one line", False)
    assert isinstance(error, family)
    assert kind("x", shared=True).shared


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_is_no_error_of_a_person(signum: signal.Signals, code: int) -> None:
    stopped = Stopped(signum)
    assert (stopped.signum, stopped.code) == (signum, code)
    assert not isinstance(stopped, TrainerError)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 170])
def test_error_for_a_code_of_another_rank(code: int) -> None:
    error = error_for(code, "told by rank 1", shared=True)
    assert str(error) == "told by rank 1"
    assert error.shared
    assert error.code == code


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (170, 170), (-9, 137), (-15, 143), (-11, 139)])
def test_code_of_an_ended_process_as_a_shell_tells_it(returncode: int, code: int) -> None:
    assert from_process(returncode) == code
