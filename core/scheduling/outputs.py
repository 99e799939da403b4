"""OutputCollector: collects a step's messages for the clients as columns, and splits them by client once."""

import struct
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from core.batch.request import Request
from core.batch.table import RequestStart
from core.execution.plan import LogprobColumns, PooledColumns
from core.scheduling.decisions import Preempted
from ipc.tables.arrays import NO_INT32S, NO_INTS, Bools, Int32s, Ints, Positions, Rows, TokenIds, UInt8s
from ipc.wire.messages import ErrorCode, FinishReason, Logprobs, Outputs, RequestFailed
from ipc.wire.pin_messages import PinAnswer, Pinned
from ipc.wire.pooling_messages import Pooled
from ipc.wire.scheduling_messages import EventCause, EventKind, RequestEvents

#: (client, message) in the order in which they are to be sent.
ClientOutput: TypeAlias = tuple[int, Outputs | RequestFailed | Pinned]


class _Rows(NamedTuple):
    """Rows of one or several clients."""

    clients: Ints
    numbers: Ints
    choices: Ints
    positions: Positions
    tokens: Int32s  # one per row, or none at all; with counts, row after row
    finish: UInt8s
    stop_tokens: Bools  # the row's last token was one of its stop_token_ids
    counts: Ints | None = None  # > 0
    last: Int32s | None = None  # for rows without tokens: the request's last token, or -1

    def take(self, rows: Rows) -> "_Rows":
        if not len(self.tokens):
            tokens: Rows = NO_INTS
        else:
            tokens = rows if self.counts is None else self._places_of_tokens(rows, self.counts)
        return _Rows(
            self.clients[rows],
            self.numbers[rows],
            self.choices[rows],
            self.positions[rows],
            self.tokens[tokens],
            self.finish[rows],
            self.stop_tokens[rows],
            None if self.counts is None else self.counts[rows],
            None if self.last is None else self.last[rows],
        )

    @staticmethod
    def _places_of_tokens(rows: Rows, counts: Ints) -> Ints:
        """Places of the tokens of these rows, row after row."""
        lengths: Ints = counts[rows]
        before: Ints = counts.cumsum() - counts
        after: Ints = lengths.cumsum() - lengths
        places: Ints = np.arange(int(lengths.sum())) + (before[rows] - after).repeat(lengths)
        return places


class _Packed:
    """Rows as the columns of the wire."""

    def __init__(self, rows: _Rows) -> None:
        self.clients = rows.clients
        self.numbers = rows.numbers.astype("<u4", copy=False).tobytes()
        self.positions = rows.positions.astype("<u4").tobytes()
        # [R + 1] bounds of each row's tokens; None: one token each, or none at all
        self.bounds: list[int] | None = None
        if rows.counts is None:
            self.counts = (b"\1\0" if len(rows.tokens) else b"\0\0") * len(rows.clients)
        else:
            self.counts = rows.counts.astype("<u2").tobytes()
            self.bounds = [0, *rows.counts.cumsum().tolist()]
        self.tokens = rows.tokens.astype("<i4", copy=False).tobytes()
        self.choices = _choices(rows.choices)
        self.finish = rows.finish.tobytes() if np.count_nonzero(rows.finish) else b""
        stopped = rows.stop_tokens.nonzero()[0].tolist()
        bounds = self.bounds  # a stop token is the row's last token
        ends = rows.tokens if rows.last is None else rows.last
        self.stopped = [(row, int(ends[row if bounds is None else bounds[row + 1] - 1])) for row in stopped]


class OutputCollector:
    """The messages of a step. It is filled during the step and drained at its end."""

    def __init__(self, epoch: int) -> None:
        self.events = RequestEventLog()
        self._epoch, self.weights_version = epoch, 0
        self._rows: list[_Rows] = []
        self._ends: list[tuple[int, ...]] = []  # ends without a token: the columns of _Rows, and the last token
        self._started: dict[int, list[int]] = {}  # number, cached tokens; number, ...
        self._drafts: dict[int, list[int]] = {}  # number, choice, verified and accepted drafts; number, ...
        self._logprobs: dict[int, Logprobs] = {}
        self._pooled: dict[int, Pooled] = {}
        self._failed: list[ClientOutput] = []
        self._pinned: list[ClientOutput] = []  # they are told first

    def add_tokens(
        self,
        clients: Ints,
        numbers: Ints,
        choices: Ints,
        positions: Positions,
        tokens: TokenIds,
        finish: UInt8s,
        stop_tokens: Bools,
        counts: Ints | None = None,
    ) -> None:
        """Add one row per sampled token. All columns are [n]. counts: the number of tokens of each row, all above 0."""
        if len(clients):
            self._rows.append(_Rows(clients, numbers, choices, positions, tokens, finish, stop_tokens, counts))

    def add_finish(
        self, request: Request, num_output_tokens: int, reason: FinishReason, stop_token: int | None = None
    ) -> None:
        """Add the end of a request that gets no token in this step. stop_token: its last token, if that ended it."""
        stop = -1 if stop_token is None else stop_token
        self._ends.append((request.client, request.number, request.choice, num_output_tokens, reason, stop))

    def add_logprobs(self, clients: Ints, numbers: Ints, choices: Ints, logprobs: LogprobColumns) -> None:
        """Add logprobs. clients, numbers, choices [L]: of each position."""
        for client in np.unique(clients).tolist():
            mine = clients == client
            part = logprobs.where(mine)
            new = Logprobs(
                numbers=numbers[mine].astype("<u4").tobytes(),
                positions=part.positions.astype("<u4").tobytes(),
                counts=part.counts.astype("<u4").tobytes(),
                ranks=part.ranks.astype("<u4").tobytes(),
                token_ids=part.token_ids.astype("<i4", copy=False).tobytes(),
                values=part.values.astype("<f4", copy=False).tobytes(),
                choices=_choices(choices[mine]),
            )
            self._logprobs[client] = _joined(self._logprobs[client], new) if client in self._logprobs else new

    def add_pooled(self, clients: Ints, numbers: Ints, choices: Ints, pooled: PooledColumns) -> None:
        """Add the vectors and the ends of pooling requests, once per step. clients, numbers, choices [P]: of each."""
        for address in zip(clients.tolist(), numbers.tolist(), choices.tolist(), strict=True):
            self._ends.append((*address, 0, FinishReason.STOP, -1))
        bounds = np.concatenate([[0], (pooled.counts.astype(np.int64) * pooled.widths).cumsum()])
        for client in np.unique(clients).tolist():
            mine = np.flatnonzero(clients == client)
            values = [pooled.values[bounds[index] : bounds[index + 1]] for index in mine.tolist()]
            self._pooled[client] = Pooled(
                numbers=numbers[mine].astype("<u4").tobytes(),
                counts=pooled.counts[mine].astype("<u4").tobytes(),
                widths=pooled.widths[mine].astype("<u4").tobytes(),
                values=np.concatenate(values).astype("<f4", copy=False).tobytes(),
            )

    def add_starts(self, starts: list[RequestStart], now_ns: int) -> None:
        """Add starts and their events. Call this before has_started of these requests is set."""
        for start in starts:
            request, num_found = start.request, start.num_computed_tokens  # found in the prefix cache or on the host
            client, number, choice = request.client, request.number, request.choice
            if request.has_started:
                self.events.add(client, (number, choice, _RESUMED, 0, num_found, now_ns))
                continue
            queued = number, choice, _QUEUED, 0, 0, request.arrival_ns
            self.events.add(client, (*queued, number, choice, _SCHEDULED, 0, num_found, now_ns))
            if choice == 0:  # the other choices find the blocks of choice 0
                started = self._started.setdefault(client, [])
                started += (number, num_found)

    def add_drafts(self, client: int, entry: tuple[int, int, int, int]) -> None:
        """Add (number, choice, verified drafts, accepted drafts) for a row that ends in this step."""
        self._drafts.setdefault(client, []).extend(entry)

    def add_failed(self, client: int, number: int, code: ErrorCode, message: str) -> None:
        """Add the failure of a request."""
        self._failed.append((client, RequestFailed(number, code, message)))

    def add_pinned(self, client: int, number: int, answer: PinAnswer) -> None:
        """Add the answer to the next pin of a request that has just arrived."""
        last = self._pinned[-1] if self._pinned else None
        if last is not None and last[0] == client and isinstance(last[1], Pinned) and last[1].number == number:
            last[1].pins.append(answer)
        else:
            self._pinned.append((client, Pinned(number, [answer])))

    def drain(self, step: int) -> list[ClientOutput]:
        """Return everything added since the last drain."""
        messages = self._pinned
        if self._ends:
            self._rows.insert(0, _rows_of_ends(self._ends))
            self._ends = []
        for rows in self._rows:
            messages.extend(self._split(step, rows))
        others = dict.fromkeys((*self._started, *self._logprobs, *self.events.clients))
        messages.extend((client, self._without_rows(step, client)) for client in others)
        messages.extend(self._failed)
        self._rows, self._failed, self._pinned = [], [], []
        return messages

    def _split(self, step: int, rows: _Rows) -> list[ClientOutput]:
        """Return one message for each client, sliced out of the encoded columns of all clients."""
        clients = rows.clients
        if clients[0] == clients[-1] and np.count_nonzero(clients == clients[0]) == len(clients):
            return [(int(clients[0]), self._message(step, _Packed(rows), 0, len(clients)))]
        order = np.argsort(clients, kind="stable")
        packed = _Packed(rows.take(order))
        starts = np.flatnonzero(np.diff(packed.clients, prepend=-1))
        ends = [*starts[1:].tolist(), len(order)]
        return [
            (client, self._message(step, packed, start, end))
            for client, start, end in zip(packed.clients[starts].tolist(), starts.tolist(), ends, strict=True)
        ]

    def _message(self, step: int, packed: "_Packed", start: int, end: int) -> Outputs:
        client, finish, bounds = int(packed.clients[start]), packed.finish[start:end], packed.bounds
        first, last = (start, end) if bounds is None else (bounds[start], bounds[end])
        return Outputs(
            epoch=self._epoch,
            step=step,
            numbers=packed.numbers[4 * start : 4 * end],
            positions=packed.positions[4 * start : 4 * end],
            counts=packed.counts[2 * start : 2 * end],
            tokens=packed.tokens[4 * first : 4 * last],
            choices=packed.choices[2 * start : 2 * end],
            finish=finish if any(finish) else b"",
            stop_tokens=[(row - start, token) for row, token in packed.stopped if start <= row < end],
            started=_packed(self._started.pop(client, [])) if self._started else b"",
            logprobs=self._logprobs.pop(client, None) if self._logprobs else None,
            events=self.events.take(client) if self.events else None,
            drafts=_packed(self._drafts.pop(client, [])) if self._drafts else b"",
            pooled=self._pooled.pop(client, None) if self._pooled else None,
            weights_version=self.weights_version,
        )

    def _without_rows(self, step: int, client: int) -> Outputs:
        started, logprobs = _packed(self._started.pop(client, [])), self._logprobs.pop(client, None)
        events = self.events.take(client)
        version = self.weights_version
        return Outputs(
            self._epoch,
            step,
            b"",
            b"",
            b"",
            b"",
            started=started,
            logprobs=logprobs,
            events=events,
            weights_version=version,
        )


def _rows_of_ends(ends: list[tuple[int, ...]]) -> _Rows:
    clients, numbers, choices, positions, finish, last = np.array(ends, np.int64).T
    return _Rows(
        clients,
        numbers,
        choices,
        positions,
        NO_INT32S,
        finish.astype(np.uint8),
        last >= 0,
        last=last.astype(np.int32),
    )


def _joined(one: Logprobs, other: Logprobs) -> Logprobs:
    """Concatenate the columns of two Logprobs."""
    if one.choices or other.choices:  # without choices, all are 0
        one, other = [
            msgspec.structs.replace(p, choices=p.choices or b"\0" * (len(p.numbers) // 2)) for p in (one, other)
        ]
    pairs = zip(msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True)
    return Logprobs(*(first + second for first, second in pairs))


def _choices(choices: Ints) -> bytes:
    return choices.astype("<u2").tobytes() if np.count_nonzero(choices) else b""


def _packed(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


# RequestEventLog: events of single requests (queued, scheduled, preempted, resumed), until clients receive them.
# Steps without such events cost nothing.


_QUEUED, _SCHEDULED, _PREEMPTED, _RESUMED = map(int, EventKind)
_FORMATS = "IHBBIq"  # struct codes of an event's fields: number, choice, kind, cause, amount, time


class RequestEventLog:
    """Events that are not yet sent to their clients, with the times of the steps in which they happened.

    QUEUED is reported only when the request starts, because clients cannot use it before.
    """

    def __init__(self) -> None:
        self._events: dict[int, list[int]] = {}  # by client: the fields of all events, concatenated

    def __bool__(self) -> bool:
        """Return whether any event is pending."""
        return bool(self._events)

    @property
    def clients(self) -> list[int]:
        """Return the clients that have events."""
        return list(self._events)

    def add(self, client: int, fields: tuple[int, ...]) -> None:
        """Add events, event after event: number, choice, kind, cause, amount, time."""
        events = self._events.get(client)
        if events is None:
            self._events[client] = list(fields)
        else:
            events += fields

    def add_preempted(self, preempted: list[Preempted], now_ns: int) -> None:
        """Record preemptions."""
        for request, cause, _, num_swapped in preempted:
            self._add_preempted(request, EventCause(cause), num_swapped, now_ns)

    def add_hold(self, request: Request, now_ns: int) -> None:
        """Record that a request gives back its row because its client does not read."""
        self._add_preempted(request, EventCause.HOLD, 0, now_ns)

    def _add_preempted(self, request: Request, cause: EventCause, num_swapped: int, now_ns: int) -> None:
        fields = (request.number, request.choice, _PREEMPTED, int(cause), num_swapped, now_ns)
        self.add(request.client, fields)

    def take(self, client: int) -> RequestEvents | None:
        """Return this client's events since the last call, or None if there are none."""
        fields = self._events.pop(client, None)
        if fields is None:
            return None
        width = len(_FORMATS)
        count = len(fields) // width
        return RequestEvents(
            *[struct.pack(f"<{count}{kind}", *fields[place::width]) for place, kind in enumerate(_FORMATS)]
        )
