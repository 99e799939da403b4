"""Placement: the CPUs of each rank of a group: those of one NUMA node, whose memory then holds the rank's weights."""

import os
from pathlib import Path

from ipc.machine.cpus import usable_cpus

_NODES = Path("/sys/devices/system/node")


def numa_nodes() -> list[set[int]]:
    """Return the CPUs of each NUMA node of this machine; empty where the system does not tell."""
    files = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    return [cpus for file in files if (cpus := parse_cpus(file.read_text()))]


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as "0-3,8,10-11"."""
    cpus = set[int]()
    for part in text.split(","):
        if part.strip():
            first, _, last = part.strip().partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def cpus_of(rank: int, size: int, nodes: list[set[int]], usable: set[int]) -> set[int]:
    """Return the CPUs that a rank is bound to: neighbouring ranks share a node where there are fewer nodes than ranks.

    nodes: the CPUs of each. usable: those that this process may use. With one usable node, all of them.
    """
    there = [cpus & usable for cpus in nodes if cpus & usable]
    if len(there) < 2:
        return usable
    first = rank * len(there) // size
    last = max(first + 1, (rank + 1) * len(there) // size)
    return set[int]().union(*there[first:last])


def bind(number: int, count: int) -> int:
    """Bind this process, one of so many workers, to its CPUs, and return how many threads it should have.

    The workers on one node divide its CPUs, and a quota of CPU time, between them.
    """
    usable = os.sched_getaffinity(0)
    share = max(1, usable_cpus() // count)
    own = cpus_of(number, count, numa_nodes(), usable)
    if own != usable:
        os.sched_setaffinity(0, own)
    return min(share, len(own))
