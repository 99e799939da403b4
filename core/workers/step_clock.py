"""StepClock: how long a step may run before its workers count as hung, judged by earlier steps. It reads no clock."""

from core.execution.executor import WARM_UP_TOKENS

#: No step counts as hung before this time in seconds. It is less than the engine's owner waits
#: (frontend/engine/signs.py), so that the workers are restarted and not the engine.
LEAST_S = 3.0
_SLOWER = 15  # how many times slower than any earlier step of its size a step may be
_FIRST_S = 120.0  # if nothing is known


class StepClock:
    """The slowest step of each size, by powers of two of their tokens. warm_up_ns: 0 = unknown."""

    def __init__(self, warm_up_ns: int) -> None:
        self._slowest_s: dict[int, float] = {}
        if warm_up_ns:
            self._slowest_s[WARM_UP_TOKENS.bit_length()] = warm_up_ns * 1e-9

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record a step that has ended."""
        size = num_tokens.bit_length()
        if seconds > self._slowest_s.get(size, 0.0):
            self._slowest_s[size] = seconds

    def limit_s(self, num_tokens: int) -> float:
        """Return the time limit in seconds for a step with num_tokens tokens.

        Unknown sizes are judged by the others.
        """
        size = num_tokens.bit_length()
        known = [seconds * 2.0 ** max(0, size - other) for other, seconds in self._slowest_s.items()]
        return max(LEAST_S, _SLOWER * max(known)) if known else _FIRST_S
