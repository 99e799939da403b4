"""Supervisor: decides what to do when an engine starts, dies or hangs, as a state machine without clock and processes.

frontend/engine/supervised_engine.py reports events to it and carries out its decisions; tests simulate both. Times:
seconds of any clock that only grows.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from frontend.engine.death import Cause, Death
from frontend.engine.poison_hunt import PoisonHunt
from frontend.engine.restart_policy import RestartPolicy, RestartRules
from frontend.engine.standby_plan import StandbyPlan
from ipc.records.black_box import Suspect

_RESUME_S = 2.0  # time for clients to come back to an engine that died while draining, before it drains again


class State(Enum):
    """The state of the engine."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to be restarted"
    ENDED = "ended, without a restart"


class Supervisor:
    """One engine across all its processes. has_standby: a second process is ready to take over."""

    def __init__(self, rules: RestartRules, *, has_standby: bool = False) -> None:
        self.state = State.STARTING
        self.text = ""  # of the last death, for people
        self.has_told = False  # the last process that ended has told its clients
        self.num_deaths = 0
        self.restarts: Counter[Cause] = Counter()  # by the cause of the preceding death
        self.hunt = PoisonHunt()
        self.standby = StandbyPlan(is_wanted=has_standby and rules.most > 0)
        self._policy = RestartPolicy(rules)
        self._start_at = 0.0  # in WAITING
        self._num_drains = 0
        self._last_cause = Cause.ENDED  # of the last death
        self._ready_at = 0.0
        self._drain_at: float | None = None  # the engine died while draining, and must drain again

    def on_start(self) -> None:
        """Note that a process starts."""
        self.state = State.STARTING

    def on_ready(self, now: float) -> None:
        """Note that the engine answers."""
        self.state, self._ready_at = State.READY, now
        self.standby.on_engine_ready(now)
        if self._num_drains:
            self._drain_at = now + _RESUME_S

    def on_drain(self) -> None:
        """Note that the engine was told to drain: its next end is final, unless it has another cause.

        Told twice, it must stop at once: its next end is final, whatever the cause.
        """
        self._num_drains += 1
        self.standby.on_last_use()

    def on_death(self, death: Death, now: float, suspects: Sequence[Suspect] = ()) -> None:
        """Decide what follows a death: WAITING or ENDED. suspects: the rows of its unfinished steps."""
        self.text, self._last_cause = death.text, death.cause
        self._drain_at = None
        are_clients_there = not (self.is_stopped and self.num_deaths) or now >= self._ready_at + _RESUME_S
        self.has_told = death.cause is Cause.ENDED and are_clients_there
        if death.cause is not Cause.ENDED:
            self.num_deaths += 1
        is_free = self.hunt.on_death(death.cause, list(suspects), now)
        verdict = self._policy.on_death(death, now, is_free=is_free)
        if verdict.delay_s is None:
            self.state, self.text = State.ENDED, verdict.text
        elif self.is_stopped:
            self.give_up()
        else:
            self.state, self._start_at = State.WAITING, now + verdict.delay_s
            self.restarts[death.cause] += 1

    @property
    def is_stopped(self) -> bool:
        """Return whether the engine was told to stop at once."""
        return self._num_drains > 1

    def give_up(self) -> None:
        """End it between two processes, without a restart, because it was told to stop."""
        self.state, self.text = State.ENDED, f"{self.text}; it was told to stop, so it is not restarted"

    def fail(self, text: str) -> None:
        """End it without a restart because the watching thread failed. text: follows "the engine process"."""
        self.state, self.text, self.has_told = State.ENDED, text, False

    def take_standby(self) -> bool:
        """Return whether the standby becomes the next process, which starts now; otherwise it is no longer usable."""
        return self.standby.take(self._last_cause)

    def start_in_s(self, now: float) -> float:
        """Return the seconds until the next start is due, in WAITING."""
        return max(0.0, self._start_at - now)

    def take_drain(self, now: float) -> bool:
        """Return whether to tell the engine to drain now; True once."""
        is_due = self._drain_at is not None and now >= self._drain_at
        if is_due:
            self._drain_at = None
        return is_due
