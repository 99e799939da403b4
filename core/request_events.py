"""RequestEventLog: what happened to single requests - queued, scheduled, preempted, resumed - until their clients are
told. Steps without such events pay nothing."""

from array import array

import numpy as np

from core.batch_table import Start
from core.decisions import Preempted
from core.request import Request
from ipc.scheduling_messages import EventCause, EventKind, RequestEvents

_QUEUED, _SCHEDULED, _PREEMPTED, _RESUMED = map(int, EventKind)
_KINDS = [np.dtype(kind) for kind in ("<u4", "<u2", "u1", "u1", "<u4", "<i8")]


class RequestEventLog:
    """Times are of the step in which it happened. That a request was queued is told when it starts: nothing can be
    shown of it before."""

    def __init__(self) -> None:
        # By client: number, choice, kind, cause, amount, time of one event after the other.
        self._events: dict[int, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._events)

    @property
    def clients(self) -> list[int]:
        return list(self._events)

    def add_starts(self, starts: list[Start], now_ns: int) -> None:
        """Before has_started of their requests is set."""
        for start in starts:
            request, num_found = start.request, start.num_computed_tokens  # by the prefix cache or on the host
            events, number, choice = self._events.setdefault(request.client, []), request.number, request.choice
            if request.has_started:
                events += (number, choice, _RESUMED, 0, num_found, now_ns)
            else:
                events += (number, choice, _QUEUED, 0, 0, request.arrival_ns)
                events += (number, choice, _SCHEDULED, 0, num_found, now_ns)

    def add_preempted(self, preempted: list[Preempted], now_ns: int) -> None:
        for request, cause, _, num_swapped in preempted:
            self._add_preempted(request, EventCause(cause), num_swapped, now_ns)

    def add_hold(self, request: Request, now_ns: int) -> None:
        """It gives back its row because its client does not read."""
        self._add_preempted(request, EventCause.HOLD, 0, now_ns)

    def _add_preempted(self, request: Request, cause: EventCause, num_swapped: int, now_ns: int) -> None:
        event = (request.number, request.choice, _PREEMPTED, int(cause), num_swapped, now_ns)
        self._events.setdefault(request.client, []).extend(event)

    def take(self, client: int) -> RequestEvents | None:
        """Of this client, since the last time; None for none."""
        events = self._events.pop(client, None)
        if events is None:
            return None
        columns = np.frombuffer(array("q", events), np.int64).reshape(-1, 6).T
        return RequestEvents(*[column.astype(kind).tobytes() for column, kind in zip(columns, _KINDS, strict=True)])


def join_events(parts: list[RequestEvents]) -> RequestEvents | None:
    """One after the other; None for none."""
    if not parts:
        return None
    names = RequestEvents.__struct_fields__
    return RequestEvents(*(b"".join(getattr(part, name) for part in parts) for name in names))
