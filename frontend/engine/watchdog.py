"""Watchdog: whether an engine hangs, from what its black box says. It has no clock of its own."""

from ipc.black_box import Reading

DEFAULT_HANG_S = 5.0
_SLOWER = 20  # times a step may be slower than any recent one of its size
_FIRST_S = 300.0  # for the first steps of all, of which nothing is known
_IDLE_S = 5.0  # core/process/loop.py: an engine with nothing to do shows so often that it lives
_NS = 1e-9


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
        limit_s = self._limit_s(reading)
        if self._least_s <= 0 or self._still_s <= limit_s:
            return False
        what = f"its step {reading.num_begun} has not ended" if reading.is_in_step else "its loop does not turn"
        self.text = f"{what} for {self._still_s:.1f} s; the limit is {limit_s:.1f} s"
        self._still_s = 0.0
        return True

    def _limit_s(self, reading: Reading) -> float:
        if reading.epoch < 0:
            return _FIRST_S
        if not reading.is_in_step:
            return _IDLE_S + self._least_s
        return max(self._least_s, _SLOWER * reading.expected_ns * _NS) if reading.expected_ns else _FIRST_S
