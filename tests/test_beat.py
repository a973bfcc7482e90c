"""Signs of life: what a rank writes its watcher reads, at once and from another process; how long what may take; what is overdue."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer import beat
from trainer.beat import LEAST_SECONDS, Allowance, Phase, Pulse, Records, Sign, Watch

ROOT = Path(__file__).resolve().parent.parent


def allowed(sign: Sign) -> float:
    return round(sign.due - sign.since, 6)


def test_every_phase_has_a_least_time_and_words() -> None:
    assert set(LEAST_SECONDS) == set(Phase)
    assert len({phase.words for phase in Phase}) == len(Phase)


def test_records_are_watched_before_a_rank_gives_its_first_sign() -> None:
    before = time.monotonic()
    records = Records(3, seconds=12.5)
    records.close()
    for sign in records.read():
        assert (sign.step, sign.saved, sign.phase, sign.text) == (-1, -1, Phase.SETUP, "")
        assert before <= sign.since <= time.monotonic()
        assert allowed(sign) == 12.5


def test_what_a_rank_writes_is_in_its_own_record_alone() -> None:
    records = Records(3, seconds=60)
    first, last = (Pulse(Allowance(), fd=os.dup(records.fd), index=index) for index in (0, 2))
    first.step(41)
    last.saved(7)
    last.tell("a-run")
    last.beat(Phase.EVALUATION)
    signs = records.read()
    assert [(sign.step, sign.saved, sign.text) for sign in signs] == [(41, -1, ""), (-1, -1, ""), (-1, 7, "a-run")]
    assert [sign.phase for sign in signs] == [Phase.FIRST_STEPS, Phase.SETUP, Phase.EVALUATION]
    assert last.read() == signs[2]


def test_another_process_writes_to_the_record_that_it_was_handed() -> None:
    records = Records(2, seconds=60)
    code = (
        "import sys\nfrom trainer.beat import *\n"
        "pulse = Pulse(Allowance(), fd=int(sys.argv[1]), index=1)\n"
        "pulse.tell('run-\\udce4'); pulse.saved(2**40); pulse.step(2**40 + 1); pulse.beat(Phase.END)"
    )
    command = [sys.executable, "-c", code, str(records.fd)]
    before = time.monotonic()
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, pass_fds=[records.fd], check=True, timeout=60)
    sign = records.read()[1]
    assert (sign.step, sign.saved, sign.phase, sign.text) == (2**40 + 1, 2**40, Phase.END, "run-\udce4")
    assert before < sign.since < time.monotonic()  # one clock for all processes


def test_the_descriptors_are_closed_and_reading_goes_on() -> None:
    records = Records(1, seconds=60)
    handed = os.dup(records.fd)
    pulse = Pulse(Allowance(), fd=handed, index=0)
    records.close()
    for fd in (handed, records.fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    pulse.step(5)
    assert records.read()[0].step == 5


def test_without_a_name_for_shared_memory_a_nameless_file_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(1, "not in this sandbox", name)

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(beat.tempfile, "tempdir", str(tmp_path))
    records = Records(2, seconds=60)
    Pulse(Allowance(), fd=os.dup(records.fd), index=1).step(3)
    records.close()
    assert [sign.step for sign in records.read()] == [-1, 3]
    assert not list(tmp_path.iterdir())


def test_without_records_a_rank_has_its_own() -> None:
    pulse = Pulse(Allowance(5.0))
    pulse.step(1)
    assert (pulse.read().step, pulse.read().phase) == (1, Phase.FIRST_STEPS)


def test_the_longest_name_of_a_folder_fits() -> None:
    pulse = Pulse(Allowance())
    pulse.tell("ä" * 127)
    assert pulse.read().text == "ä" * 127
    pulse.tell("short")
    assert pulse.read().text == "short"


def test_the_first_steps_have_more_time_than_the_others() -> None:
    pulse = Pulse(Allowance())
    pulse.beat(Phase.FIRST_STEPS)
    times = []
    for step in range(1, 15):
        pulse.step(step)
        times.append(allowed(pulse.read()))
    assert times == [600.0] * 9 + [60.0] * 5


# How long what may take


def test_a_step_may_take_ten_times_the_slowest_of_the_last_50_and_60_seconds_at_least() -> None:
    allowance = Allowance()
    assert allowance.seconds(Phase.STEP) == 60
    allowance.note(Phase.STEP, 5.9)
    assert allowance.seconds(Phase.STEP) == 60
    allowance.note(Phase.STEP, 30.0)
    for _ in range(49):
        allowance.note(Phase.STEP, 0.1)
    assert allowance.seconds(Phase.STEP) == 300
    allowance.note(Phase.STEP, 0.1)
    assert allowance.seconds(Phase.STEP) == 60


def test_each_phase_is_measured_by_its_own_kind() -> None:
    allowance = Allowance()
    allowance.note(Phase.SAVING, 100.0)
    assert allowance.seconds(Phase.SAVING) == 1000
    assert allowance.seconds(Phase.EVALUATION) == 600
    assert allowance.seconds(Phase.STEP) == 60


def test_a_timeout_is_that_of_steps_and_lengthens_the_rest_where_it_is_longer() -> None:
    short, long = Allowance(2.0), Allowance(5000.0)
    short.note(Phase.STEP, 30.0)
    assert [short.seconds(phase) for phase in (Phase.STEP, Phase.FIRST_STEPS, Phase.SAVING)] == [2, 600, 600]
    assert [long.seconds(phase) for phase in (Phase.STEP, Phase.FIRST_STEPS, Phase.PREPARE)] == [5000, 5000, 21600]


def test_compiling_and_the_rendezvous_have_time_of_their_own() -> None:
    allowance = Allowance(compiles=True, rendezvous_seconds=100.0)
    assert allowance.seconds(Phase.FIRST_STEPS) == 3600
    assert allowance.seconds(Phase.SETUP) == 1800 + 200


def test_where_a_rank_waits_for_other_nodes_it_may_come_to_its_own_limit_and_name_them() -> None:
    allowance = Allowance(peer_seconds=900.0)
    assert [allowance.seconds(phase) for phase in (Phase.STEP, Phase.EVALUATION)] == [900, 900]
    assert Allowance(30.0, peer_seconds=900.0).seconds(Phase.STEP) == 30


def measure(monkeypatch: pytest.MonkeyPatch) -> tuple[Pulse, list[float]]:
    """Return a pulse whose clock stands at the last of the numbers, to which a test adds."""
    clock = [1000.0]
    monkeypatch.setattr(beat.time, "monotonic", lambda: clock[-1])
    return Pulse(Allowance()), clock


def test_the_first_step_of_a_start_is_not_taken_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, clock = measure(monkeypatch)
    pulse.beat(Phase.FIRST_STEPS)
    for step, seconds in enumerate([500.0] + [20.0] * 11, start=1):
        clock.append(clock[-1] + seconds)
        pulse.step(step)
    assert pulse.read().phase is Phase.STEP
    assert allowed(pulse.read()) == 200


def test_a_save_is_measured_until_the_sign_after_it_and_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, clock = measure(monkeypatch)
    for step in range(12):
        clock.append(clock[-1] + 1.0)
        pulse.step(step)
    pulse.beat(Phase.SAVING)
    clock.append(clock[-1] + 90.0)
    pulse.step(13)
    assert allowed(pulse.read()) == 60
    pulse.beat(Phase.SAVING)
    assert allowed(pulse.read()) == 900


def test_batches_of_an_evaluation_count_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse, clock = measure(monkeypatch)
    for _ in range(100):
        pulse.beat(Phase.EVALUATION)
        clock.append(clock[-1] + 50.0)
        assert clock[-1] < pulse.read().due
    assert pulse.read().due == clock[-2] + 600


# Overdue


def sign(due: float) -> Sign:
    return Sign(0, -1, Phase.STEP, due - 60, due, "")


def test_a_sign_is_overdue_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat.time, "monotonic", lambda: 100.0)
    watch = Watch()
    assert not watch.is_overdue(sign(102.0), now=101.0)
    assert not watch.is_overdue(sign(102.0), now=102.0)
    assert watch.is_overdue(sign(102.0), now=103.0)
    assert not watch.is_overdue(sign(200.0), now=104.0)


def test_a_watcher_that_was_away_gives_the_rank_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat.time, "monotonic", lambda: 100.0)
    watch = Watch()
    assert not watch.is_overdue(sign(150.0), now=101.0)
    assert not watch.is_overdue(sign(150.0), now=1101.0)  # 1000 s away
    assert not watch.is_overdue(sign(150.0), now=1102.0)
    for now in range(1103, 1151):
        assert not watch.is_overdue(sign(150.0), now=float(now))
    assert watch.is_overdue(sign(150.0), now=1151.0)
    # Only for the sign that was due then.
    assert not watch.is_overdue(sign(1200.0), now=1152.0)
    assert not any(watch.is_overdue(sign(1200.0), now=float(now)) for now in range(1153, 1201))
    assert watch.is_overdue(sign(1200.0), now=1201.0)
