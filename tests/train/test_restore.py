"""From a state to a checkpoint and back."""

from __future__ import annotations

import signal
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from trainer import checkpoint, log
from trainer.beat import Allowance, Pulse
from trainer.checkpoint import writer
from trainer.codes import CheckpointError, SettingError
from trainer.config import build
from trainer.data import ArraySource, DataSet
from trainer.evaluate import Score
from trainer.group import alone
from trainer.optim import build_optimizer
from trainer.stop import Stop
from trainer.train.loop import State
from trainer.train.restore import read_packed, restore_state, unpacked
from trainer.train.saving import Saving, tell_outcome

GROUP = alone(torch.device("cpu"))


def save(state, run, *, config):
    told = partial(tell_outcome, pulse=Pulse(Allowance()))
    with checkpoint.Writer(run / "checkpoints", keep=config.keep, told=told) as saver:
        Saving(state, saver, config, make_dataset(), GROUP, Stop())(last=True)


def make_dataset(fingerprint="f"):
    source = ArraySource(np.zeros((2, 1, 2, 2), np.uint8), np.zeros(2, np.int64))
    return DataSet("two", source, source, 3, (1, 2, 2), (0.5,), (0.5,), 0, fingerprint, True)


def make_state(config, *, outputs=3):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, outputs))
    return State(model, model, build_optimizer(model, config))


def saved(tmp_path, **settings):
    config = build({"runs_dir": tmp_path, **settings})
    state = make_state(config)
    state.model(torch.ones(2, 1, 2, 2)).sum().backward()
    state.optimizer.step()
    state.step, state.score, state.scored_at = 7, Score(1.5, 0.25, 0.5, 8), 7
    save(state, tmp_path, config=config)
    return config, state


def test_a_state_comes_back_to_the_bit(tmp_path):
    config, state = saved(tmp_path)
    fresh = make_state(config)
    restore_state(fresh, tmp_path, config=config, dataset=make_dataset(), group=GROUP)
    assert (fresh.step, fresh.score, fresh.scored_at) == (7, state.score, 7)
    for one, other in zip(fresh.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(one, other)
        momentum = [s.optimizer.state[w]["momentum_buffer"] for s, w in ((fresh, one), (state, other))]
        assert torch.equal(*momentum)


def test_without_a_checkpoint_the_state_is_kept(tmp_path):
    config = build({"runs_dir": tmp_path})
    fresh = make_state(config)
    before = [weight.clone() for weight in fresh.model.parameters()]
    restore_state(fresh, tmp_path, config=config, dataset=make_dataset(), group=GROUP)
    assert fresh.step == 0
    assert all(torch.equal(one, other) for one, other in zip(before, fresh.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("settings", "fingerprint", "error", "line"),
    [
        ({"lr": 0.5}, "f", SettingError, r"--lr is 0\.5, but the checkpoint of step 7 was made with 0\.2"),
        ({"seed": 1}, "f", SettingError, r"--seed is 1, but .* made with 0"),
        ({}, "another", SettingError, r"the data of --dataset glyphs are not those"),
    ],
)
def test_another_experiment_or_other_data_is_refused(tmp_path, settings, fingerprint, error, line):
    saved(tmp_path)
    config = build({"runs_dir": tmp_path, **settings})
    with pytest.raises(error, match=line):
        restore_state(make_state(config), tmp_path, config=config, dataset=make_dataset(fingerprint), group=GROUP)


def test_operation_settings_may_differ(tmp_path):
    saved(tmp_path)
    config = build({"runs_dir": tmp_path, "workers": 2, "device_batch_size": 8, "keep": 9})
    fresh = make_state(config)
    restore_state(fresh, tmp_path, config=config, dataset=make_dataset(), group=GROUP)
    assert fresh.step == 7


def test_another_model_is_one_line(tmp_path):
    config, _ = saved(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"the checkpoint of step 7 does not fit the model: .*size mismatch"
    ) as caught:
        restore_state(make_state(config, outputs=5), tmp_path, config=config, dataset=make_dataset(), group=GROUP)
    assert "\n" not in str(caught.value)


def test_resume_takes_a_path_but_the_runs_own_checkpoints_first(tmp_path):
    _, state = saved(tmp_path)
    other = tmp_path / "other"
    config = build({"runs_dir": tmp_path, "resume": str(tmp_path)})
    fresh = make_state(config)
    restore_state(fresh, other, config=config, dataset=make_dataset(), group=GROUP)
    assert fresh.step == 7
    fresh.step = 9
    save(fresh, other, config=config)
    again = make_state(config)
    restore_state(again, other, config=config, dataset=make_dataset(), group=GROUP)
    assert again.step == 9
    assert state.step == 7


@pytest.mark.parametrize("grace", [30.0, 0.5])
def test_a_save_that_may_not_end_within_the_grace_time_is_said_at_once(grace, tmp_path, caplog):
    config, stop = build({"runs_dir": tmp_path, "grace": grace}), Stop()
    with checkpoint.Writer(tmp_path / "checkpoints", keep=3) as writer:
        writer.seconds = 7.0
        saving = Saving(make_state(config), writer, config, make_dataset(), GROUP, stop)
        saving(last=True)
        assert not caplog.messages  # nothing has asked for an end
        saving.state.step, writer.seconds = 1, 7.0
        stop.receive(signal.SIGTERM)
        saving(last=True)
    wanted = ["the last save took 7.0 s, and 0.5 s are left"] if grace == 0.5 else []
    assert [line[: len("the last save took 7.0 s, and 0.5 s are left")] for line in caplog.messages] == wanted


def test_the_packed_bytes_hold_every_part(tmp_path):
    saved(tmp_path)
    loaded = unpacked(read_packed(tmp_path))
    assert (loaded.step, loaded.state["classes"], loaded.state["fingerprint"]) == (7, 3, "f")
    assert isinstance(loaded, checkpoint.Loaded)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(folder, **how):
        raise checkpoint.SaveFailed("cannot remove step-00000001: Read-only file system")

    log.setup("text", rank=0)
    monkeypatch.setattr(writer, "prune", refuse)
    saved(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]
    assert "warning [rank 0] cannot remove step-00000001" in capsys.readouterr().err
