"""trainer.launch.hostlist: Slurm's short forms of hosts and of tasks per node."""

from __future__ import annotations

import pytest

from trainer.codes import SettingError
from trainer.launch import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu07", ["gpu07"]),
        ("gpu[07-08,11]", ["gpu07", "gpu08", "gpu11"]),
        ("a[001-003,7],b1", ["a001", "a002", "a003", "a7", "b1"]),
        ("rack1-[1-2]-n[1-3]", [f"rack1-{row}-n{place}" for row in (1, 2) for place in (1, 2, 3)]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[1-2].lab,m", ["n1.lab", "n2.lab", "m"]),
    ],
)
def test_a_node_list_is_expanded_in_its_order(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a[1-", "a]1", "a[]", "a[x]", "a[2-1]", "a[1,]", "a,,b", "a,", "a b", "a[[1]]", "x" * 5000 + "["]
)
def test_a_malformed_node_list_is_one_line(text: str) -> None:
    with pytest.raises(SettingError, match=r"^SLURM_JOB_NODELIST is .*node list like"):
        expand_hosts(text, name="SLURM_JOB_NODELIST")


def test_tasks_per_node_are_expanded() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    assert expand_counts("4") == (4,)


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "2(x),1", "a", "1,,2", "-1"])
def test_malformed_tasks_per_node_are_one_line(text: str) -> None:
    with pytest.raises(SettingError, match=r"^SLURM_STEP_TASKS_PER_NODE is .*like 2\(x3\),1"):
        expand_counts(text)
