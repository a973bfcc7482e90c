"""What this process may use of its host: visible GPUs (by NVML), its own GPU's index, usable CPUs, threads per rank.

No torch here, so that the agent can ask before any rank exists. CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS come as
arguments. Which device a rank trains on is decided in `group.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.codes import SettingError


class _NoDriver(Exception):
    """Say why NVML does not answer: no package, no library, no driver, or a driver of another version."""


@contextlib.contextmanager
def _open_nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise _NoDriver("the Python package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise _NoDriver(str(error)) from None


def _ask_gpus(question: str, nvml: Any) -> tuple[str, ...]:
    answers = []
    for index in range(nvml.nvmlDeviceGetCount()):
        # NVML counts GPUs that this container or cgroup may not open; CUDA leaves those out, and numbers the others.
        with contextlib.suppress(nvml.NVMLError):
            answers.append(str(getattr(nvml, question)(nvml.nvmlDeviceGetHandleByIndex(index))))
    return tuple(answers)


def physical_devices() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process may open, in NVML's (PCI) order; none without a driver."""
    try:
        with _open_nvml() as nvml:
            return _ask_gpus("nvmlDeviceGetUUID", nvml)
    except _NoDriver:
        return ()


def cuda_facts() -> str:
    """Say in a few words which driver and GPUs there are, or why there are none."""
    try:
        with _open_nvml() as nvml:
            names = _ask_gpus("nvmlDeviceGetName", nvml)
            return f"NVIDIA driver {nvml.nvmlSystemGetDriverVersion()}, GPUs: {', '.join(names) or 'none'}"
    except _NoDriver as error:
        return f"no NVIDIA driver ({error})"


def visible_devices(
    visible: str | None, *, physical: Callable[[], Sequence[str]] = physical_devices
) -> tuple[str, ...]:
    """Return one entry per device that CUDA will show to this process, in the order of its indices.

    The rules are CUDA's: an index, a UUID or the unique start of one per entry; the list ends at the first entry that is
    no device (-1 by custom); a device named twice leaves none. MIG instances are taken as they are named.

    Args:
        visible: CUDA_VISIBLE_DEVICES as it is set (an empty text hides every GPU), or None for all GPUs.
        physical: the UUIDs of the host's GPUs; () without a driver, and then nothing is visible.
    """
    uuids = tuple(physical())
    if visible is None or not uuids:
        return uuids
    chosen: list[str] = []
    for entry in visible.split(","):
        device = _find_device(entry.strip(), uuids)
        if device is None:
            break
        if device in chosen:
            return ()
        chosen.append(device)
    return tuple(chosen)


def _find_device(entry: str, uuids: Sequence[str]) -> str | None:
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [uuid for uuid in uuids if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match("[0-9]{1,9}", entry)  # CUDA reads as far as it is a number
    return uuids[int(number[0])] if number and int(number[0]) < len(uuids) else None


def device_index(local_rank: int, count: int) -> int:
    """Return the index of this rank's GPU among `count` visible ones: 0 if it sees only one, else its local rank.

    Raises:
        SettingError: more local ranks than visible devices. Taking the rest of a division would hide that mistake.
    """
    if count == 1:
        return 0
    if local_rank >= count:
        raise SettingError(
            f"local rank {local_rank} has no device of its own: {count} are visible; "
            f"start at most {count} processes here (--nproc-per-node), or use --device cpu"
        )
    return local_rank


def check_processes(processes: int, *, devices: int, visible: str | None) -> None:
    """Refuse to start more processes on this node than it has visible devices; to be asked only when training on GPUs.

    Raises:
        SettingError: with both numbers, CUDA_VISIBLE_DEVICES, and the option to change.
    """
    if processes <= devices:
        return
    setting = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    remedy = f"use --nproc-per-node {devices}, or make more devices visible" if devices else "use --device cpu"
    raise SettingError(f"{processes} processes on this node, but {devices} visible devices ({setting}); {remedy}")


def usable_cpus(
    *, affinity: int | None = None, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Return how many CPUs this process may keep busy: its affinity mask, or the cgroup's quota if that is smaller.

    A quota of one and a half CPUs counts as one, less than one as one: a thread too many is throttled with the others.
    os.cpu_count() is the host's, and no limit of a container.

    Args:
        affinity: number of CPUs in the mask; None asks the kernel.
        root: where the cgroup hierarchies are mounted.
        own: the file that names this process's groups.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _group_folders(root, own) for quota in _read_quotas(folder)]
    return max(1, min([affinity, *(int(quota) for quota in quotas)]))


def _group_folders(root: Path, own: Path) -> Iterator[Path]:
    """Give the folders of this process's cgroup and of its parents, whose limits hold as well.

    In a container the path may be the host's, which is not mounted there; its own group then is the mount's top.
    """
    for line in (_read_text(own) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for top in {root / controllers, root / "cpu"} if controllers else (root,):  # version 1, version 2
            parts = PurePosixPath(path.lstrip("/")).parts
            parts = () if ".." in parts else parts
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _read_quotas(folder: Path) -> Iterator[float]:
    """Give the quota of one cgroup in CPUs; nothing where there is no limit, or none that can be understood."""
    limit = (_read_text(folder / "cpu.max") or "").split()
    if not limit:
        limit = [_read_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if len(limit) == 2 and all(re.fullmatch("0*[1-9][0-9]{0,15}", word.strip()) for word in limit):
        yield int(limit[0]) / int(limit[1])


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def thread_count(local_ranks: int, *, user: str | None, cpus: int) -> int:
    """Return the threads of each rank's CPU kernels: the user's OMP_NUM_THREADS, else an equal share of the CPUs.

    Args:
        local_ranks: ranks on this node.
        user: OMP_NUM_THREADS as it is set; of `4,2` the first number counts, and what is no number > 0 is passed over.
        cpus: from `usable_cpus`.
    """
    number = re.match(r"\s*0*([1-9][0-9]{0,5})\s*(,|$)", user or "")
    return int(number[1]) if number else max(1, cpus // local_ranks)
