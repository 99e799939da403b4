"""The CPU use of this process tree and of the rest of the machine, from /proc; and waiting until the machine is quiet.

Other processes on the machine make a measurement worthless: if one of two cores is taken, an engine may fall to a
twentieth of its speed. So every run notes the CPU time of others.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_QUIET_SHARE = 0.08  # of one core, used by other processes
_PROBE_S = 0.5


class CpuUse(NamedTuple):
    """CPU seconds so far."""

    busy: float  # of the whole machine
    steal: float  # taken by the hypervisor
    ours: float  # of this process tree, including ended children
    by_process: dict[int, tuple[str, float]]  # pid -> name, seconds; of this process tree


def cpu_use() -> CpuUse:
    """Return the CPU seconds of the machine and of this process tree so far."""
    fields = [int(word) for word in _read("/proc/stat").split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    ours = 0.0
    by_process = {}
    for pid in process_tree():
        with contextlib.suppress(OSError):
            name, stat = _read_stat(pid)
            own, ended_children = int(stat[11]) + int(stat[12]), int(stat[13]) + int(stat[14])
            ours += (own + ended_children) / _TICKS_PER_S
            by_process[pid] = (name, own / _TICKS_PER_S)
    return CpuUse((user + nice + system + irq + softirq) / _TICKS_PER_S, steal / _TICKS_PER_S, ours, by_process)


def cpu_by_process(before: CpuUse, after: CpuUse) -> dict[str, float]:
    """Return the CPU seconds between two readings: of this process as "client", of the others summed by name."""
    seconds: dict[str, float] = {}
    for pid, (name, total) in after.by_process.items():
        used = total - before.by_process.get(pid, (name, 0.0))[1]
        key = "client" if pid == os.getpid() else f"engine ({name})"
        if used >= 0.01:
            seconds[key] = round(seconds.get(key, 0.0) + used, 2)
    return seconds


def foreign_cpu(before: CpuUse, after: CpuUse) -> float:
    """Return the CPU seconds that processes outside this tree took between two readings."""
    return max(0.0, (after.busy - before.busy) - (after.ours - before.ours))


def wait_until_quiet(limit_s: float) -> None:
    """Wait until other processes use little of the machine, at most limit_s seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before, begin = cpu_use(), time.monotonic()
        time.sleep(min(_PROBE_S, limit_s))
        if foreign_cpu(before, cpu_use()) / (time.monotonic() - begin) < _QUIET_SHARE:
            return


def memory_mb() -> dict[str, int]:
    """Return peak resident set and current proportional set in MiB, summed over this process tree."""
    peak = proportional = 0  # KiB
    for pid in process_tree():
        with contextlib.suppress(OSError):
            peak += _kib(_read(f"/proc/{pid}/status"), "VmHWM:")
            proportional += _kib(_read(f"/proc/{pid}/smaps_rollup"), "Pss:")
    return {"peak_rss_mb": round(peak / 1024), "pss_mb": round(proportional / 1024)}


def seconds_since_process_start() -> float:
    """Return the seconds since the kernel started this process, to a clock tick (10 ms)."""
    _, stat = _read_stat(os.getpid())
    return float(_read("/proc/uptime").split()[0]) - int(stat[19]) / _TICKS_PER_S


def process_tree() -> list[int]:
    """Return the ids of this process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_read_stat(int(entry))[1][1]), []).append(int(entry))
    tree = [os.getpid()]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def _read(path: str) -> str:
    return Path(path).read_text()


def _read_stat(pid: int) -> tuple[str, list[str]]:
    """Return (name, fields from the third on) of proc(5)'s stat; a name may contain spaces and brackets."""
    head, tail = _read(f"/proc/{pid}/stat").rsplit(")", 1)
    return head.split("(", 1)[1], tail.split()


def _kib(text: str, key: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)
