"""LifeSigns: whether an HTTP worker hangs, is loaded, or waits for a core. It reads no clock."""

import os
from typing import NamedTuple

#: CPU seconds that a worker may take without a turn of its loop: one that computes for longer has an endless loop.
MAX_BUSY_S = 60.0
#: Share of a sample's time: a process that computes for this share of it is working.
_AT_WORK = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Effort(NamedTuple):
    """A process's activity. cpu_s: CPU time taken so far. is_runnable: a thread of it runs or waits for a core."""

    cpu_s: float
    is_runnable: bool


class LifeSigns:
    """How long a worker has shown no sign of life.

    limit_s: seconds without a report and without computing, after which it hangs; 0 = never. A worker that computes, or
    that gets no core to compute on, is loaded: it is slow, and killing it would not help. But one that computes for
    MAX_BUSY_S without a report has an endless loop.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.silent_s = 0.0
        self._busy_s = 0.0
        self._cpu_s: float | None = None  # at the last sample

    def heard(self) -> None:
        """Note a report of the worker."""
        self.silent_s = self._busy_s = 0.0

    def look(self, seconds: float, effort: Effort) -> str:
        """Take the process's activity since the last sample; return why it counts as hung, "" if it does not."""
        worked = 0.0 if self._cpu_s is None else max(0.0, effort.cpu_s - self._cpu_s)
        self._cpu_s = effort.cpu_s
        self._busy_s += worked
        if not effort.is_runnable and worked < _AT_WORK * seconds:
            self.silent_s += seconds
        if not self._limit_s:
            return ""
        if self.silent_s > self._limit_s:
            return f"no sign of it for {self.silent_s:.1f} s"
        return f"its loop has not turned for {self._busy_s:.0f} s of CPU time" if self._busy_s > MAX_BUSY_S else ""


def effort_of(pid: int) -> Effort:
    """Return a process's activity; None for one that has ended."""
    ticks, is_runnable = 0, False
    try:
        ticks = sum(map(int, _fields(f"/proc/{pid}/stat")[11:13]))  # utime and stime
        tasks = os.listdir(f"/proc/{pid}/task")
        is_runnable = any(_fields(f"/proc/{pid}/task/{task}/stat")[0] == "R" for task in tasks)
    except OSError:
        pass
    return Effort(ticks / _TICKS_PER_S, is_runnable)


def _fields(path: str) -> list[str]:
    """Return the fields of a stat file from the state, after the name, which may have spaces."""
    with open(path) as file:
        return file.read().rpartition(")")[2].split()
