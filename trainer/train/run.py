"""Assemble a training run: the one place that knows every part."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer import checkpoint, log, optim
from trainer.beat import Phase
from trainer.codes import DataError, SettingError
from trainer.config import Config
from trainer.data import DataSet, auto_workers, load, prepare, test_batches, train_batches
from trainer.evaluate import Score, evaluate
from trainer.group import Group, Meeting, alone, connect
from trainer.models import build_model, check_batchnorm, freeze_backbone, sync_batchnorm
from trainer.progress import Live
from trainer.train import folder as folders
from trainer.train.first import load_first_weights
from trainer.train.loop import State, Update, autocast, check_finite, fit
from trainer.train.meter import Meter
from trainer.train.plan import Plan, check_skipped, make_plan
from trainer.train.prepare import Prepare, open_trace
from trainer.train.report import Facts, build_facts, describe, finish, tell_facts
from trainer.train.restore import restore_state
from trainer.train.saving import Saving, tell_outcome
from trainer.train.split import Waiting
from trainer.train.start import Choice, Start, choose, identity


@contextlib.contextmanager
def joined(start: Start) -> Iterator[tuple[Choice, Group]]:
    """Choose the device, meet the other ranks, and take care of stop signals from then on."""
    choice, rank, config = choose(start), start.rank, start.config
    if choice.device.type == "cuda":
        torch.cuda.set_device(choice.device)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    # Before this, a signal simply ends the process: there is nothing to save, and a wait in native code hears no handler.
    if choice.backend is None:
        start.stop.install()
        yield choice, alone(choice.device)
        return
    meeting = Meeting(
        host=rank.master_addr,
        port=rank.master_port or 0,
        rendezvous_seconds=config.rendezvous_seconds,
        collective_seconds=config.collective_seconds,
        listen_fd=start.listen_fd,
        store_attempt=rank.store_attempt,
        stop=start.stop,
        on_end=start.on_end,
    )
    with connect(
        meeting,
        rank=rank.rank,
        world=rank.world_size,
        local_rank=rank.local_rank,
        device=choice.device,
        backend=choice.backend,
        identity=identity(choice),
    ) as group:
        start.stop.install()
        yield choice, group


def run(start: Start) -> None:
    """Train one run to its end.

    Raises:
        Stopped: a stop signal was obeyed; the state is saved.
        TrainerError: with the exit code that goes with it.
    """
    config, recorder = start.config, start.recorder
    recorder.stage("import")
    recorder.build(**build_facts())
    start.pulse.beat(Phase.PREPARE)
    prepare(config)
    recorder.stage("data")
    start.pulse.beat(Phase.SETUP)
    recorder.phase("rendezvous")
    with (
        joined(start) as (choice, group),
        folders.opened(config, sources=start.sources, group=group, stop=lambda: start.stop.signum) as folder,
    ):
        recorder.stage("rendezvous")
        start.pulse.tell(folder.name)
        if group.from_rank_0(lambda: b"yes" if folders.is_finished(folder) else b""):
            log.info(f"{folder} is finished: nothing to do")
            return
        dataset, plan, state = group.together(lambda: build(start, group))
        check_same_data(dataset, group)
        facts = Facts(start, choice, group, dataset, plan)
        describe(facts, state)
        tell_facts(facts, folder)
        recorder.stage("model")
        recorder.phase("restore")
        restore_state(state, folder, config=config, dataset=dataset, group=group, recorder=recorder)
        load_first_weights(state, config=config, dataset=dataset, group=group)
        state.network = wrap(state.model, config=config, choice=choice)
        meter = _train(start, state, folder=folder, dataset=dataset, plan=plan, group=group)
        start.pulse.beat(Phase.END)
        finish(facts, state, meter=meter, folder=folder)
        recorder.close()


def build(start: Start, group: Group) -> tuple[DataSet, Plan, State]:
    """Load the data, make the plan, build the model; no collectives in here. Raises SettingError, DataError."""
    config = start.config
    _check_compiler(config)
    dataset = load(config, cache_dir=start.cache_dir)
    plan = make_plan(config, samples=len(dataset.train), world=group.world)
    state = build_state(config, dataset=dataset, group=group)
    check_batchnorm(
        state.model,
        smallest=plan.smallest,
        ranks=group.world,
        global_batch_size=config.global_batch_size,
        device_batch_size=config.device_batch_size,
    )
    return dataset, plan, state


def check_same_data(dataset: DataSet, group: Group) -> None:
    """Check that every rank has rank 0's data. Raises DataError on all ranks, naming the first that has not."""
    sizes = f"{len(dataset.train)} training and {len(dataset.test)} test samples of shape {dataset.shape}"
    own = f"{sizes}, {dataset.classes} classes, fingerprint {dataset.fingerprint[:16]}"
    first = group.from_rank_0(own.encode).decode()

    def compare() -> None:
        if own != first:
            raise DataError(f"the data differ between ranks: here {own}; on rank 0 {first}")

    group.together(compare)


def build_state(config: Config, *, dataset: DataSet, group: Group) -> State:
    """Build model and optimizer on the device, the same on every rank. Raises SettingError."""
    model = build_model(config, classes=dataset.classes, shape=dataset.input_shape)
    if config.freeze_backbone:
        freeze_backbone(model, classes=dataset.classes)
    if config.sync_batchnorm:
        model = sync_batchnorm(model, device=group.device)
    model = model.to(group.device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return State(model=model, network=model, optimizer=optim.build_optimizer(model, config))


def wrap(model: nn.Module, *, config: Config, choice: Choice) -> nn.Module:
    """Wrap the model for training: compiled, then DataParallel or DDP; the wrapped and the plain one share weights.

    DDP broadcasts no buffers: rank 0's BatchNorm statistics are the model's, and a broadcast per step would cost a wait.
    """
    network: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
    if choice.strategy == "dp":
        return nn.DataParallel(network)
    if choice.strategy == "ddp":
        devices = [choice.device.index] if choice.device.type == "cuda" else None
        # DDP regroups its buckets after the first backward, and a resumed run would sum in another order than the
        # unbroken one; with find_unused_parameters it does not. From 3 ranks on that is what bit-exact takes.
        return DistributedDataParallel(
            network,
            device_ids=devices,
            **_without_buffer_sync(),
            gradient_as_bucket_view=True,
            find_unused_parameters=config.deterministic,
        )
    return network


def _without_buffer_sync() -> dict[str, Any]:
    # torch 2.14 renamed it, and warns about the old name.
    names = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _check_compiler(config: Config) -> None:
    if config.compile and not shutil.which("g++"):
        raise SettingError("--compile needs a C++ compiler, but g++ is not on PATH; install it, or drop --compile")


def _train(start: Start, state: State, *, folder: Path, dataset: DataSet, plan: Plan, group: Group) -> Meter:
    config = start.config
    loading = loader_options(start, dataset=dataset, group=group)
    score_now = _scorer(start, state, dataset=dataset, group=group)
    told = partial(tell_outcome, pulse=start.pulse, recorder=start.recorder)
    writer = checkpoint.Writer(folder / folders.CHECKPOINTS, keep=config.keep, told=told)
    save = Saving(state, writer, config, dataset, group, start.stop, start.recorder)
    loading |= {"seed": config.seed, "global_batch": plan.global_batch, "start": state.step, "steps": plan.steps}
    live = Live(wanted=group.rank == 0 and config.log_format == "text")
    with (
        live,
        writer,
        open_trace(config.trace, rank=group.rank) as trace,
        train_batches(dataset, **loading) as batches,
    ):
        prepare = Prepare(dataset, group.device, channels_last=config.channels_last, trace=trace)
        update = Update(config, plan, group, prepare, classes=dataset.classes)
        waiting = Waiting(state.network)
        meter = Meter(
            plan, group, start=state.step, live=live, pulse=start.pulse, recorder=start.recorder, waiting=waiting
        )
        start.recorder.begin(
            state.step,
            target_steps=plan.steps,
            epochs_per_step=plan.global_batch / plan.samples,
            checkpoint_every=plan.checkpoint_every,
        )
        start.recorder.phase("train")
        if state.step and plan.evaluates_after(state.step) and state.scored_at != state.step:
            # The run was stopped between this step and its evaluation.
            state.score, state.scored_at = score_now(), state.step
        start.pulse.beat(Phase.FIRST_STEPS)
        fit(state, batches, update=update, stop=start.stop, meter=meter, evaluate=score_now, save=save)
    return meter


def _scorer(start: Start, state: State, *, dataset: DataSet, group: Group) -> Callable[[], Score]:
    """Return what evaluates the state of the moment, and tells the metrics."""
    config = start.config
    untraced = Prepare(dataset, group.device, channels_last=config.channels_last)

    def score_now() -> Score:
        began = time.monotonic()
        score = score_state(state, config=config, dataset=dataset, group=group, prepare=untraced, start=start)
        check_finite(score, step=state.step)
        best = max(score.accuracy, state.best["accuracy"] if state.best else 0.0)
        start.recorder.evaluated(time.monotonic() - began, loss=score.loss, accuracy=score.accuracy, best=best)
        return score

    return score_now


def loader_options(start: Start, *, dataset: DataSet, group: Group) -> dict[str, Any]:
    """Return what the loaders of train and test batches share."""
    local_ranks = start.rank.local_world_size or 1
    workers = auto_workers(dataset, requested=start.config.workers, cpus=start.cpus, local_ranks=local_ranks)
    sharing = {"rank": group.rank, "world": group.world, "workers": workers, "pin": group.device.type == "cuda"}
    patience = (
        start.config.grace / 2
    )  # the other half is for what comes after: a save in an evaluation, the ends of all ranks
    stopped = partial(start.stop.overdue, patience)
    return sharing | {"skip_bad": start.config.bad_samples == "skip", "stopped": stopped}


def eval_batch_size(dataset: DataSet) -> int:
    """Return how many test samples a rank takes at once where nobody says: at most 1000, and 10 million numbers."""
    return max(1, min(1000, 10_000_000 // math.prod(dataset.input_shape)))


def score_state(
    state: State, *, config: Config, dataset: DataSet, group: Group, prepare: Prepare, start: Start
) -> Score:
    """Evaluate the plain model on the test set, with rank 0's buffers on every rank, and log the score."""

    def stop() -> int:
        start.pulse.beat(Phase.EVALUATION)  # asked with each batch
        return start.stop.signum

    group.broadcast([buffer for buffer in state.model.buffers() if buffer.numel()])
    loading = loader_options(start, dataset=dataset, group=group)
    size = config.eval_batch_size or eval_batch_size(dataset)
    with test_batches(dataset, batch_size=size, **loading) as batches, autocast(config, group.device):
        score = evaluate(state.model, batches, group=group, prepare=prepare, stop=stop)
    check_skipped(score.skipped, of=len(dataset.test), most=config.max_bad_samples, what="test")
    hits = f"{100 * score.accuracy:.2f} % of {score.samples}{f' ({score.skipped} skipped)' if score.skipped else ''}"
    line = f"evaluation after step {state.step}: accuracy {hits}, loss {score.loss:.4f}"
    log.info(line, step=state.step, **{f"eval_{name}": value for name, value in dataclasses.asdict(score).items()})
    return score
