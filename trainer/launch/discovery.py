"""Ask the launchers one after the other, and say what is wrong where none of them is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainer.codes import SettingError
from trainer.launch.places import Node, Options, Rank
from trainer.launch.reader import Reader
from trainer.launch.recognisers import MPI_NAMES, RECOGNISERS, read_agent_child, read_node

_PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

#: What no one sets alone: some of a row set and no launcher recognised is half a launch. Ports are in none of them: a
#: Service link sets those. PET_STANDALONE is torchrun's own business.
_GROUPS = (
    (*_PLAIN, "MASTER_ADDR"),
    ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"),
    *MPI_NAMES.values(),
)

#: Slurm's numbers for what is no step of tasks: the interactive shell of salloc, the batch script, the extern step.
_SHELL_STEPS = frozenset(str(number) for number in range(0xFFFFFFFA, 0xFFFFFFFE))


def discover(environ: Mapping[str, str], options: Options) -> Rank | Node:
    """Find out whether another launcher started this process as a rank, or whether it stands for a node.

    Asked in this order: our own agent's child, `options.launcher` if it is not auto, then every launcher from the
    innermost outwards; else the options alone describe the node. Options win over the variables of a pod.

    Raises:
        SettingError: variables or options are half set, contradict each other, or are no numbers.
    """
    if options.launcher == "none":
        return Rank(0, 1, 0, 1, 0, 1, launcher="none")
    child = Reader(environ, Options())
    if child.has("TRAINER_AGENT_PID", *_PLAIN):
        return _sign(child, read_agent_child(child))
    described = options.launcher in ("agent", "spawn")
    reader = Reader({} if described else _drop_shell_step(environ), options)
    place = _ask_options(reader, options.launcher) if described else _ask_launchers(reader, options.launcher)
    _check_local_rank(reader, place)
    return _sign(reader, place)


def _sign(reader: Reader, place: Rank | Node) -> Rank | Node:
    return dataclasses.replace(place, found=tuple(reader.found), warnings=tuple(reader.warnings))


def _drop_shell_step(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Drop the step id of a shell in an allocation: what is started there by hand has no peers to wait for."""
    if environ.get("SLURM_STEP_ID", "").strip() not in _SHELL_STEPS:
        return environ
    return {name: value for name, value in environ.items() if name != "SLURM_STEP_ID"}


def _ask_launchers(reader: Reader, launcher: str) -> Rank | Node:
    asked = RECOGNISERS if launcher == "auto" else {launcher: RECOGNISERS[launcher]}
    if "torchrun" in asked and reader.has("TORCHELASTIC_RUN_ID") and not reader.has(*_PLAIN):
        raise _half_set(reader, ("TORCHELASTIC_RUN_ID", *_PLAIN))
    for recogniser in asked.values():
        for needs in recogniser.needs:
            if reader.has(*needs):
                reader.use(*needs)
                return recogniser.read(reader)
    if launcher != "auto":
        missing = " or ".join(", ".join(reader.missing(*needs)) for needs in RECOGNISERS[launcher].needs)
        raise SettingError(
            f"--launcher {launcher}, but not set: {missing}; start by {launcher}, or use --launcher auto"
        )
    if not reader.has("--nnodes"):  # the option says all that a half-set variable leaves open
        _check_groups(reader)
    return _ask_options(reader, "agent")


def _ask_options(reader: Reader, launcher: str) -> Node:
    return read_node(reader, launcher, nodes_name=reader.first("--nnodes"))


def _check_groups(reader: Reader) -> None:
    """Refuse half a launch; WORLD_SIZE alone and a lone JOB_COMPLETION_INDEX are met in practice and only warned about."""
    for group in _GROUPS:
        there = [name for name in group if reader.has(name)]
        if there == ["WORLD_SIZE"]:
            reader.warnings.append(
                "WORLD_SIZE is set, but neither RANK nor MASTER_ADDR: passed over, this node trains alone"
            )
        elif there:
            raise _half_set(reader, group)
    if reader.has("JOB_COMPLETION_INDEX"):
        reader.warnings.append("JOB_COMPLETION_INDEX is set, but PET_NNODES is not: this pod trains alone")


def _half_set(reader: Reader, group: tuple[str, ...]) -> SettingError:
    missing = reader.missing(*group)
    there = ", ".join(f"{name}={reader.text(name)}" for name in group if name not in missing)
    return SettingError(
        f"half-set launch variables: {there} set, but not {', '.join(missing)}; "
        "unset them for a single process, set the others, or use --launcher agent or none"
    )


def _check_local_rank(reader: Reader, place: Rank | Node) -> None:
    """Hold the legacy launcher's argument against what was found."""
    given = reader.number("--local-rank")
    if given is None:
        return
    if isinstance(place, Node):
        raise SettingError(
            f"--local-rank is {given}, but no launcher made this process a rank (RANK and WORLD_SIZE); drop the argument"
        )
    if given != place.local_rank:
        raise SettingError(
            f"--local-rank is {given}, but what {place.launcher} set says {place.local_rank}; drop the argument"
        )
