"""Residents: which models are in memory, which wait for memory, and which must leave it. It reads no clock.

It is a state machine: requests, events of engines and the time go in; take() returns what is to be done. The sum of the
sizes of all models that load, serve or stop never exceeds the memory. A model that answers is never stopped. If memory
is needed, the models that were used least recently leave it first. The first model that waits gets the next memory, so
no later one delays it. If it waits for longer than PATIENCE_S, the models that were used least recently take no new
requests until it has loaded; their requests wait behind it. So each wait ends.
"""

from collections.abc import Iterable
from enum import Enum
from math import inf
from typing import NamedTuple

#: Seconds for which a model waits before others stop taking requests.
PATIENCE_S = 10.0
#: Seconds after a failed load in which requests get the same error, without another attempt.
FAILED_S = 2.0


class Place(Enum):
    """Where a model is. The values are what callers see."""

    OUT = "unloaded"
    LOADING = "loading"
    READY = "loaded"
    STOPPING = "unloading"


class Start(NamedTuple):
    """Load this model."""

    name: str


class Stop(NamedTuple):
    """End this model's engine."""

    name: str


class Admit(NamedTuple):
    """Let this request begin."""

    request: int


class Refuse(NamedTuple):
    """Answer this request with an error. is_final: another attempt would fail too."""

    request: int
    text: str
    is_final: bool = False


Action = Start | Stop | Admit | Refuse


class Resident:
    """One model. num_bytes: what it takes while it is in memory. keep_alive_s: how long it stays after its last answer;
    inf = until memory is needed.
    """

    def __init__(self, name: str, num_bytes: int, keep_alive_s: float) -> None:
        self.name, self.num_bytes, self.keep_alive_s = name, num_bytes, keep_alive_s
        self.place = Place.OUT
        self.kept_s = keep_alive_s  # what the last request asked for
        self.used_at = -inf  # when the last request began or ended
        self.running: set[int] = set()
        self.waiting: dict[int, float] = {}  # request -> when it is refused
        self.failure, self.failed_at = "", -inf

    @property
    def is_idle(self) -> bool:
        """Return whether it could leave the memory now."""
        return self.place is Place.READY and not self.running

    @property
    def expires_at(self) -> float:
        """Return when it leaves the memory if no request arrives; inf = never, or it is in use."""
        return self.used_at + self.kept_s if self.is_idle else inf


class Residents:
    """See the module's docstring. memory: bytes for all models. max_wait_s: how long a request may wait.

    All times are seconds of one clock, and never decrease.
    """

    def __init__(self, memory: int, max_wait_s: float) -> None:
        self.memory = memory
        self.by_name: dict[str, Resident] = {}
        self._max_wait_s = max_wait_s
        self._of_request: dict[int, Resident] = {}
        self._yielding: dict[str, None] = {}  # models that take no new requests, because one waits for their memory
        self._yielding_to = ""
        self._actions: list[Action] = []

    # --- what happens ---

    def put(self, name: str, num_bytes: int, keep_alive_s: float) -> None:
        """Add a model that is not in memory."""
        assert name not in self.by_name, name
        self.by_name[name] = Resident(name, num_bytes, keep_alive_s)

    def remove(self, name: str) -> None:
        """Remove a model that is not in memory and for which no request waits."""
        one = self.by_name.pop(name)
        assert one.place is Place.OUT, name
        assert not one.waiting, name

    def restore(self, name: str) -> None:
        """Note that a model loads, although no request asked for it here. For a new owner of running engines."""
        self.by_name[name].place = Place.LOADING

    def request(self, request: int, name: str, now: float, keep_alive_s: float | None = None) -> None:
        """Take a request for a model. keep_alive_s: how long the model stays after it; None = as configured."""
        one = self.by_name[name]
        if one.num_bytes > self.memory:
            text = f"the model {name!r} needs {one.num_bytes} bytes; all models together may take {self.memory}"
            self._actions.append(Refuse(request, text, is_final=True))
            return
        if one.place is Place.OUT and now < one.failed_at + FAILED_S:
            self._actions.append(Refuse(request, one.failure))
            return
        one.kept_s = one.keep_alive_s if keep_alive_s is None else keep_alive_s
        self._of_request[request] = one
        if one.place is Place.READY and name not in self._yielding:
            self._admit(one, request, now)
            return
        one.waiting[request] = now + self._max_wait_s
        self._settle(now)

    def leave(self, request: int, now: float) -> None:
        """Note that a request has ended, or that its caller has left. An unknown request is ignored."""
        one = self._of_request.pop(request, None)
        if one is None:
            return
        if request in one.running:
            one.running.remove(request)
            one.used_at = now
        else:
            del one.waiting[request]
        self._settle(now)

    def unload(self, name: str, now: float) -> None:
        """Let a model leave the memory once it is idle."""
        self.by_name[name].kept_s = 0.0
        self._settle(now)

    def on_ready(self, name: str, now: float) -> None:
        """Note that a model serves."""
        one = self.by_name[name]
        one.place, one.used_at = Place.READY, now
        for request in list(one.waiting):
            self._admit(one, request, now)
        self._settle(now)

    def on_end(self, name: str, now: float, failure: str = "") -> None:
        """Note that a model's engine has ended. failure: why it did not load; "" = it was stopped, or it died."""
        one = self.by_name[name]
        has_failed = one.place is Place.LOADING
        one.place = Place.OUT
        self._yielding.pop(name, None)
        if has_failed:
            one.failure, one.failed_at = failure or f"the model {name!r} was not loaded", now
            self._refuse(one, list(one.waiting), one.failure)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Note the time; called about once a second."""
        for one in self.by_name.values():
            late = [request for request, end in one.waiting.items() if end <= now]
            self._refuse(one, late, f"the model {one.name!r} did not get its memory, or did not load, in time")
        self._settle(now)

    def take(self) -> list[Action]:
        """Return what is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def used(self) -> int:
        """Return the bytes that models take."""
        return sum(one.num_bytes for one in self.by_name.values() if one.place is not Place.OUT)

    # --- what follows ---

    def _admit(self, one: Resident, request: int, now: float) -> None:
        one.waiting.pop(request, None)
        one.running.add(request)
        one.used_at = now
        self._actions.append(Admit(request))

    def _refuse(self, one: Resident, requests: Iterable[int], text: str) -> None:
        for request in requests:
            del one.waiting[request], self._of_request[request]
            self._actions.append(Refuse(request, text))

    def _settle(self, now: float) -> None:
        """Stop what has expired, and give the memory to those that wait, as far as that is possible now."""
        for one in self.by_name.values():
            if one.is_idle and not one.waiting and one.expires_at <= now:
                self._stop(one)
        while (first := self._first()) is not None:
            if self._yielding_to != first.name:
                self._end_yielding(now)
            if first.place is not Place.OUT or self.used + first.num_bytes > self.memory:
                self._make_room(first, now)
                return
            first.place = Place.LOADING
            self._actions.append(Start(first.name))
        self._end_yielding(now)

    def _first(self) -> Resident | None:
        """Return the model whose oldest request has waited longest for memory; None if no model waits."""
        waiting = [one for one in self.by_name.values() if one.waiting and one.place in (Place.OUT, Place.STOPPING)]
        return min(waiting, key=_oldest_end, default=None)

    def _make_room(self, one: Resident, now: float) -> None:
        """Stop the idle models that were used least recently, if that is enough for this one; otherwise wait."""
        leaving = sum(other.num_bytes for other in self.by_name.values() if other.place is Place.STOPPING)
        short = self.used + one.num_bytes - self.memory - leaving
        if one.place is not Place.OUT or short <= 0:
            return
        ready = [other for other in self.by_name.values() if other.place is Place.READY]
        ready.sort(key=lambda other: other.used_at)
        idle = _enough([other for other in ready if other.is_idle], short)
        for other in idle:
            self._stop(other)
        if not idle and not self._yielding and now - _oldest_end(one) + self._max_wait_s >= PATIENCE_S:
            self._yielding_to, self._yielding = one.name, dict.fromkeys(other.name for other in _enough(ready, short))

    def _stop(self, one: Resident) -> None:
        one.place = Place.STOPPING
        self._yielding.pop(one.name, None)
        self._actions.append(Stop(one.name))

    def _end_yielding(self, now: float) -> None:
        """Let all models take requests again, and begin those that waited for one that serves."""
        for name in self._yielding:
            one = self.by_name[name]
            for request in list(one.waiting):
                self._admit(one, request, now)
        self._yielding.clear()
        self._yielding_to = ""


def _oldest_end(one: Resident) -> float:
    """Return when the oldest of its waiting requests is refused, for comparison: all may wait equally long."""
    return next(iter(one.waiting.values()))


def _enough(models: list[Resident], num_bytes: int) -> list[Resident]:
    """Return the first of these models that together have num_bytes; [] if all of them have fewer."""
    found = list[Resident]()
    for one in models:
        if num_bytes <= 0:
            break
        found.append(one)
        num_bytes -= one.num_bytes
    return found if num_bytes <= 0 else []
