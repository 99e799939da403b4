"""World: virtual time, the seeded choices made while it passes, the log of events, and where the engine is."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.engine_process import EngineProcess

MS = 1_000_000  # ns
_CALLS_PER_LOOK = 8
_MAX_CALLS = 100_000  # a run has some hundreds


class Failure(AssertionError):
    """A promise that the system under test broke."""


class World:
    """One queue of future calls; the clock jumps from one to the next. Calls due at one time run in the order in which
    they were entered, so a run is a function of its seed.

    census: how often each kind of event happened, for tests that the simulator reaches it.
    """

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.random = random.Random(seed)
        self.now_ns = 1000 * MS
        self.engine: EngineProcess | None = None  # the one that listens; None between two
        self.census: Counter[str] = Counter()
        self.log: list[str] | None = [] if verbose else None
        self.duplicate_share = 0.0  # of frames that may arrive twice
        self.max_delay_ns = MS
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._num_entered = 0

    def seconds(self) -> float:
        """Return the time as clients and the border read it."""
        return self.now_ns / 1e9

    def at(self, time_ns: int, do: Callable[[], None]) -> None:
        """Call `do` at this time, or now where it has passed."""
        self._num_entered += 1
        heapq.heappush(self._queue, (max(time_ns, self.now_ns), self._num_entered, do))

    def after(self, delay_ns: int, do: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, do)

    def run_until(self, is_over: Callable[[], bool], limit_ns: int) -> bool:
        """Let time pass, and look now and then whether it is over; False when it took longer than limit_ns. Errors:
        Failure where time stands still."""
        end_ns = self.now_ns + limit_ns
        while not is_over():
            for _ in range(_CALLS_PER_LOOK):
                if not self._queue or self._queue[0][0] > end_ns:
                    return is_over()
                self.now_ns, _, do = heapq.heappop(self._queue)
                do()
            if self._num_entered > _MAX_CALLS:
                raise Failure(f"{_MAX_CALLS} calls within {(self.now_ns - end_ns + limit_ns) / MS} ms: a loop")
        return True

    # --- choices ---

    def delay(self) -> int:
        """Draw how long a frame or a wake-up takes, ns."""
        return int(self.random.random() ** 3 * self.max_delay_ns)

    def chance(self, share: float) -> bool:
        return share > 0 and self.random.random() < share

    # --- what happened ---

    def note(self, text: str, *values: object) -> None:
        """Log an event; the text is formatted only where somebody reads the log."""
        if self.log is not None:
            self.log.append(f"{(self.now_ns - 1000 * MS) / MS:9.3f} ms  {text.format(*values)}")

    def count(self, kind: str) -> None:
        self.census[kind] += 1
