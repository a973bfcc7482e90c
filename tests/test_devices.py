"""trainer.devices: visible GPUs (the GPUs are made up, the rules are CUDA's), usable CPUs from real files, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.codes import SETTING, SettingError
from trainer.devices import (
    check_processes,
    cuda_facts,
    device_index,
    physical_devices,
    thread_count,
    usable_cpus,
    visible_devices,
)

ROOT = Path(__file__).resolve().parent.parent
HOST = tuple(f"GPU-{letter}{letter}000000-0000-4000-8000-00000000000{place}" for place, letter in enumerate("abcdef"))
MIG = ("MIG-11111111-2222-5333-8444-555555555555", "MIG-11111111-2222-5333-8444-666666666666")

VISIBLE = [
    (None, HOST),
    ("", ()),
    (" ", ()),
    ("1,0", (HOST[1], HOST[0])),
    ("1, 2 ,3,4", HOST[1:5]),
    ("-1", ()),
    ("0,-1,1", HOST[:1]),
    ("0,6,1", HOST[:1]),
    ("junk", ()),
    ("0,junk,1", HOST[:1]),
    ("2,2", ()),
    ("0,,1", HOST[:1]),
    (f"{HOST[3]},{HOST[0]}", (HOST[3], HOST[0])),
    ("GPU-cc,GPU-aa", (HOST[2], HOST[0])),
    ("GPU-", ()),
    ("GPU-ff,GPU-99,GPU-aa", HOST[5:]),
    (f"{HOST[3]},GPU-dd", ()),
    (MIG[0], MIG[:1]),
    (",".join(MIG), MIG),
]


@pytest.mark.parametrize(("visible", "devices"), VISIBLE)
def test_visible_devices_follow_cuda(visible: str | None, devices: tuple[str, ...]) -> None:
    assert visible_devices(visible, physical=lambda: HOST) == devices


@pytest.mark.parametrize("visible", [None, "", "0", HOST[0], MIG[0]])
def test_without_a_driver_nothing_is_visible_whatever_the_variable_says(visible: str | None) -> None:
    assert visible_devices(visible, physical=tuple) == ()


@pytest.mark.parametrize("processes", [2, 4, 5])
def test_a11_each_process_has_its_own_device_or_none_starts(processes: int) -> None:
    visible = "1,2,3,4"
    devices = visible_devices(visible, physical=lambda: HOST)
    if processes == 5:
        with pytest.raises(SettingError) as caught:
            check_processes(processes, devices=len(devices), visible=visible)
        line = str(caught.value)
        words = ("5 processes", "4 visible devices", "CUDA_VISIBLE_DEVICES=1,2,3,4", "--nproc-per-node 4")
        assert [word for word in words if word not in line] == []
        assert (caught.value.code, "\n" in line) == (SETTING, False)
    else:
        check_processes(processes, devices=len(devices), visible=visible)
        indices = [device_index(local_rank, len(devices)) for local_rank in range(processes)]
        assert indices == list(range(processes))
        assert [devices[index] for index in indices] == list(HOST[1 : 1 + processes])


def test_a11_the_sentence_fits_a_node_without_devices() -> None:
    with pytest.raises(
        SettingError, match=r"2 processes .* 0 visible devices \(CUDA_VISIBLE_DEVICES is not set\); use --device cpu"
    ):
        check_processes(2, devices=0, visible=None)


def test_a11_one_visible_device_is_index_0_for_every_local_rank() -> None:
    assert [device_index(local_rank, 1) for local_rank in (0, 3)] == [0, 0]


@pytest.mark.parametrize(("local_rank", "count"), [(2, 2), (7, 4), (0, 0)])
def test_a11_a_local_rank_is_never_wrapped_around(local_rank: int, count: int) -> None:
    with pytest.raises(SettingError, match=f"local rank {local_rank} .* {count} are visible; .*--nproc-per-node"):
        device_index(local_rank, count)


def test_a11_cuda_facts_say_which_driver_or_why_none() -> None:
    facts = cuda_facts()
    assert facts.startswith("NVIDIA driver " if physical_devices() else ("NVIDIA driver ", "no NVIDIA driver ("))
    assert "\n" not in facts


def test_a11_without_the_nvml_package_there_is_no_gpu() -> None:
    code = "import sys; sys.modules['pynvml'] = None; from trainer.devices import *; print(physical_devices(), cuda_facts())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("() no NVIDIA driver (the Python package nvidia-ml-py is not installed)")


def group(tmp_path: Path, line: str, **files: str) -> dict[str, Path]:
    """Write a cgroup tree; in a file's name __ stands for / and _ in `cpu_max` for the dot."""
    own = tmp_path / "cgroup"
    own.write_text(line + "\n")
    root = tmp_path / "sys"
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("cpu_", "cpu.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root.mkdir(exist_ok=True)
    return {"root": root, "own": own}


@pytest.mark.parametrize(
    ("limit", "cpus"),
    [
        ("150000 100000", 1),
        ("200000 100000\n", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("max 100000", 8),
        ("max", 8),
        ("junk", 8),
        ("", 8),
        ("-1 100000", 8),
        ("100000 0", 8),
        ("1 2 3", 8),
        ("\xb2 100000", 8),
    ],
)
def test_a24_usable_cpus_are_the_smaller_of_mask_and_quota(tmp_path: Path, limit: str, cpus: int) -> None:
    assert usable_cpus(affinity=8, **group(tmp_path, "0::/", cpu_max=limit)) == cpus


def test_a24_one_allowed_cpu_is_one_whatever_the_quota(tmp_path: Path) -> None:
    assert usable_cpus(affinity=1, **group(tmp_path, "0::/", cpu_max="400000 100000")) == 1


def test_a24_a_parent_group_limits_too(tmp_path: Path) -> None:
    where = group(tmp_path, "0::/a/b", a__b__cpu_max="max 100000", a__cpu_max="300000 100000")
    assert usable_cpus(affinity=8, **where) == 3


@pytest.mark.parametrize("path", ["/kubepods/pod1/host-path-that-is-not-mounted", "/../../other"])
def test_a24_a_path_of_the_host_falls_back_to_the_top_of_the_mount(tmp_path: Path, path: str) -> None:
    assert usable_cpus(affinity=8, **group(tmp_path, f"0::{path}", cpu_max="200000 100000")) == 2


@pytest.mark.parametrize("quota", ["250000", "-1"])
def test_a24_version_1_groups_are_read(tmp_path: Path, quota: str) -> None:
    lines = "5:memory:/m\n3:cpu,cpuacct:/a\n0::/"
    files = {"cpu,cpuacct__a__cpu_cfs_quota_us": quota, "cpu,cpuacct__a__cpu_cfs_period_us": "100000"}
    assert usable_cpus(affinity=8, **group(tmp_path, lines, **files)) == (2 if quota == "250000" else 8)


def test_a24_no_cgroup_at_all_is_no_limit(tmp_path: Path) -> None:
    assert usable_cpus(affinity=6, root=tmp_path, own=tmp_path / "absent") == 6


def test_a24_the_mask_of_this_process_is_asked(tmp_path: Path) -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from trainer import devices; print(devices.usable_cpus())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert usable_cpus(root=tmp_path, own=tmp_path / "absent") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("user", "threads"),
    [("3", 3), ("4,2", 4), (" 2 ", 2), ("64", 64), (None, 2), ("", 2), ("0", 2), ("-1", 2), ("many", 2), ("2x", 2)],
)
def test_a24_the_users_thread_count_is_kept_else_the_cpus_are_shared(user: str | None, threads: int) -> None:
    assert thread_count(4, user=user, cpus=8) == threads


def test_a24_every_rank_has_at_least_one_thread() -> None:
    assert [thread_count(ranks, user=None, cpus=3) for ranks in (1, 2, 3, 4, 8)] == [3, 1, 1, 1, 1]


def test_torch_is_not_imported() -> None:
    code = "import sys, trainer.devices, trainer.launch; sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
