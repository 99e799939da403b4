"""RestartPolicy: whether and when an engine that has died is restarted. It reads no clock."""

from collections import deque
from typing import NamedTuple

from frontend.engine.death import Cause, Death


class RestartRules(NamedTuple):
    """Bounds of restarts.

    most: restarts within within_s seconds; 0 = a dead engine is not restarted. delays_s: seconds before the first of
    them, the second, and so on; the last one applies to all later ones.
    """

    most: int = 5
    within_s: float = 60.0
    delays_s: tuple[float, ...] = (0.0, 0.1, 0.5, 2.0, 5.0)


class Verdict(NamedTuple):
    """The decision after a death.

    delay_s: seconds until the next start; None = no restart, for the reason in `text`.
    """

    delay_s: float | None
    text: str = ""


class RestartPolicy:
    """The restarts of one engine so far, and the decision on the next.

    A death with a known cause, an upgrade or the search for a poison, is not counted: see `is_free`. A start that fails
    twice with the same error is not tried again, because the third would fail too.
    """

    def __init__(self, rules: RestartRules) -> None:
        self._rules = rules
        self._restarts: deque[float] = deque()  # times of the counted restarts
        self._failed_start = ""  # text of the last death, if that was a failed start

    def on_death(self, death: Death, now: float, *, is_free: bool = False) -> Verdict:
        """Decide what follows a death at the time `now`, in seconds. is_free: it does not count."""
        if death.cause is Cause.ENDED:
            return Verdict(None, death.text)
        if self._rules.most == 0:
            return Verdict(None, f"{death.text}; it is not restarted")
        if death.cause is Cause.START_FAILED:
            if death.text == self._failed_start:
                return Verdict(None, f"{death.text}; this happened twice, so it is not restarted")
            self._failed_start = death.text
        else:
            self._failed_start = ""
        if death.cause is Cause.RESTART or is_free:
            return Verdict(0.0)
        while self._restarts and now - self._restarts[0] >= self._rules.within_s:
            self._restarts.popleft()
        number = len(self._restarts)
        if number >= self._rules.most:
            return Verdict(
                None,
                f"{death.text}; it was restarted {number} times within {self._rules.within_s:g} s, which is the limit",
            )
        self._restarts.append(now)
        return Verdict(self._rules.delays_s[min(number, len(self._rules.delays_s) - 1)])
