"""Watchdog: whether an engine hangs, from what its black box says. It has no clock of its own."""

from frontend.engine.signs import DEFAULT_HANG_S, describe_silence, limit_s
from ipc.records.black_box import Reading


class Watchdog:
    """The time for which an engine has shown no sign of life.

    least_s: seconds without a sign that are never too long; 0 = nothing ever is. Only time in which this process ran is
    counted: a machine that was suspended, or a supervisor that got no CPU, accuses no engine.
    """

    def __init__(self, least_s: float = DEFAULT_HANG_S, longest_look_s: float = 1.0) -> None:
        self.text = ""  # of the last alarm, for people
        self._least_s = least_s
        self._longest_look_s = longest_look_s  # counted for one look, however long ago the last one was
        self._last: Reading | None = None
        self._looked_at = 0.0
        self._still_s = 0.0

    def look(self, reading: Reading, now: float) -> bool:
        """Return whether the engine hangs. now: seconds; looks come several times a second."""
        if reading != self._last:
            self._still_s = 0.0
        else:
            self._still_s += min(max(0.0, now - self._looked_at), self._longest_look_s)
        self._last, self._looked_at = reading, now
        limit = limit_s(reading, self._least_s)
        if self._least_s <= 0 or self._still_s <= limit:
            return False
        self.text = describe_silence(reading, self._still_s, limit)
        self._still_s = 0.0
        return True
