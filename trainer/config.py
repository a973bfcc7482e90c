"""Every setting, once: its name, type, default, help, panel, allowed values and whether resume must match it.

One field is the flag `--global-batch-size`, the variable `TRAINER_GLOBAL_BATCH_SIZE`, the key of a .env file and a row of
docs/settings.md. Nothing here reads the environment or a file, and nothing here imports torch or typer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.codes import SettingError

Tag = Literal["experiment", "operation"]
Scalar = str | int | float | bool | Path | None

PREFIX = "TRAINER_"


@dataclass(frozen=True)
class Setting:
    """One field of `Config`, as the command line, the environment, the files and the documentation see it.

    Attributes:
        name: the field's name, as in `global_batch_size`.
        kind: `str`, `int`, `float`, `bool` or `Path`.
        optional: whether None (unset) is a value.
        choices: the allowed words, for `str` alone.
        minimum, maximum: bounds, both included; `above` is a bound that is not.
        pattern, wanted: what a text must match as a whole, and that in words.
        tag: `experiment` must match on resume, `operation` may change.
    """

    name: str
    kind: type
    optional: bool
    default: Scalar
    help: str
    panel: str
    tag: Tag
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    pattern: str = ""
    wanted: str = ""

    @property
    def flag(self) -> str:
        """Return the command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Return the name of the environment variable and of the .env key."""
        return PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """Say in a few words which values are allowed."""
        if self.wanted:
            return self.wanted
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        words = {int: "a whole number", float: "a number", Path: "a path", str: "a text"}[self.kind]
        low = f" >= {self.minimum}" if self.minimum is not None else f" > {self.above}" if self.above is not None else ""
        high = f"{' and' if low else ''} <= {self.maximum}" if self.maximum is not None else ""
        return words + low + high


def _setting(
    default: Scalar,
    help: str,
    panel: str,
    tag: Tag,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    pattern: str = "",
    wanted: str = "",
) -> Any:
    rules = {"choices": choices, "minimum": minimum, "maximum": maximum, "above": above, "pattern": pattern, "wanted": wanted}
    return field(default=default, metadata={"help": help, "panel": panel, "tag": tag, **rules})


_RUN, _DATA, _MODEL, _OPTIM = "Run", "Data", "Model", "Optimizer"
_OUT, _LAUNCH = "Evaluation and output", "Launch"
_MONTH = 30 * 24 * 3600


@dataclass(frozen=True)
class Config:
    """Hold one value for every setting; see `settings()` for what each means."""

    run_name: str | None = _setting(None, "Name of the run's folder; an existing run is resumed. Unset: a new dated folder.", _RUN, "operation", pattern=r"(?!\.\.?$)[^/\x00-\x1f\x7f]{1,200}", wanted="a folder's name of at most 200 characters, without /")
    runs_dir: Path = _setting(Path("runs"), "Folder that holds the runs.", _RUN, "operation")
    resume: str = _setting("auto", "auto (go on from the run's newest checkpoint), never, or the path of a checkpoint or run.", _RUN, "operation")
    seed: int = _setting(0, "Seed of the data order, augmentation, first weights and dropout.", _RUN, "experiment", minimum=0, maximum=2**63 - 1)
    epochs: float = _setting(4.0, "How often the training set is used; the steps are ceil(epochs x samples / global batch).", _RUN, "experiment", above=0, maximum=10**6)
    steps: int | None = _setting(None, "Number of optimizer steps, instead of --epochs.", _RUN, "experiment", minimum=1, maximum=10**10)
    deterministic: bool = _setting(False, "Bit-exact repeats and resumes with any number of ranks, at some cost in speed.", _RUN, "operation")
    checkpoint_every: int = _setting(500, "Steps between checkpoints; 0 saves at the end and on a stop alone.", _RUN, "operation", minimum=0)
    keep: int = _setting(3, "How many of the newest checkpoints stay on disk, beside that of the best evaluation.", _RUN, "operation", minimum=1)
    max_failed_saves: int = _setting(3, "How many saves in a row may fail before the run ends; the last one of a run may not.", _RUN, "operation", minimum=1)
    max_starts: int = _setting(5, "How many starts of a run may end without a new checkpoint before the next one gives up (code 5); stops do not count.", _RUN, "operation", minimum=1)

    dataset: str = _setting("glyphs", "glyphs, mnist, fashion-mnist, cifar10, cifar100, folder (class folders in train/ and val/), list (lists of pictures), random, or your own as module:function.", _DATA, "experiment")
    data_dir: Path | None = _setting(None, "Folder of the data set's files; of the pictures, for folder and list.", _DATA, "operation")
    train_list: Path | None = _setting(None, "List of the training pictures, for --dataset list: lines of path and label, or a CSV file with a header.", _DATA, "operation")
    test_list: Path | None = _setting(None, "List of the test pictures, for --dataset list.", _DATA, "operation")
    class_names: Path | None = _setting(None, "File with one class name per line, in the order of the labels, for --dataset list.", _DATA, "operation")
    num_classes: int | None = _setting(None, "Number of classes, where it is more than the data show. Unset: what the data have.", _DATA, "experiment", minimum=1, maximum=10**6)
    empty_classes: str = _setting("refuse", "What a class folder without training pictures is, for --dataset folder: refused, or a class.", _DATA, "operation", choices=("refuse", "allow"))
    download: bool = _setting(False, "Fetch the data set's files into --data-dir first, where they are not there (mnist, fashion-mnist, cifar10, cifar100).", _DATA, "operation")
    archive: Path | None = _setting(None, "Local zip or tar file that is unpacked into --data-dir first, once.", _DATA, "operation")
    archive_sha256: str | None = _setting(None, "SHA-256 that --archive must have.", _DATA, "operation", pattern=r"[0-9a-fA-F]{64}", wanted="64 hex digits")
    image_size: int | None = _setting(None, "Side of the square pictures that the model gets. Unset: 224 for folder and list, else the data set's own size.", _DATA, "experiment", minimum=8, maximum=4096)
    min_crop: float = _setting(0.08, "Smallest part of a picture's area that a training crop takes (folder, list).", _DATA, "experiment", above=0, maximum=1)
    bad_samples: str = _setting("fail", "What a picture that cannot be read does: fail ends the run and names it; skip counts it, trains on the next good one in its place, and leaves it out of an evaluation.", _DATA, "operation", choices=("fail", "skip"))
    max_bad_samples: float = _setting(0.01, "With --bad-samples skip: the largest part of the samples that may be bad before the run ends.", _DATA, "operation", minimum=0, maximum=1)
    max_pixels: int = _setting(64_000_000, "A picture file with more pixels than this is not decoded, but bad.", _DATA, "operation", minimum=1, maximum=10**9)
    cache_dir: Path | None = _setting(None, "Folder for data drawn once (glyphs). Unset: trainer/ in the user's cache folder.", _DATA, "operation")
    augment: str = _setting("auto", "auto (what suits the data set) or none.", _DATA, "experiment", choices=("auto", "none"))
    max_shift: int = _setting(2, "Largest augmentation shift in pixels, each way (glyphs, mnist, fashion-mnist, cifar).", _DATA, "experiment", minimum=0, maximum=64)
    limit_train: int | None = _setting(None, "Use only N training samples: the first, and of picture files some of each class.", _DATA, "experiment", minimum=0)
    limit_test: int | None = _setting(None, "Use only N test samples.", _DATA, "experiment", minimum=1)
    random_shape: str = _setting("3x32x32", "Picture size of the random data set, as channels x height x width.", _DATA, "experiment", pattern=r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){2}", wanted="channels x height x width, like 3x32x32")
    random_classes: int = _setting(10, "Number of classes of the random data set.", _DATA, "experiment", minimum=1, maximum=10**6)
    workers: int | None = _setting(None, "Loader processes per rank; 0 loads in the training process. Unset: 0 for data in memory, else what the CPUs allow.", _DATA, "operation", minimum=0, maximum=512)
    trace: Path | None = _setting(None, "Folder where each rank writes step, sample id and CRC32 of every sample that the model received.", _DATA, "operation")

    model: str = _setting("cnn", "cnn, a torchvision classification model by name, or your own as module:function.", _MODEL, "experiment")
    weights: str | None = _setting(None, "First weights: DEFAULT or another torchvision name for --model, a .safetensors or .pth file, or a checkpoint's or run's folder.", _MODEL, "operation")
    freeze_backbone: bool = _setting(False, "Train the last layer (the head) alone.", _MODEL, "experiment")
    norm: str = _setting("batch", "Normalisation layers of the built-in cnn.", _MODEL, "experiment", choices=("batch", "group"))
    dropout: float = _setting(0.0, "Dropout before the head of the built-in cnn.", _MODEL, "experiment", minimum=0, maximum=0.99)
    sync_batchnorm: bool = _setting(False, "Compute BatchNorm statistics over all ranks (GPUs alone).", _MODEL, "experiment")
    channels_last: bool = _setting(False, "Keep pictures and weights in channels-last memory order.", _MODEL, "operation")
    compile: bool = _setting(False, "Compile the model with torch.compile.", _MODEL, "operation")
    precision: str = _setting("fp32", "Number format of forward and backward.", _MODEL, "experiment", choices=("fp32", "bf16"))

    optimizer: str = _setting("sgd", "Optimizer; sgd is with Nesterov momentum.", _OPTIM, "experiment", choices=("sgd", "adamw", "adam"))
    lr: float = _setting(0.2, "Peak learning rate.", _OPTIM, "experiment", above=0)
    momentum: float = _setting(0.9, "Momentum of sgd; 0 is plain sgd.", _OPTIM, "experiment", minimum=0, maximum=0.9999)
    weight_decay: float = _setting(5e-4, "Weight decay; norms and biases have none.", _OPTIM, "experiment", minimum=0)
    warmup: float = _setting(0.1, "Part of all steps in which the learning rate rises to its peak.", _OPTIM, "experiment", minimum=0, maximum=1)
    schedule: str = _setting("cosine", "Learning rate after the warm-up.", _OPTIM, "experiment", choices=("cosine", "constant"))
    label_smoothing: float = _setting(0.0, "Label smoothing of the training loss.", _OPTIM, "experiment", minimum=0, maximum=0.99)
    clip_norm: float | None = _setting(None, "Clip the gradient to this norm.", _OPTIM, "experiment", above=0)
    global_batch_size: int = _setting(256, "Samples per optimizer step, over all ranks.", _OPTIM, "experiment", minimum=1, maximum=10**7)
    device_batch_size: int | None = _setting(None, "Most samples that one device takes at once; more are taken as micro-batches. Unset: no limit.", _OPTIM, "operation", minimum=1)

    eval_every: int = _setting(0, "Steps between evaluations; 0 evaluates after each epoch.", _OUT, "operation", minimum=0)
    eval_batch_size: int | None = _setting(None, "Samples per rank and evaluation batch. Unset: 1000, fewer where pictures are large (66 of 224 x 224).", _OUT, "operation", minimum=1, maximum=10**7)
    log_every: int = _setting(50, "Steps between log lines.", _OUT, "operation", minimum=1)
    log_format: str = _setting("text", "Form of the log lines.", _OUT, "operation", choices=("text", "json"))

    metrics_port: int = _setting(9464, "Port of the node's endpoint: /metrics for Prometheus, /healthz, /readyz; 0: none.", _OUT, "operation", minimum=0, maximum=65535)
    metrics_address: str = _setting("", "Address that the endpoint listens on. Empty: all of this host's.", _OUT, "operation")
    metrics_linger_seconds: float | None = _setting(None, "How long the endpoint stays after a good end, for the last scrape. Unset: 35 in Kubernetes, else 0.", _OUT, "operation", minimum=0, maximum=_MONTH)

    launcher: str = _setting("auto", "Who starts the ranks: auto asks the environment; agent, spawn and none are ours; the others force a reading.", _LAUNCH, "operation", choices=("auto", "agent", "spawn", "none", "torchrun", "env", "pod", "openmpi", "mvapich", "slurm", "pmi"))
    strategy: str = _setting("auto", "auto (ddp for several ranks, else single), single, dp (nn.DataParallel) or ddp.", _LAUNCH, "operation", choices=("auto", "single", "dp", "ddp"))
    nnodes: str | None = _setting(None, "Number of nodes; minimum:maximum, as in 1:3, where nodes may leave and join (elastic).", _LAUNCH, "operation", pattern="[1-9][0-9]{0,4}(:[1-9][0-9]{0,4})?", wanted="a whole number from 1 to 99999, or minimum:maximum")
    node_rank: int | None = _setting(None, "Number of this node, from 0.", _LAUNCH, "operation", minimum=0)
    nproc_per_node: str | None = _setting(None, "Ranks on this node: a number, or auto or gpu for one per visible GPU (1 where there is none).", _LAUNCH, "operation", pattern="0*[1-9][0-9]{0,3}|(?i:auto|gpu)", wanted="a whole number from 1 to 9999, auto or gpu")
    master_addr: str | None = _setting(None, "Name or address of node 0.", _LAUNCH, "operation")
    master_port: int | None = _setting(None, "Port on node 0. Unset: 29500, and any free port on a single node.", _LAUNCH, "operation", minimum=1, maximum=65535)
    device: str = _setting("auto", "Where to train.", _LAUNCH, "operation", choices=("auto", "cpu", "cuda"))
    backend: str = _setting("auto", "Collectives: nccl on GPUs, gloo on CPUs.", _LAUNCH, "operation", choices=("auto", "nccl", "gloo"))
    rendezvous_seconds: float = _setting(600.0, "How long ranks wait for each other at the start.", _LAUNCH, "operation", above=0, maximum=_MONTH)
    collective_seconds: float = _setting(300.0, "How long a rank waits for its peers in one collective.", _LAUNCH, "operation", above=0, maximum=_MONTH)
    max_restarts: int | None = _setting(None, "How often the agent starts its ranks again when one was lost, before a new checkpoint. Unset: 3 on one node, 0 over several. In an elastic run: ever, and 100.", _LAUNCH, "operation", minimum=0)
    hang_timeout: float | None = _setting(None, "Seconds without progress after which a rank counts as hung. Unset: ten times its slowest recent step, at least 60, and more for the start.", _LAUNCH, "operation", above=0, maximum=_MONTH)
    grace: float = _setting(30.0, "Seconds between a stop signal and the end of what has not ended by then.", _LAUNCH, "operation", minimum=0, maximum=_MONTH)


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by field name, in the order of the help."""
    hints = typing.get_type_hints(Config)
    table = {}
    for item in dataclasses.fields(Config):
        default = typing.cast(Scalar, item.default)
        kinds = [kind for kind in (typing.get_args(hints[item.name]) or (hints[item.name],)) if kind is not type(None)]
        optional = len(kinds) < len(typing.get_args(hints[item.name]))
        table[item.name] = Setting(name=item.name, kind=kinds[0], optional=optional, default=default, **item.metadata)
    return table


_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"0", "false", "f", "no", "n", "off"})


def parse(setting: Setting, text: str, *, origin: str) -> Scalar:
    """Read one value of a setting from a text.

    An empty text means unset: the default. `origin` says where the text came from, for the error's line.

    Raises:
        SettingError: the text is no value of this setting; the line names both, and what is allowed.
    """
    text = text.strip()
    if not text:
        return setting.default
    try:
        value: Scalar = _BOOLS[text.lower()] if setting.kind is bool else setting.kind(text)
    except (ValueError, KeyError):
        value = None
    if value is None or not _is_allowed(setting, value):
        raise SettingError(f"{setting.flag} is {_shortened(text)!r} ({origin}); allowed: {setting.allowed}")
    return value


_BOOLS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
_MOST_SHOWN = 80


def _is_allowed(setting: Setting, value: str | int | float | Path) -> bool:
    if isinstance(value, Path):
        return True
    if isinstance(value, str):
        return value in setting.choices if setting.choices else re.fullmatch(setting.pattern or "(?s:.*)", value) is not None
    # Not by float(value): that rounds whole numbers above 2**53, and overflows.
    finite = isinstance(value, int) or math.isfinite(value)
    low = setting.minimum is None or value >= setting.minimum
    high = setting.maximum is None or value <= setting.maximum
    return finite and low and high and (setting.above is None or value > setting.above)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def build(values: Mapping[str, Scalar]) -> Config:
    """Build a Config from values by field name, defaults elsewhere, and check how they fit together.

    Raises:
        SettingError: two settings contradict each other.
    """
    config = Config(**typing.cast(dict[str, Any], dict(values)))
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    if config.device == "cpu" and config.backend == "nccl":
        raise SettingError("--backend nccl needs GPUs, but --device is cpu; use --backend gloo or --device cuda")
    if config.strategy == "dp" and config.compile:
        raise SettingError("--strategy dp does not work with --compile; use --strategy ddp, or drop --compile")
    if config.strategy in ("single", "dp") and config.nnodes not in (None, "1"):
        raise SettingError(f"--strategy {config.strategy} is for one node, but --nnodes is {config.nnodes}; use --strategy ddp")


#: Setting -> the data sets that it is for; another one passes it over.
_FOR = dict.fromkeys(("train_list", "test_list", "class_names"), ("list",)) | {"empty_classes": ("folder",)}


def unused(config: Config) -> list[str]:
    """Return a line for each setting that is given, but that the data set does not look at."""
    lines = [
        f"{settings()[name].flag} is for --dataset {' or '.join(sets)}; --dataset {config.dataset} passes it over"
        for name, sets in _FOR.items()
        if getattr(config, name) != settings()[name].default and config.dataset not in sets
    ]
    if config.dataset in ("glyphs", "random") and config.data_dir is not None:
        lines.append(f"--data-dir is passed over: --dataset {config.dataset} has no files; for class folders give --dataset folder")
    return lines


def experiment(config: Config) -> dict[str, Scalar]:
    """Return the settings that must match on resume, by name."""
    return {name: getattr(config, name) for name, item in settings().items() if item.tag == "experiment"}
