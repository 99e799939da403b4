"""LeaseClock: the time by which clients' leases run out."""


class LeaseClock:
    """Seconds, in which a client that kept sending would have been heard.

    It stands still while the engine process is stopped, suspended with its machine, or does not read its socket: that
    is not the clients' silence. tick: the longest step it makes between two readings, in seconds.
    """

    def __init__(self, tick: float, now: float) -> None:
        self.tick = tick
        self.time = 0.0
        self._last = now

    def advance(self, now: float, *, has_read: bool) -> None:
        """has_read: everything that had arrived by `now` was read."""
        if has_read:
            self.time += min(now - self._last, self.tick)
        self._last = now
