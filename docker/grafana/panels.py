"""What the dashboard shows: its rows, each with its panels, as data. dashboard.py makes them Grafana's.

In an expression %F stands for the filter by the dashboard's variables, %R for the same where `instance` is gone, and %J for the
labels that make one run. $__rate_interval is Grafana's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["value", "name", "lines", "stack", "heat", "bars", "states", "table"]

FILTER = 'job=~"$job", job_name=~"$job_name", instance=~"$instance"'
RUN_FILTER = 'job=~"$job", job_name=~"$job_name"'
ONE_RUN = "job, namespace, job_name"
RUN = "{{job_name}} {{instance}}"


@dataclass(frozen=True)
class Panel:
    """Say what a panel shows.

    Attributes:
        unit: Grafana's name of it; "none" for plain numbers, "suffix: x" for one of our own.
        queries: each expression with its legend.
        width: of 24.
    """

    title: str
    kind: Kind
    unit: str
    description: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8


def _dcgm(series: str) -> str:
    """Return a DCGM series with the rank that uses the GPU, which is found by the GPU's UUID."""
    ranks = 'max by (UUID, rank) (label_replace(trainer_device_info{%F, uuid!=""}, "UUID", "$1", "uuid", "(.+)"))'
    return f"max by (UUID) ({series}) * on (UUID) group_right () {ranks}"


_OVERVIEW = [
    Panel("Phase", "name", "none", "What each node is doing.",
          (("trainer_phase{%F} == 1", "{{phase}} ({{instance}})"),), 4),
    Panel("Progress", "value", "percentunit", "Part of the run's steps that is done.", (("trainer_progress_ratio{%F}", RUN),), 3),
    Panel("Time left", "value", "s", "At the speed of the last log interval; evaluations and saves not counted.",
          (("trainer_estimated_remaining_seconds{%F}", RUN),), 3),
    Panel("Goodput", "value", "percentunit", "Part of the time since the first start that went into steps not done before.",
          (('sum by (%J) (trainer_time_seconds_total{%F, state="productive"}) / sum by (%J) (trainer_time_seconds_total{%F})',
            "{{job_name}} productive"),), 3),
    Panel("Samples per second", "value", "suffix: /s", "Training samples per second, over all ranks.",
          (("sum by (%J) (rate(trainer_samples_total{%F}[$__rate_interval]))", "{{job_name}} all ranks"),), 3),
    Panel("Ranks", "value", "none", "Ranks that take part, and that were asked for.",
          (("trainer_world_size{%F}", "take part"), ("trainer_expected_world_size{%F}", "asked for")), 3),
    Panel("Checkpoint age", "value", "s", "Since the newest checkpoint: what a crash now would lose.",
          (("time() - trainer_checkpoint_last_success_timestamp_seconds{%F}", RUN),), 3),
    Panel("Restarts", "value", "none", "Starts anew of a node's ranks, of the node that had most.",
          (("max by (%J) (sum by (%J, instance) (trainer_restarts_total{%F}))", "{{job_name}} restarts"),), 2),
    Panel("What bounds the run", "name", "none", "The verdict of the last log interval; the log line has the number and what to try.",
          (("trainer_bottleneck{%F} == 1", "{{kind}}"),), 6),
    Panel("Step", "value", "none", "Optimizer steps done, and of the whole run.",
          (("trainer_step{%F}", "done"), ("trainer_target_steps{%F}", "of")), 6),
    Panel("Epoch", "value", "none", "Passes through the training set done.", (("trainer_epoch{%F}", RUN),), 3),
    Panel("Global batch", "value", "none", "Samples of one optimizer step, over all ranks.", (("trainer_global_batch_size{%F}", RUN),), 3),
    Panel("Last checkpoint", "value", "none", "Step of the newest checkpoint.",
          (("trainer_checkpoint_last_success_step{%F}", RUN),), 3),
    Panel("Losses not finite", "value", "none", "Log intervals whose loss was infinite or not a number.",
          (("trainer_nonfinite_losses_total{%F}", RUN),), 3),
]  # fmt: skip

_LEARNING = [
    Panel("Loss", "lines", "none", "Training loss of a log interval, and loss on the test set.",
          (("trainer_loss{%F}", "training {{job_name}}"), ("trainer_eval_loss{%F}", "test {{job_name}}"))),
    Panel("Accuracy", "lines", "percentunit", "Part of the test set that was classified right, and the best so far.",
          (("trainer_eval_accuracy_ratio{%F}", "test {{job_name}}"), ("trainer_best_eval_accuracy_ratio{%F}", "best {{job_name}}"))),
    Panel("Learning rate", "lines", "none", "Of the last step.", (("trainer_learning_rate{%F}", RUN),), 4),
    Panel("Gradient norm", "lines", "none", "Before clipping; only where gradients are clipped.",
          (("trainer_gradient_norm{%F}", RUN),), 4),
]  # fmt: skip

_STEPS = [
    Panel("Step time", "lines", "s", "From one step to the next, evaluations and saves left out; over all ranks.", tuple(
        (f"histogram_quantile({part}, sum by (le, %J) (rate(trainer_step_duration_seconds_bucket{{%F}}[$__rate_interval])))",
         f"{name} {{{{job_name}}}}") for part, name in (("0.5", "p50"), ("0.95", "p95")))),
    Panel("Step times", "heat", "s", "How many steps took how long.",
          (("sum by (le) (increase(trainer_step_duration_seconds_bucket{%F}[$__rate_interval]))", "{{le}}"),)),
    Panel("What a step goes into", "stack", "percentunit", "Mean over the ranks; comm_wait is waiting for the others.",
          (("avg by (phase) (rate(trainer_phase_seconds_total{%F}[$__rate_interval]))", "{{phase}}"),)),
]  # fmt: skip

_RANKS = [
    Panel("Busy", "lines", "percentunit", "What a rank does itself. The slow rank is the one that is busy most.",
          (('sum by (%J, rank) (rate(trainer_phase_seconds_total{%F, phase=~"data_wait|compute"}[$__rate_interval]))',
            "{{job_name}} rank {{rank}}"),), 6),
    Panel("Steps per second", "lines", "suffix: /s", "Equal for all ranks that go on.",
          (("sum by (%J, rank) (rate(trainer_steps_total{%F}[$__rate_interval]))", "{{job_name}} rank {{rank}}"),), 6),
    Panel("Lag", "lines", "s", "How long before the newest of the others a rank did its last step.",
          ((("max by (%J) (trainer_last_step_timestamp_seconds{%R}) - on (%J) group_right () "
            "max by (%J, rank) (trainer_last_step_timestamp_seconds{%F})"), "{{job_name}} rank {{rank}}"),), 6),
    Panel("Device memory", "lines", "bytes", "Peak since the last log interval; only on a GPU.",
          (("trainer_device_memory_allocated_bytes{%F}", "rank {{rank}} allocated"),
           ("trainer_device_memory_reserved_bytes{%F}", "rank {{rank}} reserved")), 6),
]  # fmt: skip

_DATA = [
    Panel("Waiting for data", "lines", "percentunit", "Part of a rank's training time. More than a few percent: --workers.",
          ((('sum by (%J, rank) (rate(trainer_phase_seconds_total{%F, phase="data_wait"}[$__rate_interval])) / '
            'sum by (%J, rank) (rate(trainer_phase_seconds_total{%F, phase!~"checkpoint|eval"}[$__rate_interval]))'),
            "{{job_name}} rank {{rank}}"),)),
    Panel("Samples per second and rank", "lines", "suffix: /s", "Training samples that a rank uses.",
          (("sum by (%J, rank) (rate(trainer_samples_total{%F}[$__rate_interval]))", "{{job_name}} rank {{rank}}"),)),
    Panel("Samples that could not be read", "lines", "none", "Since the start of the node.",
          (("sum by (%J, kind) (trainer_data_errors_total{%F})", "{{job_name}} {{kind}}"),)),
]  # fmt: skip

_CHECKPOINTS = [
    Panel("Age and interval", "lines", "s", "An age above three intervals is an alert.",
          (("time() - trainer_checkpoint_last_success_timestamp_seconds{%F}", "age {{job_name}}"),
           ("trainer_checkpoint_interval_seconds{%F}", "interval {{job_name}}")), 6),
    Panel("Time of a save", "lines", "s", "Mean; training waits for the snapshot alone, where it is a copy.",
          ((("sum by (%J, stage) (rate(trainer_checkpoint_duration_seconds_sum{%F}[$__rate_interval])) / "
            "sum by (%J, stage) (rate(trainer_checkpoint_duration_seconds_count{%F}[$__rate_interval]))"),
            "{{stage}} {{job_name}}"),), 6),
    Panel("Kept waiting", "lines", "percentunit", "Part of the time that saves keep training waiting.",
          (("rate(trainer_checkpoint_blocked_seconds_total{%F}[$__rate_interval])", RUN),), 4),
    Panel("Saves", "lines", "none", "Since the first start, by how they ended; and checkpoints that were passed over.",
          (("trainer_checkpoint_saves_total{%F}", "{{result}} {{job_name}}"),
           ("trainer_checkpoint_rejected_total{%F}", "rejected: {{reason}} {{job_name}}")), 4),
    Panel("Size", "lines", "bytes", "Of the newest checkpoint.", (("trainer_checkpoint_size_bytes{%F}", RUN),), 4),
]  # fmt: skip

_GOODPUT = [
    Panel("What the time goes into", "stack", "percentunit", "Of the run as a whole; productive is goodput.",
          (("sum by (state) (rate(trainer_time_seconds_total{%F}[$__rate_interval])) / scalar(count(trainer_step{%F}))",
            "{{state}}"),)),
    Panel("Since the first start", "bars", "s", "All time of the run, by what it went into.",
          (("sum by (state) (trainer_time_seconds_total{%F})", "{{state}}"),)),
    Panel("Goodput of the last hour", "lines", "percentunit", "Below 80 % is an alert. It is recorded by rules.yml.",
          (("job:trainer_goodput:ratio_rate1h{%R}", "{{job}} {{job_name}}"),), 4),
    Panel("Replayed steps", "lines", "none", "Steps that were done once more after a restart.",
          (("trainer_replayed_steps_total{%F}", RUN),), 4),
]  # fmt: skip

_GPU = [
    Panel("Active", "lines", "percentunit", "Part of the time that the GPU computed anything (DCGM).",
          ((_dcgm("DCGM_FI_PROF_GR_ENGINE_ACTIVE"), "rank {{rank}}"),), 6),
    Panel("Memory", "lines", "mbytes", "Used on the GPU, by all processes (DCGM).",
          ((_dcgm("DCGM_FI_DEV_FB_USED"), "rank {{rank}}"),), 6),
    Panel("Power", "lines", "watt", "Less than the others' at the same work: throttled (DCGM).",
          ((_dcgm("DCGM_FI_DEV_POWER_USAGE"), "rank {{rank}}"),), 4),
    Panel("Temperature", "lines", "celsius", "Of the GPU (DCGM).", ((_dcgm("DCGM_FI_DEV_GPU_TEMP"), "rank {{rank}}"),), 4),
    Panel("Last XID", "lines", "none", "0: none. NVIDIA's list says what the others are (DCGM).",
          ((_dcgm("DCGM_FI_DEV_XID_ERRORS"), "rank {{rank}}"),), 4),
]  # fmt: skip

_LIFECYCLE = [
    Panel("Phases", "states", "none", "What each node was doing when.",
          (("max by (instance, phase) (trainer_phase{%F}) == 1", "{{instance}} {{phase}}"),), 12),
    Panel("The last start", "bars", "s", "What each stage took on local rank 0.",
          (("max by (stage) (trainer_startup_duration_seconds{%F})", "{{stage}}"),), 6),
    Panel("Restores", "lines", "none", "Starts with a checkpoint to go on from (ok), and without.",
          (("trainer_restores_total{%F}", "{{result}} {{job_name}}"),), 6),
    Panel("Ends of ranks", "lines", "none", "Ranks that ended before the run was finished, and starts anew, by reason.",
          (("sum by (reason) (trainer_rank_exits_total{%F})", "exits: {{reason}}"),
           ("max by (reason) (trainer_restarts_total{%F})", "restarts: {{reason}}"))),
    Panel("Hangs and stops", "lines", "none", "Ranks that were found to be hung, and stop signals to the agent.",
          (("sum by (%J) (trainer_hangs_total{%F})", "hangs {{job_name}}"),
           ("sum by (%J) (trainer_stop_signals_total{%F})", "stop signals {{job_name}}"))),
    Panel("Log lines", "lines", "none", "Of all processes, since the start of the nodes.",
          (("sum by (level) (trainer_log_messages_total{%F})", "{{level}}"),)),
    Panel("Run", "table", "none", "What is trained and how.", (("trainer_run_info{%F}", "run"),), 12),
    Panel("Devices", "table", "none", "What each rank computes on.", (("trainer_device_info{%F}", "rank {{rank}}"),), 12),
    Panel("Software", "table", "none", "Versions on each node.", (("trainer_build_info{%F}", "versions"),), 12),
    Panel("Memory of the endpoint's process", "lines", "bytes", "Of the agent, or of local rank 0 where it serves the endpoint.",
          (("process_resident_memory_bytes{%F}", RUN),), 12),
]  # fmt: skip

ROWS: dict[str, list[Panel]] = {
    "Overview": _OVERVIEW,
    "Learning": _LEARNING,
    "Step time": _STEPS,
    "Ranks": _RANKS,
    "Data": _DATA,
    "Checkpoints": _CHECKPOINTS,
    "Goodput": _GOODPUT,
    "GPU (DCGM)": _GPU,
    "Lifecycle": _LIFECYCLE,
}


def expression(template: str) -> str:
    """Return an expression as Grafana gets it."""
    return template.replace("%F", FILTER).replace("%R", RUN_FILTER).replace("%J", ONE_RUN)
