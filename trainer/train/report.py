"""What a run tells of itself: the facts at the start, the receipt (summary.json) and the table at the end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import log
from trainer.checkpoint import weights_digest
from trainer.data import DataSet
from trainer.evaluate import Score
from trainer.group import Group
from trainer.progress import duration, table
from trainer.train import folder as folders
from trainer.train.loop import State
from trainer.train.meter import Meter
from trainer.train.plan import Plan
from trainer.train.start import Choice, Start, identity, versions

FEW_STEPS = 20
_WORDS = {"data": "waiting for data", "compute": "computing", "evaluate": "evaluating", "save": "saving"}


@dataclass(frozen=True)
class Facts:
    """Hold what is settled before the first step."""

    start: Start
    choice: Choice
    group: Group
    dataset: DataSet
    plan: Plan

    @property
    def nodes(self) -> int:
        """Return the number of nodes as the launcher tells it, else the number of hosts."""
        return self.start.rank.nodes or self.group.nodes


def describe(facts: Facts, state: State) -> None:
    """Log one line per fact."""
    choice, group, dataset, plan = facts.choice, facts.group, facts.dataset, facts.plan
    weights = list(state.model.parameters())
    total, trained = (sum(map(torch.numel, kind)) for kind in (weights, [one for one in weights if one.requires_grad]))
    ranks = f"{_count(group.world, 'rank')} on {_count(facts.nodes, 'node')}"
    threads = _count(torch.get_num_threads(), "thread")
    log.info(f"{ranks}, {choice.backend or choice.strategy}, {choice.device.type} ({choice.why}), {threads} per rank")
    describe_data(dataset, warn=group.rank == 0)
    config, part = facts.start.config, "" if trained == total else f" ({trained} of them trained)"
    log.info(f"{config.model}: {total} weights{part}, {config.precision}, {config.optimizer}")
    if group.rank == 0 and config.steps is None and plan.steps < FEW_STEPS:
        log.warning(
            f"{_count(plan.steps, 'step')} are few to learn from: --global-batch-size is {plan.global_batch} for "
            f"{plan.samples} samples; lower it, or raise --epochs"
        )
    log.info(f"{_count(plan.steps, 'step')}, {plan.epochs:.3g} epochs; global batch {_split(plan, group.world)}")


def tell_facts(facts: Facts, folder: Path) -> None:
    """Tell the metrics what is settled before the first step."""
    start, choice, config = facts.start, facts.choice, facts.start.config
    model = torch.cuda.get_device_name(choice.device) if choice.device.type == "cuda" else ""
    start.recorder.device(device=str(choice.device), uuid=identity(choice), model=model)
    how = {"strategy": choice.strategy, "backend": choice.backend or "none", "precision": config.precision}
    start.recorder.run(run=folder.name, model=config.model, dataset=config.dataset, **how)
    world = facts.group.world
    start.recorder.world(size=world, expected=world, global_batch_size=facts.plan.global_batch)


def build_facts() -> dict[str, str]:
    """Return the versions that the metrics tell."""
    found = versions()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    ours = {"version": found["trainer"], "cuda": found.get("cuda", ""), "nccl": nccl}
    return ours | {name: found[name] for name in ("torch", "python")}


def describe_data(dataset: DataSet, *, warn: bool = True) -> None:
    """Log what the data are, and, with `warn`, what is odd about them."""
    sizes = f"{len(dataset.train)} training and {len(dataset.test)} test samples"
    log.info(f"{dataset.name}: {sizes}, {dataset.classes} classes")
    for line in dataset.facts:
        log.info(line)
    for line in dataset.notes if warn else ():
        log.warning(line)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _split(plan: Plan, world: int) -> str:
    least, rest = divmod(plan.global_batch, world)
    micro = f", in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    if world == 1:
        return f"{plan.global_batch}{micro}"
    if rest:
        return f"{plan.global_batch} = {rest} x {least + 1} + {world - rest} x {least}{micro}"
    return f"{plan.global_batch} = {world} x {least}{micro}"


def finish(facts: Facts, state: State, *, meter: Meter, folder: Path) -> None:
    """Write the receipt, whose presence means that the run is finished, and show the table; rank 0 alone.

    Raises:
        TrainerError: the receipt cannot be written.
    """
    assert state.score is not None
    if facts.group.rank != 0:
        return
    summary = summarise(facts, state, meter=meter)
    # Not from config.json, which may be gone: somebody removed the folder, and the last save made it anew.
    record = folders.settings_record(facts.start.config, sources=facts.start.sources)
    folders.write_summary(folder, summary | {"settings": record})
    if facts.start.config.log_format == "json":
        log.info(
            "finished",
            run=str(folder),
            **{name: summary[name] for name in ("steps", "samples", "evaluation", "samples_per_second", "seconds")},
        )
    else:
        log.show("\n" + table(_rows(facts, meter, state, state.score, folder)) + "\n")


def summarise(facts: Facts, state: State, *, meter: Meter) -> dict[str, Any]:
    """Return the receipt's contents but for the settings."""
    start, choice, group = facts.start, facts.choice, facts.group
    topology = {"ranks": group.world, "nodes": facts.nodes, "backend": choice.backend, "strategy": choice.strategy}
    return {
        "topology": topology | {"device": choice.device.type, "launcher": start.rank.launcher},
        "versions": versions(),
        "fingerprint": facts.dataset.fingerprint,
        "steps": state.step,
        "samples": state.step * facts.plan.global_batch,
        "skipped": state.skipped,
        "restarts": list(start.restarts),
        "evaluation": dataclasses.asdict(state.score) if state.score else None,
        "final_loss": meter.loss if meter.steps else None,
        "samples_per_second": meter.throughput(),
        "seconds": {"total": meter.total_seconds, **meter.seconds},
        "first_step_unix_seconds": meter.first_step_unix_seconds,
        "weights_sha256": weights_digest(state.model.state_dict()),
    }


def _rows(facts: Facts, meter: Meter, state: State, score: Score, folder: Path) -> list[tuple[str, str]]:
    hits = f"{100 * score.accuracy:.2f} % of {score.samples} samples"
    rows = [
        ("test accuracy", f"{hits} (top-5 {100 * score.top5:.2f} %)" if facts.dataset.classes > 5 else hits),
        ("test loss", f"{score.loss:.4f}"),
        ("trained", f"{state.step} steps, {state.step * facts.plan.global_batch} samples"),
        *([("restarts", f"{len(restarts)}; the first: {restarts[0]}")] if (restarts := facts.start.restarts) else []),
        *([("skipped", f"{state.skipped} samples that cannot be read")] if state.skipped else []),
    ]
    if meter.steps:
        total = max(1e-9, meter.total_seconds)
        parts = meter.seconds | {"compute": meter.seconds["compute"] + meter.seconds["agree"]}
        split = ", ".join(f"{words} {100 * parts[kind] / total:.0f} %" for kind, words in _WORDS.items())
        rows += [("throughput", f"{meter.throughput():.0f} samples/s"), ("time", f"{duration(total)}: {split}")]
    return [*rows, ("run", str(folder))]
