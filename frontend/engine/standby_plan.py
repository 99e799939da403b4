"""StandbyPlan: when a standby engine is started and taken, as a state machine without clock and processes.

A standby is a second engine process that is ready to become the engine if the present one dies. It only saves time: if
it fails, the engine keeps running, and without a standby a normal start still works.
"""

from collections import deque
from enum import Enum

from frontend.engine.death import Cause

_AFTER_S = 1.0  # after the engine is ready: returning streams get the machine first
_DELAYS_S = (1.0, 5.0, 30.0, 120.0)  # after the end of a standby, by the number of ends within _WITHIN_S
_WITHIN_S = 600.0


class StandbyKind(Enum):
    """How far a standby is prepared."""

    NO = "no"  # there is none
    IMPORT = "import"  # it has imported what it needs
    MODEL = "model"  # it has also loaded the model and has a KV cache


class StandbyState(Enum):
    """The state of the standby."""

    NONE = "none"
    PREPARING = "preparing"
    PREPARED = "prepared"


class StandbyPlan:
    """The standbys of one engine. is_wanted: False = there is none. Times: seconds of any clock that only grows."""

    def __init__(self, *, is_wanted: bool) -> None:
        self.state = StandbyState.NONE
        self.num_taken = 0
        self._is_wanted = is_wanted
        self._due_at: float | None = None  # while the engine runs, and there is none
        self._ends: deque[float] = deque()  # times of ends of standbys

    def on_engine_ready(self, now: float) -> None:
        """Note that the engine answers: it may have a standby from now on."""
        if self.state is StandbyState.NONE:
            self._due_at = max(self._due_at or 0.0, now + _AFTER_S)

    def on_last_use(self) -> None:
        """Note that no further engine will follow: no more standbys are started."""
        self._is_wanted = False

    def is_due(self, now: float) -> bool:
        """Return whether to start a standby now."""
        is_missing = self._is_wanted and self.state is StandbyState.NONE
        return is_missing and self._due_at is not None and now >= self._due_at

    def on_begin(self) -> None:
        """Note that a standby's process has started."""
        self.state = StandbyState.PREPARING

    def on_prepared(self) -> None:
        """Note that it waits to be taken."""
        self.state = StandbyState.PREPARED

    def on_end(self, now: float) -> None:
        """Note that it has ended, could not be started, or did not take over. The delay before the next one grows."""
        while self._ends and now - self._ends[0] >= _WITHIN_S:
            self._ends.popleft()
        self._due_at = now + _DELAYS_S[min(len(self._ends), len(_DELAYS_S) - 1)]
        self._ends.append(now)
        self.state = StandbyState.NONE

    def take(self, cause: Cause) -> bool:
        """Return whether the standby becomes the next engine. cause: of the death of the one before.

        A standby that is not ready is not waited for. One from before an upgrade is not taken, because its code and
        files may be old. The caller ends both.
        """
        is_taken = self.state is StandbyState.PREPARED and cause is not Cause.RESTART
        self.state = StandbyState.NONE
        self.num_taken += is_taken
        self._due_at = None
        return is_taken
