"""usable_cpus: the number of CPUs that this process may use, by its affinity and the quotas of its control groups."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from ipc.machine.control_groups import control_groups


def usable_cpus() -> int:
    """Return the CPUs of the affinity mask, or the number of CPUs that the CPU quota allows, if that is smaller.

    A quota is rounded to the nearest whole number, at least 1. With more threads, all of them would stop in the middle
    of a step once the quota of a period is used up.
    """
    cpus = len(os.sched_getaffinity(0))
    quota = min(_quotas(), default=math.inf)
    return cpus if quota >= cpus else max(1, math.floor(quota + 0.5))


def _quotas() -> Iterator[float]:
    """Yield the quota of each control group that this process is in, in CPUs."""
    for folder, is_version_2 in control_groups("cpu"):
        found = _quota(folder) if is_version_2 else _quota_of_version_1(folder)
        if found is not None:
            yield found


def _quota(folder: Path) -> float | None:
    """Return the quota of a group of version 2, in CPUs; None if it has none: cpu.max is "max PERIOD" then."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_of_version_1(folder: Path) -> float | None:
    """Return the quota of a group of version 1, in CPUs; None if it has none. The quota is -1 then."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError):
        return None
