"""Expand Slurm's short forms, `gpu[07-08,11]` and `2(x3),1`, in Python: scontrol is not in a container."""

from __future__ import annotations

import itertools
import re

from trainer.codes import SettingError

# One character or one bracket at a time: a nested repeat would take exponential time on a list that does not match.
_HOST = r"(?:[^\[\],\s]|\[[0-9,-]+\])+"
_COUNT = r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?"
_RANGE = r"([0-9]{1,9})(?:-([0-9]{1,9}))?"


def expand_hosts(text: str, *, name: str = "SLURM_STEP_NODELIST") -> tuple[str, ...]:
    """Return the hosts of a Slurm node list, in its order: `a[001-002],b1` is a001, a002, b1.

    Numbers keep the width of the lower end; with several brackets in a host the last one runs fastest.

    Raises:
        SettingError: the text is no node list; `name` says where it came from.
    """
    if not re.fullmatch(f"{_HOST}(?:,{_HOST})*", text):
        raise _malformed(name, text, "a node list like gpu[07-08,11]")
    hosts: list[str] = []
    for host in re.findall(_HOST, text):
        parts = re.split(r"\[(.*?)\]", host)  # literal, bracket, literal, bracket, ..., literal
        choices = [_expand_bracket(part, name, text) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts.extend("".join(chosen) for chosen in itertools.product(*choices))
    return tuple(hosts)


def _expand_bracket(inside: str, name: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in inside.split(","):
        match = re.fullmatch(_RANGE, item)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(low) > int(high):
            raise _malformed(name, text, "a node list like gpu[07-08,11]")
        numbers.extend(str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
    return numbers


def expand_counts(text: str, *, name: str = "SLURM_STEP_TASKS_PER_NODE") -> tuple[int, ...]:
    """Return the tasks of each node: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        SettingError: the text is no such list; `name` says where it came from.
    """
    if not re.fullmatch(f"{_COUNT}(?:,{_COUNT})*", text):
        raise _malformed(name, text, "tasks per node like 2(x3),1")
    return tuple(int(count) for count, times in re.findall(_COUNT, text) for _ in range(int(times or 1)))


def _malformed(name: str, text: str, wanted: str) -> SettingError:
    rest = "correct it, or describe the node by --launcher agent --nnodes --node-rank --master-addr"
    return SettingError(f"{name} is {text!r}, which is not {wanted}; {rest}")
