"""StoppedProcess: whether a process that starts is stopped by a signal, so that it would never report."""

from pathlib import Path

LIMIT_S = 5.0  # as long as a running engine may show no sign of life
LOOK_S = 1.0  # between looks


class StoppedProcess:
    """The time for which a process is stopped (SIGSTOP, SIGTSTP). A debugger's stops are not counted.

    Only time in which this process looked is counted: Ctrl-Z stops both, and accuses nobody.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._looked_at: float | None = None
        self._stopped_s = 0.0

    def look(self, now: float) -> bool:
        """Return whether it has been stopped for too long. now: monotonic seconds."""
        since, self._looked_at = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * LOOK_S), now
        try:
            is_stopped = self._stat.read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False
        self._stopped_s = self._stopped_s + since if is_stopped else 0.0
        return self._stopped_s > LIMIT_S
