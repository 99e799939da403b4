"""RequestEvent: an action of the engine's scheduler on a request, with its time."""

import msgspec
import numpy as np

from ipc.errors import MalformedMessageError
from ipc.wire.scheduling_messages import EventCause, EventKind, RequestEvents

_KINDS, _CAUSES = {int(one): one for one in EventKind}, {int(one): one for one in EventCause}


class RequestEvent(msgspec.Struct, frozen=True):
    """One event of a request.

    time: seconds on the engine's clock, which differs from this process's. Compare it only with other events' times.
    """

    kind: EventKind
    time: float
    choice: int = 0
    cause: EventCause = EventCause.NONE  # of PREEMPTED
    amount: int = 0  # PREEMPTED: blocks copied to the host, 0 = it is computed again; others: cached tokens found


def read_events(columns: RequestEvents) -> list[tuple[int, RequestEvent]]:
    """Return (request number, event) of each event, in order.

    Errors: MalformedMessageError if the columns do not fit.
    """
    try:
        return [
            (number, RequestEvent(_KINDS[kind], time / 1e9, choice, _CAUSES[cause], amount))
            for number, kind, time, choice, cause, amount in zip(
                np.frombuffer(columns.numbers, "<u4").tolist(),
                np.frombuffer(columns.kinds, "u1").tolist(),
                np.frombuffer(columns.times, "<i8").tolist(),
                np.frombuffer(columns.choices, "<u2").tolist(),
                np.frombuffer(columns.causes, "u1").tolist(),
                np.frombuffer(columns.amounts, "<u4").tolist(),
                strict=True,
            )
        ]
    except (ValueError, KeyError) as error:
        raise MalformedMessageError(f"the columns of request events do not fit: {error}") from error


def time_in_queue(events: tuple[RequestEvent, ...]) -> float | None:
    """Return the seconds from QUEUED to SCHEDULED of the first choice to be scheduled; None before that.

    Both come from one engine: an engine that takes over a request reports QUEUED again, on its own clock.
    """
    scheduled = next((at for at, event in enumerate(events) if event.kind is EventKind.SCHEDULED), None)
    if scheduled is None:
        return None
    queued = [event.time for event in events[:scheduled] if event.kind is EventKind.QUEUED]
    return events[scheduled].time - queued[-1] if queued else None
