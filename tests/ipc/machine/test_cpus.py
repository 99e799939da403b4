"""The CPUs and the memory that a process may use: its affinity, and its control groups of both versions."""

import os
from pathlib import Path

import pytest

from ipc.machine import control_groups, cpus
from ipc.machine.memory import usable_memory_bytes


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight CPUs whose control groups are files."""
    monkeypatch.setattr(control_groups, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def test_without_control_groups_it_is_the_affinity(machine: Path) -> None:
    assert cpus.usable_cpus() == 8


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("140000 100000", 1), ("20000 100000", 1)],
)
def test_a_quota_is_rounded_and_at_least_one(machine: Path, quota: str, expected: int) -> None:
    (machine / "own").write_text("0::/\n")
    group(machine / "groups", cpu__max=quota)
    assert cpus.usable_cpus() == expected


def test_the_least_of_all_groups_above_counts(machine: Path) -> None:
    (machine / "own").write_text("0::/kubepods/pod\n")
    group(machine / "groups/kubepods", cpu__max="300000 100000")
    group(machine / "groups/kubepods/pod", cpu__max="2000000 100000")
    assert cpus.usable_cpus() == 3
    group(machine / "groups/kubepods", cpu__max="nonsense")
    assert cpus.usable_cpus() == 8


def test_version_1(machine: Path) -> None:
    (machine / "own").write_text("5:memory:/x\n4:cpu,cpuacct:/docker/a\n0::/\n")
    group(machine / "groups/cpu/docker/a", cpu__cfs_quota_us="500000", cpu__cfs_period_us="100000")
    assert cpus.usable_cpus() == 5
    group(machine / "groups/cpu/docker/a", cpu__cfs_quota_us="-1")
    assert cpus.usable_cpus() == 8


def test_memory_is_the_least_limit_of_all_groups_above(machine: Path) -> None:
    total = usable_memory_bytes()
    (machine / "own").write_text("0::/system.slice/engine.service\n")
    group(machine / "groups/system.slice/engine.service", memory__max="max")
    assert usable_memory_bytes() == total
    group(machine / "groups/system.slice", memory__max="800000000")
    assert usable_memory_bytes() == 800_000_000
    group(machine / "groups/system.slice/engine.service", memory__max="700000000")
    assert usable_memory_bytes() == 700_000_000
    (machine / "own").write_text("0::/not/mounted/here\n")
    group(machine / "groups", memory__max="600000000")  # a container without a namespace of its own
    assert usable_memory_bytes() == 600_000_000


def test_memory_of_version_1(machine: Path) -> None:
    total = usable_memory_bytes()
    (machine / "own").write_text("5:memory:/docker/a\n4:cpu,cpuacct:/x\n0::/\n")
    group(machine / "groups/memory", memory__limit_in_bytes="9223372036854771712")
    assert usable_memory_bytes() == total
    group(machine / "groups/memory/docker/a", memory__limit_in_bytes="838860800")
    assert usable_memory_bytes() == 800 << 20
