"""The texts of `trainer config` and `trainer launch`."""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path

from trainer import devices
from trainer.cli.launching import count_processes, discover_place, export, launch_warnings
from trainer.cli.ranks import visible_devices
from trainer.cli.resolved import Resolved
from trainer.config import settings
from trainer.launch import Node, Rank, describe


def config_page(resolved: Resolved) -> str:
    """Return a line for each setting: flag, value, source."""
    rows = [
        (item.flag, _shown(getattr(resolved.config, name)), resolved.sources[name]) for name, item in settings().items()
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "".join(f"{flag:<{first}}  {value:<{second}}  {source}\n" for flag, value, source in rows)


def _shown(value: object) -> str:
    if value is None:
        return "(unset)"
    return str(value).lower() if isinstance(value, bool) else str(value)


_HEAD = """\
# Settings

One setting is a flag (`--global-batch-size`), a variable (`TRAINER_GLOBAL_BATCH_SIZE`) and a key of a .env file (the same
name). The command line wins over the environment, the environment over .env files, and those over the default. `.env` in the
working folder is read, or the files given with `--env-file`, of which a later one wins. An empty value means unset.
`trainer config` prints each value and where it came from.

"Must match" settings belong to the experiment: a run is resumed with the same values, or not at all.

This page is written by `make docs` from `trainer/config.py`.
"""


_CHOICES = """
## Choices that are no setting

Where readers of pictures and lists differ, this one does the following; [data.md](data.md) has all of its rules.

| met | answer |
| --- | --- |
| EXIF orientation | applied; one that is not 1 to 8, or cannot be read, is none |
| transparency | laid on white |
| 16 bits per pixel | scaled to 8: value / 257 |
| floating-point or 32-bit pixels | bad: what is white is not known |
| animation | its first frame |
| JPEG without its end marker | bad, as every file that is cut |
| PNG with a wrong checksum | decoded: its pixels are there |
| name ending that is not the content's | the content counts |
| spaces in a list's path | belong to the path: the label comes after the last tab, or else the last space |
| quoted path in a text list | the quotes are removed |
| CSV list | read, with its header |
| words as labels | class names, numbered in sorted order |
| `\\` in a list's path | an ordinary character; if the file is missing, the line says to write `/` |
| a row twice | kept, with a warning |
"""


def settings_page() -> str:
    """Return docs/settings.md."""
    parts = [_HEAD]
    for panel, items in groupby(settings().values(), key=lambda item: item.panel):
        parts.append(
            f"\n## {panel}\n\n| setting | default | allowed | on resume | what it does |\n| --- | --- | --- | --- | --- |\n"
        )
        for item in items:
            allowed = item.allowed.replace("|", "\\|")
            resume = "must match" if item.tag == "experiment" else "may change"
            parts.append(f"| `{item.flag}` | {_shown(item.default)} | {allowed} | {resume} | {item.help} |\n")
    return "".join([*parts, _CHOICES])


def checkpoints_page(run: Path) -> str:
    """Return a line for each checkpoint of a run, newest first. Raises CheckpointError."""
    from trainer.checkpoint import listing  # imports torch

    rows = [("step", "when (UTC)", "size", "state")]
    for row in listing(run):
        state = f"bad: {row.fault}" if row.fault else "valid, best" if row.best else "valid"
        rows.append((str(row.step), f"{row.when:%Y-%m-%d %H:%M:%S}", f"{row.size / 1e6:.1f} MB", state))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "".join(
        f"{'  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=False))}  {row[3]}\n" for row in rows
    )


def launch_page(resolved: Resolved) -> str:
    """Return what is found in this environment, a fact a line. Raises SettingError."""
    export(resolved.others)
    place, visible = discover_place(resolved), visible_devices(resolved.config)
    local_ranks = place.processes if isinstance(place, Node) else place.local_world_size
    if isinstance(place, Node) and place.elastic is None:
        local_ranks = count_processes(resolved, place)
    port = "any free port" if place.master_port is None else str(place.master_port)
    cpus, user = devices.usable_cpus(), os.environ.get("OMP_NUM_THREADS")
    threads = devices.thread_count(local_ranks or max(1, len(visible)), user=user, cpus=cpus)
    rows = [
        ("launcher", place.launcher),
        ("discovered", describe(place)),
        *_place_rows(place, local_ranks or max(1, len(visible)), visible),
        ("devices", ", ".join(visible) if visible else f"cpu ({devices.cuda_facts()})"),
        ("threads", f"{threads} per rank, of {cpus} usable CPUs"),
        ("address", f"{place.master_addr}, {port}"),
        ("read from", ", ".join(place.found) or "no launch variables"),
        *(("warning", line) for line in launch_warnings(resolved, place)),
    ]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def _place_rows(place: Rank | Node, local_ranks: int, visible: tuple[str, ...]) -> list[tuple[str, str]]:
    if isinstance(place, Rank):
        device = _device(place.local_rank, visible)
        return [("rank", f"{place.rank} of {place.world_size}, local rank {place.local_rank}, {device}")]
    if place.elastic is not None:
        limits = f"{place.elastic.minimum} to {place.elastic.maximum}, which are numbered when they meet"
        return [("nodes", limits), ("ranks", f"{local_ranks} on this node")]
    first = place.node_rank * local_ranks
    return [
        ("nodes", f"{place.nodes}, this is node {place.node_rank}"),
        ("ranks", f"{local_ranks} on this node, {place.nodes * local_ranks} in all"),
        *((f"rank {first + index}", _device(index, visible)) for index in range(local_ranks)),
    ]


def _device(local_rank: int, visible: tuple[str, ...]) -> str:
    if not visible:
        return "cpu"
    index = devices.device_index(local_rank, len(visible))
    return f"cuda:{index} ({visible[index]})"
