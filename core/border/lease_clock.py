"""LeaseClock: the clock that measures clients' leases."""


class LeaseClock:
    """Counts the seconds in which a client's message would have been read.

    The clock stops while the engine process is stopped, is suspended with its machine, or does not read its socket,
    because that silence is not the clients' fault. tick: the most that it advances between two readings, in seconds.
    """

    def __init__(self, tick: float, now: float) -> None:
        self.tick = tick
        self.time = 0.0
        self._last = now

    def advance(self, now: float, *, has_read: bool) -> None:
        """Advance the clock to `now`. has_read: everything that had arrived by `now` was read."""
        if has_read:
            self.time += min(now - self._last, self.tick)
        self._last = now
