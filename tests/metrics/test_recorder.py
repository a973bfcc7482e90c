"""What each event changes, who writes what, and that nothing of it ever reaches training."""

from __future__ import annotations

import logging
import math
import resource
import sys
import threading
import time

import pytest

from trainer import codes, log
from trainer.metrics import AgentRecorder, Counting, Recorder, reason_of
from trainer.metrics.files import Files
from trainer.metrics.table import SERIES


class Clock:
    """Say the time that a test has set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def leader_of(folder, clock: Clock) -> Recorder:
    return Recorder(Files(folder, name="rank0"), roles=("rank", "first", "leader"), clock=clock)


def begin(recorder: Recorder, step: int = 0, **more) -> None:
    recorder.begin(step, **({"target_steps": 100, "epochs_per_step": 0.1, "checkpoint_every": 10} | more))


def take_step(recorder: Recorder, step: int, **more) -> None:
    recorder.step(step, **({"samples": 16, "data_wait": 0.0, "compute": 0.0, "comm_wait": 0.0} | more))


def states(values: dict[str, float]) -> dict[str, float]:
    prefix = "trainer_time_seconds_total{state="
    return {name[len(prefix) : -1]: value for name, value in values.items() if name.startswith(prefix) and value}


def report_everything(recorder: Recorder) -> None:
    """Tell every event of a rank once."""
    recorder.phase("init")
    recorder.build(version="1", torch="2.14.1", cuda="", nccl="", python="3.11")
    recorder.run(run="first", model="cnn", dataset="glyphs", strategy="ddp", backend="gloo", precision="fp32")
    recorder.device(device="cpu", uuid="", model="")
    for stage in ("import", "rendezvous", "data", "model"):
        recorder.stage(stage)
    recorder.world(size=2, expected=2, global_batch_size=32)
    recorder.restored(4, saved_at=1e9, rejected=["digest"])
    begin(recorder, 4, clips=True)
    recorder.memory(allocated=1, reserved=2)
    take_step(recorder, 5)
    recorder.interval(loss=1.5, learning_rate=0.1, remaining_seconds=9.0, gradient_norm=2.0, bottleneck="data")
    recorder.evaluated(0.0, loss=1.0, accuracy=0.5, best=0.75)
    recorder.data_errors("decode", count=3)
    recorder.waited_for_save(0.0, snapshot=0.02)
    recorder.saved(5, seconds=0.2, size=1000)
    recorder.not_saved(skipped=True)
    recorder.message("warning")
    recorder.close()


def families(values: dict[str, float]) -> set[str]:
    """Return the names of the catalogue that a scrape has series of."""
    found = {name.partition("{")[0] for name in values}
    return {series.name for series in SERIES if {series.name, f"{series.name}_bucket"} & found}


def test_events_of_rank_0_set_all_series_but_the_agents(folder, scrape):
    report_everything(Recorder.open(folder, rank=0, local_rank=0))
    values = scrape()
    assert families(values) == {series.name for series in SERIES if series.by != ("agent",)}
    expected = {
        "trainer_phase{phase=init}": 1, "trainer_phase{phase=train}": 0,
        "trainer_device_info{device=cpu,model=,rank=0,uuid=}": 1,
        "trainer_world_size": 2, "trainer_expected_world_size": 2, "trainer_global_batch_size": 32,
        "trainer_step": 5, "trainer_target_steps": 100, "trainer_epoch": 0.5, "trainer_progress_ratio": 0.05,
        "trainer_bottleneck{kind=data}": 1, "trainer_bottleneck{kind=compute}": 0,
        "trainer_loss": 1.5, "trainer_learning_rate": 0.1, "trainer_gradient_norm": 2,
        "trainer_estimated_remaining_seconds": 9, "trainer_nonfinite_losses_total": 0,
        "trainer_eval_loss": 1, "trainer_eval_accuracy_ratio": 0.5, "trainer_best_eval_accuracy_ratio": 0.75,
        "trainer_steps_total{rank=0}": 1, "trainer_samples_total{rank=0}": 16,
        "trainer_step_duration_seconds_count": 1,
        "trainer_device_memory_reserved_bytes{rank=0}": 2,
        "trainer_data_errors_total{kind=decode}": 3, "trainer_data_errors_total{kind=missing}": 0,
        "trainer_checkpoint_saves_total{result=ok}": 1, "trainer_checkpoint_saves_total{result=skipped}": 1,
        "trainer_checkpoint_saves_total{result=error}": 0,
        "trainer_checkpoint_duration_seconds_bucket{le=0.01,stage=snapshot}": 0,
        "trainer_checkpoint_duration_seconds_bucket{le=0.05,stage=snapshot}": 1,
        "trainer_checkpoint_duration_seconds_sum{stage=write}": 0.2,
        "trainer_checkpoint_size_bytes": 1000, "trainer_checkpoint_last_success_step": 5,
        "trainer_checkpoint_rejected_total{reason=digest}": 1, "trainer_restores_total{result=ok}": 1,
        "trainer_log_messages_total{level=warning}": 1,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    for moment in ("trainer_last_step_timestamp_seconds{rank=0}", "trainer_checkpoint_last_success_timestamp_seconds"):
        assert values[moment] == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(("local_rank", "of_the_node"), [(0, True), (1, False)])
def test_other_ranks_have_only_what_is_theirs(folder, scrape, local_rank, of_the_node):
    report_everything(Recorder.open(folder, rank=8, local_rank=local_rank))
    wanted = {
        series.name for series in SERIES if "rank" in series.writers or ("first" in series.writers and of_the_node)
    }
    values = scrape()
    assert families(values) == wanted
    assert not [name for name in values if "rank=" in name and "rank=8" not in name]


def test_events_of_the_agent_set_the_agents_series(folder, scrape):
    agent = AgentRecorder.open(folder)
    agent.phase("init")
    agent.restart("oom")
    agent.rank_exit("oom")
    agent.rank_exit("peer")
    agent.hang()
    agent.stop_signal()
    agent.message("info")
    values = scrape()
    assert families(values) == {series.name for series in SERIES if "agent" in series.writers}
    assert [values[f"trainer_rank_exits_total{{reason={name}}}"] for name in ("oom", "peer", "hang")] == [1, 1, 0]
    assert values["trainer_restarts_total{reason=oom}"] == values["trainer_hangs_total"] == 1


def test_phase_is_what_was_told_last_by_whichever_process(folder, scrape):
    agent, rank = AgentRecorder.open(folder), Recorder.open(folder, rank=0, local_rank=0)
    for who, phase in ((agent, "init"), (rank, "train"), (rank, "eval"), (agent, "failed"), (rank, "train")):
        who.phase(phase)
        told = {name: value for name, value in scrape().items() if name.startswith("trainer_phase{")}
        assert [name for name, value in told.items() if value] == [f"trainer_phase{{phase={phase}}}"]
        assert len(told) == 9


def test_series_are_all_there_from_the_first_step_on(folder, scrape):
    recorder = Recorder.open(folder, rank=0, local_rank=0)
    recorder.stage("import")
    recorder.restored(None)
    begin(recorder)
    before = scrape()
    assert math.isnan(before["trainer_loss"])
    assert math.isnan(before["trainer_eval_loss"])
    assert "trainer_gradient_norm" not in before
    take_step(recorder, 1)
    recorder.interval(loss=float("nan"), learning_rate=0.1, remaining_seconds=1.0, bottleneck="compute")
    recorder.evaluated(0.0, loss=1.0, accuracy=0.5, best=0.5)
    recorder.waited_for_save(0.0, snapshot=0.1)
    recorder.saved(1, seconds=0.1, size=1)
    after = scrape()
    assert after.keys() == before.keys()
    assert math.isnan(after["trainer_loss"])
    assert after["trainer_nonfinite_losses_total"] == 1


def test_times_of_a_run_with_a_restart_add_up(folder, scrape):
    clock = Clock(1000.0)
    first = leader_of(folder, clock)
    clock.now = 1004.0
    first.stage("import")
    begin(first)
    for step in (1, 2, 3):
        clock.now += 2.0
        take_step(first, step, data_wait=0.5, compute=1.0)
    assert states(scrape()) == {"startup": 6.0, "productive": 3.0, "data_wait": 1.0}
    clock.now = 1025.0  # and no word of it: the rank is killed
    again = leader_of(folder, clock)
    clock.now = 1026.0
    again.restored(2, saved_at=1.0)
    begin(again, 2)
    for step in (3, 4):
        clock.now += 1.0
        take_step(again, step, data_wait=0.25, compute=0.5)
    clock.now += 3.0
    again.evaluated(2.5, loss=1.0, accuracy=0.5, best=0.5)
    clock.now += 0.5
    again.close()
    values = scrape()
    assert states(values) == {
        "startup": 7.0, "productive": 3.0 + 0.75 + 0.5 + 0.5, "data_wait": 1.25, "down": 15.0, "restore": 1.0, "eval": 2.5,
    }  # fmt: skip
    assert sum(states(values).values()) == clock.now - 1000.0
    assert values["trainer_replayed_steps_total"] == 1
    spent = {
        kind: values[f"trainer_phase_seconds_total{{phase={kind},rank=0}}"] for kind in ("compute", "eval", "other")
    }
    assert spent == {"compute": 4.0, "eval": 2.5, "other": 1.5 + 0.5 + 0.5}
    assert values["trainer_step_duration_seconds_sum"] == 8.0
    assert values["trainer_startup_duration_seconds{stage=first_step}"] == 1.0


def test_interval_between_saves_follows_the_pace(folder, scrape):
    clock = Clock(1000.0)
    recorder = leader_of(folder, clock)
    begin(recorder, checkpoint_every=10)
    clock.now += 6.0
    take_step(recorder, 1)
    take_step(recorder, 2)
    recorder.interval(loss=1.0, learning_rate=0.1, remaining_seconds=1.0)
    assert scrape()["trainer_checkpoint_interval_seconds"] == 30.0


def test_several_threads_lose_no_count(folder, scrape):
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    recorder = Recorder.open(folder, rank=0, local_rank=0)
    work = [threading.Thread(target=lambda: [recorder.message("info") for _ in range(5000)]) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    sys.setswitchinterval(usual)
    assert scrape()["trainer_log_messages_total{level=info}"] == 20_000


def test_lines_of_the_log_are_counted_by_level(folder, scrape, capsys):
    log.setup("text")
    log.LOGGER.addHandler(Counting(Recorder.open(folder, rank=0, local_rank=0)))
    try:
        log.info("one")
        log.warning("two")
        log.error("three")
        log.LOGGER.log(logging.CRITICAL, "four")
    finally:
        log.LOGGER.handlers.clear()
    values = scrape()
    assert [values[f"trainer_log_messages_total{{level={name}}}"] for name in ("info", "warning", "error")] == [1, 1, 2]
    capsys.readouterr()


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.fixture
def caplog(caplog, monkeypatch):
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    return caplog


def test_folder_that_is_gone_is_one_warning(folder, caplog):
    for recorder in (Recorder.open(folder / "gone", rank=0, local_rank=0), AgentRecorder.open(folder / "gone")):
        recorder.phase("train")
        recorder.message("info")
        assert not recorder.is_on
    assert len(warnings_of(caplog)) == 2
    assert "no more metrics from this process: FileNotFoundError" in warnings_of(caplog)[0]


def test_folder_that_goes_while_it_is_written_harms_nobody(folder, scrape, caplog):
    recorder = Recorder.open(folder, rank=0, local_rank=0)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    report_everything(recorder)
    assert families(scrape()) == set()
    assert len(warnings_of(caplog)) <= 1


def test_disk_without_room_is_one_warning(folder, scrape, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        recorder = Recorder.open(folder, rank=0, local_rank=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    report_everything(recorder)
    (line,) = warnings_of(caplog)
    assert "File too large" in line
    assert families(scrape()) == set()


def test_mistake_of_a_caller_switches_off_with_one_warning(folder, caplog):
    recorder = Recorder.open(folder, rank=0, local_rank=0)
    recorder.phase("lunch")  # not one: nothing is 1
    recorder.data_errors("eaten")
    recorder.data_errors("eaten")
    take_step(recorder, 1)
    assert not recorder.is_on
    assert len(warnings_of(caplog)) == 1


def test_recorder_that_is_off_takes_every_event():
    report_everything(Recorder.off())
    AgentRecorder.off().restart("crash")


def test_step_costs_less_than_10_microseconds(folder):
    recorder = Recorder.open(folder, rank=0, local_rank=0)
    begin(recorder)

    def cost() -> float:
        began = time.thread_time()
        for step in range(1000):
            recorder.step(step, samples=32, data_wait=0.0, compute=0.0, comm_wait=0.0)
        return (time.thread_time() - began) / 1000

    assert min(cost() for _ in range(50)) < 10e-6


@pytest.mark.parametrize(
    ("code", "facts", "reason"),
    [
        (codes.OK, {}, None),
        (codes.UNEXPECTED, {}, "crash"),
        (139, {}, "crash"),
        (137, {}, "oom"),
        (137, {"killed": True}, "peer"),
        (137, {"killed": True, "hung": True}, "hang"),
        (codes.PEER_LOST, {}, "peer"),
        (codes.TERMINATED, {}, "stopped"),
        (codes.DIVERGED, {}, "crash"),
    ],
)
def test_reason_of_an_end(code, facts, reason):
    assert reason_of(code, **facts) == reason


def test_whole_catalogue_fits_in_the_files(folder):
    report_everything(Recorder.open(folder, rank=0, local_rank=0))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    used = {path.name: int.from_bytes(path.read_bytes()[:4], "little") for path in folder.iterdir()}
    assert len(sizes) == 3
    assert all(used[name] * 2 < size for name, size in sizes.items())
