"""Bucket: a number of units a minute, used in a burst or evenly; it refills by its owner's clock."""

_MINUTE_S = 60.0


class Bucket:
    """`size` units a minute. now: monotonic seconds. The level falls below 0 if more was taken than was available."""

    def __init__(self, size: int, now: float) -> None:
        self.size = size
        self._level = float(size)
        self._at = now

    def level(self, now: float) -> float:
        """Return the available units."""
        self._level = min(self.size, self._level + (now - self._at) * self.size / _MINUTE_S)
        self._at = now
        return self._level

    def wait_s(self, count: float, now: float) -> float:
        """Return the seconds until `count` units are available; 0 = now."""
        missing = count - self.level(now)
        return max(0.0, missing * _MINUTE_S / self.size)

    def take(self, count: float, now: float) -> None:
        """Take units; a negative count gives some back."""
        self._level = min(self.size, self.level(now) - count)
