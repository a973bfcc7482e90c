"""The endpoint of a node, asked over HTTP while real ranks train, die and are started anew."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from tests.distributed.conftest import NewJob, rank_pid, wait_until

FIXED = (
    "--log-format", "json", "--log-every", "1", "--workers", "0", "--limit-train", "600", "--limit-test", "100",
    "--global-batch-size", "20", "--nproc-per-node", "2", "--checkpoint-every", "10", "--eval-every", "20",
)  # fmt: skip


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def values(port: int) -> dict[str, float]:
    code, text = ask(port, "/metrics")
    assert code == 200
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def wait_for(port: int, fulfilled: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Ask until the values are so, and return them; an endpoint that is not up yet is asked again."""
    found: dict[str, float] = {}

    def look() -> bool:
        found.clear()
        try:
            found.update(values(port))
        except OSError:
            return False
        return fulfilled(found)

    wait_until(look)
    return found


def test_an_endpoint_tells_of_both_ranks_and_goes_on_counting_when_one_is_killed(
    new_job: NewJob, free_port: int
) -> None:
    process = new_job().start(*FIXED, "--steps", "100000", "--metrics-port", str(free_port))
    before = wait_for(free_port, lambda found: found.get("trainer_checkpoint_last_success_step", 0) >= 20)
    assert (
        before['trainer_phase{phase="train"}']
        + before['trainer_phase{phase="eval"}']
        + before['trainer_phase{phase="checkpoint"}']
        == 1
    )
    assert before["trainer_world_size"] == 2
    assert 0 <= before["trainer_eval_accuracy_ratio"] <= 1
    assert ask(free_port, "/healthz") == (200, "ok\n")
    assert ask(free_port, "/")[0] == 404

    os.kill(rank_pid(process.pid, 1), signal.SIGKILL)
    steps = 'trainer_steps_total{rank="1"}'
    after = wait_for(
        free_port,
        lambda found: found['trainer_restores_total{result="ok"}'] == 1 and found[steps] > before[steps] + 3,
    )
    counters = [name for name in before if re.match(r"\w+(_total|_count|_bucket|_sum)(\{|$)", name)]
    assert len(counters) > 60
    assert [name for name in counters if after[name] < before[name]] == []
    assert after['trainer_restarts_total{reason="oom"}'] == after['trainer_rank_exits_total{reason="oom"}'] == 1
    assert set(after) == set(before)  # no series comes or goes
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_the_numbers_are_those_of_the_receipt(new_job: NewJob, free_port: int) -> None:
    process = new_job().start(
        *FIXED, "--steps", "60", "--metrics-port", str(free_port), "--metrics-linger-seconds", "60"
    )
    found = wait_for(free_port, lambda found: found.get('trainer_phase{phase="succeeded"}') == 1)
    process.send_signal(signal.SIGTERM)  # cuts the lingering short; the run has ended well
    job = new_job()
    ended = job.outcome(process)
    assert ended.code == 0, ended.err
    summary = ended.summary
    assert found["trainer_step"] == found["trainer_target_steps"] == summary["steps"] == 60
    assert sum(found[f'trainer_samples_total{{rank="{rank}"}}'] for rank in (0, 1)) == summary["samples"]
    assert found["trainer_loss"] == pytest.approx(
        summary["final_loss"], abs=0.2
    )  # the mean of the interval, beside its last
    assert found["trainer_eval_loss"] == summary["evaluation"]["loss"]
    assert found["trainer_eval_accuracy_ratio"] == summary["evaluation"]["accuracy"]
    assert found["trainer_checkpoint_last_success_step"] == 60
    states = sum(value for name, value in found.items() if name.startswith("trainer_time_seconds_total"))
    assert states == pytest.approx(summary["seconds"]["total"], abs=30)


def test_measuring_changes_no_bit_of_the_weights(new_job: NewJob, free_port: int) -> None:
    fixed = (*FIXED, "--steps", "30", "--dropout", "0.2")
    seen = new_job("seen").run(*fixed, "--metrics-port", str(free_port))
    unseen = new_job("unseen").run(*fixed, "--metrics-port", "0")
    assert (seen.code, unseen.code) == (0, 0), seen.err + unseen.err
    assert seen.summary["weights_sha256"] == unseen.summary["weights_sha256"]


def test_a_port_that_is_in_use_is_a_warning_and_training_goes_on(new_job: NewJob, free_port: int) -> None:
    with subprocess.Popen(
        ["python3", "-m", "http.server", str(free_port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as other:
        wait_until(lambda: _listens(free_port))
        ended = new_job().run(*FIXED, "--steps", "5", "--metrics-port", str(free_port))
        other.kill()
    assert ended.code == 0
    (line,) = ended.err.splitlines()
    assert f"no metrics: cannot listen on port {free_port}" in line


def _listens(port: int) -> bool:
    try:
        return ask(port, "/")[0] == 200
    except OSError:
        return False
