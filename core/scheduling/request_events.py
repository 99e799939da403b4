"""RequestEventLog: the events of single requests (queued, scheduled, preempted, resumed), until clients receive them.

Steps without such events cost nothing.
"""

import struct

from core.batch.request import Request
from core.batch.table import RequestStart
from core.scheduling.decisions import Preempted
from ipc.wire.scheduling_messages import EventCause, EventKind, RequestEvents

_QUEUED, _SCHEDULED, _PREEMPTED, _RESUMED = map(int, EventKind)
_FORMATS = "IHBBIq"  # struct codes of an event's fields: number, choice, kind, cause, amount, time


class RequestEventLog:
    """The events that wait for their clients, with the times of the steps in which they happened.

    QUEUED is reported only when the request starts, because clients cannot use it before.
    """

    def __init__(self) -> None:
        self._events: dict[int, list[int]] = {}  # by client: the fields of one event after those of another

    def __bool__(self) -> bool:
        """Return whether any event waits."""
        return bool(self._events)

    @property
    def clients(self) -> list[int]:
        """Return the clients that have events."""
        return list(self._events)

    def add_starts(self, starts: list[RequestStart], now_ns: int) -> None:
        """Record starts. Call this before has_started of their requests is set."""
        for start in starts:
            request, num_found = start.request, start.num_computed_tokens  # by the prefix cache or on the host
            fields, number, choice = self._events.setdefault(request.client, []), request.number, request.choice
            if not request.has_started:
                fields += (number, choice, _QUEUED, 0, 0, request.arrival_ns)
                fields += (number, choice, _SCHEDULED, 0, num_found, now_ns)
            else:
                fields += (number, choice, _RESUMED, 0, num_found, now_ns)

    def add_preempted(self, preempted: list[Preempted], now_ns: int) -> None:
        """Record preemptions."""
        for request, cause, _, num_swapped in preempted:
            self._add_preempted(request, EventCause(cause), num_swapped, now_ns)

    def add_hold(self, request: Request, now_ns: int) -> None:
        """Record that a request gives back its row because its client does not read."""
        self._add_preempted(request, EventCause.HOLD, 0, now_ns)

    def _add_preempted(self, request: Request, cause: EventCause, num_swapped: int, now_ns: int) -> None:
        fields = (request.number, request.choice, _PREEMPTED, int(cause), num_swapped, now_ns)
        self._events.setdefault(request.client, []).extend(fields)

    def take(self, client: int) -> RequestEvents | None:
        """Return this client's events since the last call; None for none."""
        fields = self._events.pop(client, None)
        if fields is None:
            return None
        width = len(_FORMATS)
        count = len(fields) // width
        return RequestEvents(
            *[struct.pack(f"<{count}{kind}", *fields[place::width]) for place, kind in enumerate(_FORMATS)]
        )
