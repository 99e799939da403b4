"""Supervisor: decides what to do when an engine starts, dies or hangs, as a state machine without clock and processes.

frontend/engine/supervised_engine.py reports events to it and carries out its decisions; tests simulate both. Times:
seconds of any clock that only grows.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from enum import Enum

from frontend.engine.death import Cause, Death
from frontend.engine.restart_policy import RestartPolicy, RestartRules
from frontend.engine.standby_plan import StandbyPlan
from ipc.records.black_box import Suspect
from ipc.wire.start_messages import Isolate

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


# PoisonHunt: finds the request that kills the engine, among those that ran when it died. It reads no clock.
#
# A request is a suspect if it was in a step that did not end, twice within ten minutes, at overlapping positions: a
# poison (a request that kills the engine) does so at the same position again, while other streams have passed their
# position. One half of several suspects runs and the other half is parked. A death halves the half that ran; if that
# half ends well, the next one is released. The last one left is quarantined. So a poison among B suspects costs at most
# ceil(log2 B) + 2 deaths.


#: Causes that the work itself can have. A SIGKILL from outside accuses no request.
CAUSED_BY_WORK = frozenset({Cause.FAILED, Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.HUNG})
MAX_FREE_DEATHS = 12  # of searches within _MEMORY_S, which do not count against the budget of restarts
_MAX_QUARANTINED = 1024
_COME_BACK_S = 10.0  # time for a suspect's client to return, and for its place in the queue
_MEMORY_S = 600.0  # how long a death is remembered, and a request is quarantined


class PoisonHunt:
    """The suspects of one engine across its restarts. Times: seconds."""

    def __init__(self) -> None:
        self._deaths: dict[bytes, tuple[float, Suspect]] = {}  # by digest: the last unfinished step it was in
        self._groups: list[list[Suspect]] = []  # that must run apart from each other; the last one runs
        self._seen: set[bytes] = set()  # those of the running group that have begun
        self._missed: set[bytes] = set()  # of these: those that were not in the last sample
        self._running_since: float | None = None  # of that group
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()
        self._free_deaths: list[float] = []

    @property
    def is_searching(self) -> bool:
        """Return whether some request is parked or watched."""
        return bool(self._groups)

    def isolate(self, now: float) -> Isolate:
        """Return the requests that the engine must not run now, and those that it must never run."""
        while self._quarantined and now - next(iter(self._quarantined.values())) >= _MEMORY_S:
            self._quarantined.popitem(last=False)
        parked = [suspect.digest for group in self._groups[:-1] for suspect in group]
        return Isolate(parked, list(self._quarantined))

    def on_death(self, cause: Cause, suspects: list[Suspect], now: float) -> bool:
        """Take in a death and the rows of its step; return whether it is free, that is, does not count against the
        budget of restarts.
        """
        if cause not in CAUSED_BY_WORK or not suspects:
            return False
        self._deaths = {digest: one for digest, one in self._deaths.items() if now - one[0] < _MEMORY_S}
        self._seen, self._missed, self._running_since = set(), set(), None
        active = self._groups.pop() if self._groups else []
        accused = _again(suspects, {one.digest: one for one in active})
        if not accused:  # the poison did not run: another one, or none
            if active:
                self._groups.append(active)
            accused = _again(suspects, {digest: one for digest, (_, one) in self._deaths.items()})
            parked = {one.digest for group in self._groups for one in group}
            accused = [one for one in accused if one.digest not in parked]
        self._deaths |= {one.digest: (now, one) for one in suspects}
        if not accused:
            return False
        self._divide(accused, now)
        self._free_deaths = [time for time in self._free_deaths if now - time < _MEMORY_S]
        self._free_deaths.append(now)
        return len(self._free_deaths) <= MAX_FREE_DEATHS

    def on_step(self, rows: list[Suspect], now: float) -> bool:
        """Take in the rows of the last step of a running engine; return whether isolate() has changed.

        A suspect that has passed the position of the death is cleared; the last step may be the one that does not end,
        so the start of the step counts. It is also cleared if it ran and was in neither of two later samples, or if it
        has not come back for a while: its client has left.
        """
        if not self._groups:
            return False
        if self._running_since is None:
            self._running_since = now
        at, is_late = {row.digest: row for row in rows}, now - self._running_since >= _COME_BACK_S
        left = []
        for one in self._groups[-1]:
            row = at.get(one.digest)
            if row is not None:
                self._seen.add(one.digest)
                self._missed.discard(one.digest)
                if row.start < one.end:
                    left.append(one)
            elif one.digest not in self._seen:
                if not is_late:
                    left.append(one)
            elif one.digest not in self._missed:  # a step may leave out a row for lack of budget
                self._missed.add(one.digest)
                left.append(one)
        self._groups[-1] = left
        if left:
            return False
        self._groups.pop()
        if self._groups:
            self._halve(self._groups.pop())
        return True

    def _divide(self, accused: list[Suspect], now: float) -> None:
        if len(accused) > 1:
            self._halve(accused)
            return
        self._quarantined[accused[0].digest] = now
        self._deaths.pop(accused[0].digest, None)
        if len(self._quarantined) > _MAX_QUARANTINED:
            self._quarantined.popitem(last=False)
        if self._groups:
            self._halve(self._groups.pop())

    def _halve(self, group: list[Suspect]) -> None:
        """Let one half of a group run next."""
        middle = len(group) // 2
        if middle:
            self._groups.append(group[:middle])
        self._groups.append(group[middle:])
        self._seen, self._missed, self._running_since = set(), set(), None


def _again(suspects: list[Suspect], before: dict[bytes, Suspect]) -> list[Suspect]:
    """Return the suspects that were in an earlier unfinished step, at an overlapping position."""
    found = []
    for one in suspects:
        known = before.get(one.digest)
        if known is not None and one.start < known.end and known.start < one.end:
            found.append(Suspect(one.digest, max(one.start, known.start), min(one.end, known.end)))
    return found
