"""StandbyPlan: when a standby engine is made and taken, as a state machine without clock and processes.

A standby is a second engine process that is prepared to become the engine when the present one dies. It is a help and
no more: whatever happens to it, the engine runs on, and is started the long way where no standby is there.
"""

from collections import deque
from enum import Enum

from frontend.engine.death import Cause

_AFTER_S = 1.0  # from the engine's readiness on: streams that come back have the machine first
_DELAYS_S = (1.0, 5.0, 30.0, 120.0)  # after the end of a standby, by the number of ends within _WITHIN_S
_WITHIN_S = 600.0


class StandbyKind(Enum):
    """How far a standby is prepared."""

    NO = "no"  # there is none
    IMPORT = "import"  # it has imported what it needs
    MODEL = "model"  # it has loaded the model, too, and has a KV cache


class StandbyState(Enum):
    """Where the standby is in its life."""

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
        """Note that the engine answers: from now on it may have a standby."""
        if self.state is StandbyState.NONE:
            self._due_at = max(self._due_at or 0.0, now + _AFTER_S)

    def on_last_use(self) -> None:
        """Note that no further engine is to come: no standby is made any more."""
        self._is_wanted = False

    def is_due(self, now: float) -> bool:
        """Return whether a standby is to be made now."""
        is_missing = self._is_wanted and self.state is StandbyState.NONE
        return is_missing and self._due_at is not None and now >= self._due_at

    def on_begin(self) -> None:
        """Note that a standby's process begins."""
        self.state = StandbyState.PREPARING

    def on_prepared(self) -> None:
        """Note that it waits to be taken."""
        self.state = StandbyState.PREPARED

    def on_end(self, now: float) -> None:
        """Note that it has ended, or could not be made, or did not take over. The next comes later each time."""
        while self._ends and now - self._ends[0] >= _WITHIN_S:
            self._ends.popleft()
        self._due_at = now + _DELAYS_S[min(len(self._ends), len(_DELAYS_S) - 1)]
        self._ends.append(now)
        self.state = StandbyState.NONE

    def take(self, cause: Cause) -> bool:
        """Return whether the standby becomes the next engine. cause: of the death of the one before.

        One that is still being prepared is not waited for; nor is one taken that was prepared before an upgrade, whose
        code and files may be old. Neither is of use then, and the caller ends it.
        """
        is_taken = self.state is StandbyState.PREPARED and cause is not Cause.RESTART
        self.state = StandbyState.NONE
        self.num_taken += is_taken
        self._due_at = None
        return is_taken
