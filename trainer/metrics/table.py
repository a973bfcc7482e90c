"""Every series of the catalogue, each once: what it is called, what it means, who writes it and when.

What a series measures is decided by who calls the recorder; docs/metrics.md is made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Kind = Literal["counter", "gauge", "histogram"]
#: J: the node of rank 0 alone, absent elsewhere; N: every node; R: every rank, by the label `rank`.
Scope = Literal["J", "N", "R"]
#: A process has one role or more. "first" is local rank 0; "leader" is rank 0 of the job.
Role = Literal["agent", "rank", "first", "leader"]

Phase = Literal["init", "rendezvous", "restore", "train", "eval", "checkpoint", "succeeded", "stopped", "failed"]
Stage = Literal["import", "rendezvous", "data", "model", "restore", "first_step"]
Spent = Literal["data_wait", "compute", "comm_wait", "checkpoint", "eval", "other"]
State = Literal["productive", "startup", "restore", "replay", "data_wait", "checkpoint", "eval", "down"]
Bottleneck = Literal["data", "compute", "communication", "straggler"]
DataFault = Literal["decode", "missing"]
Rejection = Literal["digest", "truncated", "version"]
Reason = Literal["crash", "oom", "hang", "stopped", "peer"]
Level = Literal["info", "warning", "error"]

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SAVE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

_WRITERS: dict[Scope, tuple[Role, ...]] = {"J": ("leader",), "N": ("rank",), "R": ("rank",)}
_BOTH: tuple[Role, ...] = ("agent", "first")


@dataclass(frozen=True)
class Series:
    """Declare one metric.

    Attributes:
        when: when its value changes.
        label: a label whose values are all known, with them; each has its series from the start.
        facts: labels whose values are told once, of a metric that is always 1.
        by: the roles that write it; () takes what the scope says.
    """

    name: str
    kind: Kind
    scope: Scope
    when: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    by: tuple[Role, ...] = field(default=())

    @property
    def writers(self) -> tuple[Role, ...]:
        """Return the roles that write it; in any other process it does not exist."""
        return self.by or _WRITERS[self.scope]

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of its labels, in the order in which the recorder gives their values."""
        own = ("rank",) if self.scope == "R" else ()
        return own + self.facts + ((self.label,) if self.label else ())


_RUN = [
    Series("trainer_build_info", "gauge", "N", "start", "Versions of the software, always 1.",
           facts=("version", "torch", "cuda", "nccl", "python"), by=("first",)),
    Series("trainer_run_info", "gauge", "J", "start", "What is trained and how, always 1.",
           facts=("run", "model", "dataset", "strategy", "backend", "precision")),
    Series("trainer_device_info", "gauge", "R", "start", "What a rank computes on, always 1.",
           facts=("device", "uuid", "model")),
    Series("trainer_phase", "gauge", "N", "on change", "What the node is doing: 1 for this phase, 0 for the others.",
           label="phase", values=get_args(Phase), by=_BOTH),
    Series("trainer_step", "gauge", "J", "each step", "Optimizer steps done in the run, also before a restart."),
    Series("trainer_target_steps", "gauge", "J", "start", "Optimizer steps of the whole run."),
    Series("trainer_epoch", "gauge", "J", "each step", "Passes through the training set done, as a fraction."),
    Series("trainer_progress_ratio", "gauge", "J", "log interval", "Part of the run's steps that is done, 0 to 1."),
    Series("trainer_estimated_remaining_seconds", "gauge", "J", "log interval",
           "Seconds that the steps left take at the speed of the last log interval."),
    Series("trainer_bottleneck", "gauge", "J", "log interval",
           "What bounds the run: 1 for this kind, 0 for the others; all 0 before the first log interval.",
           label="kind", values=get_args(Bottleneck)),
    Series("trainer_world_size", "gauge", "J", "rendezvous", "Ranks that take part."),
    Series("trainer_expected_world_size", "gauge", "J", "rendezvous", "Ranks that were asked for."),
    Series("trainer_global_batch_size", "gauge", "J", "rendezvous", "Samples of one optimizer step, over all ranks."),
]  # fmt: skip

_LEARNING = [
    Series("trainer_loss", "gauge", "J", "log interval",
           "Mean training loss of the last log interval, over all ranks; NaN before the first one, and if it is NaN."),
    Series("trainer_learning_rate", "gauge", "J", "log interval", "Learning rate of the last step."),
    Series("trainer_gradient_norm", "gauge", "J", "log interval",
           "Norm of the gradient before clipping; only where it is clipped."),
    Series("trainer_nonfinite_losses_total", "counter", "J", "log interval",
           "Log intervals whose loss was infinite or not a number."),
    Series("trainer_eval_loss", "gauge", "J", "evaluation", "Mean loss on the test set; NaN before the first one."),
    Series("trainer_eval_accuracy_ratio", "gauge", "J", "evaluation", "Part of the test set that was classified right."),
    Series("trainer_best_eval_accuracy_ratio", "gauge", "J", "evaluation", "Best accuracy on the test set so far."),
]  # fmt: skip

_TIME = [
    Series("trainer_steps_total", "counter", "R", "each step", "Optimizer steps done, repeated ones included."),
    Series("trainer_samples_total", "counter", "R", "each step", "Training samples that the rank has used."),
    Series("trainer_phase_seconds_total", "counter", "R", "each step",
           "Seconds that the rank has spent since its first step began, by what it did.",
           label="phase", values=get_args(Spent)),
    Series("trainer_step_duration_seconds", "histogram", "N", "each step",
           "Seconds from one step to the next, of all ranks of the node; evaluations and saves are left out.",
           buckets=STEP_BUCKETS),
    Series("trainer_last_step_timestamp_seconds", "gauge", "R", "each step",
           "When the rank did its last step; before the first one of a start, when it began."),
    Series("trainer_time_seconds_total", "counter", "J", "each step, evaluation, save and stage of the start",
           "Seconds since the first start, each counted in exactly one state; goodput is the part of productive.",
           label="state", values=get_args(State)),
    Series("trainer_startup_duration_seconds", "gauge", "N", "start",
           "Seconds that a stage of the last start took on local rank 0.",
           label="stage", values=get_args(Stage), by=("first",)),
    Series("trainer_device_memory_allocated_bytes", "gauge", "R", "log interval",
           "Most device memory in use by tensors since the last log interval; only on a GPU."),
    Series("trainer_device_memory_reserved_bytes", "gauge", "R", "log interval",
           "Most device memory held by the allocator since the last log interval; only on a GPU."),
    Series("trainer_data_errors_total", "counter", "N", "event", "Training samples that could not be read.",
           label="kind", values=get_args(DataFault)),
]  # fmt: skip

_CHECKPOINTS = [
    Series("trainer_checkpoint_saves_total", "counter", "J", "each save",
           "Saves by how they ended; one is skipped while another is under way.",
           label="result", values=("ok", "error", "skipped")),
    Series("trainer_checkpoint_duration_seconds", "histogram", "J", "each save",
           "Seconds that a save took: snapshot is the copy, while training waits; write is all the rest.",
           label="stage", values=("snapshot", "write"), buckets=SAVE_BUCKETS),
    Series("trainer_checkpoint_blocked_seconds_total", "counter", "J", "each save", "Seconds that saves kept training waiting."),
    Series("trainer_checkpoint_size_bytes", "gauge", "J", "after publish", "Size of the newest checkpoint's files."),
    Series("trainer_checkpoint_interval_seconds", "gauge", "J", "log interval",
           "Seconds between two regular saves at the present speed; NaN where only the end is saved."),
    Series("trainer_checkpoint_last_success_step", "gauge", "J", "after publish",
           "Step of the newest checkpoint, or of the one that the run went on from; 0 without any."),
    Series("trainer_checkpoint_last_success_timestamp_seconds", "gauge", "J", "after publish",
           "When the newest checkpoint was saved; without any, when this start began to train."),
    Series("trainer_checkpoint_rejected_total", "counter", "J", "restore", "Checkpoints that were passed over, by what is wrong.",
           label="reason", values=get_args(Rejection)),
    Series("trainer_restores_total", "counter", "J", "restore", "Starts by whether there was a checkpoint to go on from.",
           label="result", values=("ok", "none")),
    Series("trainer_replayed_steps_total", "counter", "J", "after a restore",
           "Steps that were done before, and once more after a restart from an older checkpoint."),
]  # fmt: skip

_LIFE = [
    Series("trainer_restarts_total", "counter", "N", "event", "Starts anew of the node's ranks, by what ended the last one.",
           label="reason", values=get_args(Reason), by=("agent",)),
    Series("trainer_rank_exits_total", "counter", "N", "event", "Ranks of the node that ended before the run was finished.",
           label="reason", values=get_args(Reason), by=("agent",)),
    Series("trainer_hangs_total", "counter", "N", "event", "Ranks of the node that were found to be hung.", by=("agent",)),
    Series("trainer_stop_signals_total", "counter", "N", "event", "Stop signals that the agent received.", by=("agent",)),
    Series("trainer_log_messages_total", "counter", "N", "event", "Lines logged by the node's processes.",
           label="level", values=get_args(Level), by=("agent", "rank")),
]  # fmt: skip

SERIES: tuple[Series, ...] = (*_RUN, *_LEARNING, *_TIME, *_CHECKPOINTS, *_LIFE)
