"""PoisonHunt: finds the request that kills the engine, among those that ran when it died. It reads no clock.

A request is a suspect if it was in a step that did not end, twice within ten minutes, at overlapping positions: a
poison (a request that kills the engine) does so at the same position again, while other streams have passed their
position. One half of several suspects runs and the other half is parked. A death halves the half that ran; if that half
ends well, the next one is released. The last one left is quarantined. So a poison among B suspects costs at most
ceil(log2 B) + 2 deaths.
"""

from collections import OrderedDict

from frontend.engine.death import Cause
from ipc.records.black_box import Suspect
from ipc.wire.start_messages import Isolate

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
