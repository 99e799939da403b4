"""LeaseClock: the time that clients' leases are measured in."""


class LeaseClock:
    """The seconds in which a message of a client would have been read.

    The clock stands still while the engine process is stopped, is suspended with its machine, or does not read its
    socket, because that silence is not the clients'. tick: the longest step that it makes between two readings, in
    seconds.
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
