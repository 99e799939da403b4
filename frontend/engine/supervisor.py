"""Supervisor: what is done about an engine that starts, dies and hangs, as a state machine without clock and processes.

frontend/engine/supervised_engine.py tells it what happens, does what it says, and tests play both. Times: seconds of
any clock that only grows.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from frontend.engine.death import Cause, Death
from frontend.engine.poison_hunt import PoisonHunt
from frontend.engine.restart_policy import RestartPolicy, RestartRules
from ipc.black_box import Suspect

_RESUME_S = 2.0  # for clients to come back to an engine that died while it was draining, before it drains again


class State(Enum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to be started again"
    ENDED = "ended for good"


class Supervisor:
    """The life of one engine over all its processes."""

    def __init__(self, rules: RestartRules) -> None:
        self.state = State.STARTING
        self.text = ""  # of the last death, for people
        self.num_deaths = 0
        self.restarts: Counter[Cause] = Counter()  # by the cause of the death before
        self.hunt = PoisonHunt()
        self._policy = RestartPolicy(rules)
        self._start_at = 0.0  # in WAITING
        self._is_draining = False
        self._drain_at: float | None = None  # the engine died while it was draining, and is to drain again

    def on_start(self) -> None:
        """Note that a process begins to start."""
        self.state = State.STARTING

    def on_ready(self, now: float) -> None:
        """Note that the engine answers."""
        self.state = State.READY
        if self._is_draining:
            self._drain_at = now + _RESUME_S

    def on_drain(self) -> None:
        """Note that the engine was told to drain: its next end is the last, unless something else causes it."""
        self._is_draining = True

    def on_death(self, death: Death, now: float, suspects: Sequence[Suspect] = ()) -> None:
        """Decide what follows a death: WAITING or ENDED. suspects: the rows of its unfinished steps."""
        self.text = death.text
        self._drain_at = None
        if death.cause is not Cause.ENDED:
            self.num_deaths += 1
        is_free = self.hunt.on_death(death.cause, list(suspects), now)
        verdict = self._policy.on_death(death, now, is_free=is_free)
        if verdict.delay_s is None:
            self.state, self.text = State.ENDED, verdict.text
        else:
            self.state, self._start_at = State.WAITING, now + verdict.delay_s
            self.restarts[death.cause] += 1

    def start_in_s(self, now: float) -> float:
        """Return the seconds until the next start is due, in WAITING."""
        return max(0.0, self._start_at - now)

    def take_drain(self, now: float) -> bool:
        """Return whether the engine is to be told to drain now; True once."""
        is_due = self._drain_at is not None and now >= self._drain_at
        if is_due:
            self._drain_at = None
        return is_due
