"""forward(): a replica's Outputs as messages to the requests' clients, under the clients' own numbers."""

from struct import iter_unpack, pack
from typing import Any, NamedTuple

import msgspec
import numpy as np

from frontend.client.output_columns import LAST_FINISH, OutputColumns, columns_of
from frontend.fleet.requests import RoutedRequests
from ipc.errors import MalformedMessageError
from ipc.tables.arrays import AnyInts, Ints
from ipc.wire.messages import Logprobs, Outputs
from ipc.wire.pooling_messages import Pooled
from ipc.wire.scheduling_messages import RequestEvents

Messages = list[tuple[int, Outputs]]  # (client, message)
_FEW = 64  # up to this many entries are looked up one by one


class RoutedRow(NamedTuple):
    """A plain output of one row, whose request continues there: the row, its client, and the message for it."""

    row: int
    client: int
    message: Outputs


class Routed(NamedTuple):
    """Outputs of a replica, their columns, and their rows [R]."""

    outputs: Outputs
    columns: OutputColumns
    rows: Ints


def only_new(requests: RoutedRequests, outputs: Outputs) -> Routed:
    """Return the message without the parts that must not be forwarded.

    These are rows of requests that have ended or moved away, and tokens that arrived earlier. Errors:
    MalformedMessageError for columns that do not fit, and for a row that begins above the tokens that have arrived.
    """
    columns = columns_of(outputs)
    rows = requests.rows_of(columns.numbers, columns.choices)
    live = requests.is_live(rows)
    if not live.all():
        which = live.nonzero()[0]
        outputs, columns, rows = _take(outputs, columns, which), columns.where(live), rows[which]
    known = requests.lengths(rows)
    if (columns.positions == known).all():
        return Routed(outputs, columns, rows)
    if (columns.positions > known).any():
        at = int(np.argmax(columns.positions > known))
        raise MalformedMessageError(
            f"a row begins at position {columns.positions[at]} of an output of which {known[at]} tokens have arrived"
        )
    skipped = np.minimum(known - columns.positions, columns.counts)
    ends = np.zeros(len(rows), np.bool_) if columns.finish is None else columns.finish > 0
    which = ((skipped < columns.counts) | ends).nonzero()[0]
    outputs = _take(outputs, columns, which, skipped[which])
    return Routed(outputs, columns_of(outputs), rows[which])


def forward(requests: RoutedRequests, routed: Routed, epoch: int) -> Messages:
    """Return the messages for the clients. routed: the result of only_new(), not yet applied to requests."""
    outputs, _, rows = routed
    clients = requests.client[rows]
    is_plain = not (outputs.drafts or outputs.logprobs or outputs.pooled)
    if is_plain and len(rows) and (clients == clients[0]).all():
        client = int(clients[0])
        whole = _whole(requests, outputs, client, requests.theirs[rows].astype("<u4").tobytes(), epoch)
        if whole is not None:
            return [(client, whole)]
    parts = _Parts(requests, epoch, outputs)
    parts.add_rows(outputs, rows, clients)
    parts.add_others(outputs)
    return [(client, Outputs(**fields)) for client, fields in parts.by_client.items()]


def forward_row(requests: RoutedRequests, outputs: Outputs, epoch: int) -> RoutedRow | None:
    """Return the message for outputs of one plain row; None for others and for invalid ones, which only_new() handles.

    A first token arrives alone, and its client waits for it, so no arrays are used here.
    """
    numbers, positions, counts, finish = outputs.numbers, outputs.positions, outputs.counts, outputs.finish
    if (len(numbers), len(positions), len(counts), len(outputs.started) % 8) != (4, 4, 2, 0) or len(finish) > 1:
        return None
    if outputs.choices or outputs.drafts or outputs.logprobs or outputs.pooled:
        return None
    ((ticket, position, count),) = iter_unpack("<IIH", numbers + positions + counts)
    if len(outputs.tokens) != 4 * count or (finish and finish[0] > LAST_FINISH):
        return None
    row = requests.row(ticket)
    if row < 0 or not requests.goes_on_at(row, position):
        return None
    client = int(requests.client[row])
    whole = _whole(requests, outputs, client, pack("<I", int(requests.theirs[row])), epoch)
    return None if whole is None else RoutedRow(row, client, whole)


def _whole(requests: RoutedRequests, outputs: Outputs, client: int, numbers: bytes, epoch: int) -> Outputs | None:
    """Return the outputs, all rows of which are this client's; None if another entry is not.

    numbers: the client's own.
    """
    started = _started_of(requests, outputs.started, client) if outputs.started else b""
    events = None if outputs.events is None else _events_of(requests, outputs.events, client)
    if started is None or (events is None) is not (outputs.events is None):
        return None
    return msgspec.structs.replace(outputs, epoch=epoch, numbers=numbers, started=started, events=events)


def _started_of(requests: RoutedRequests, started: bytes, client: int) -> bytes | None:
    """Return the column `started` for this client; None if an entry is another client's. Few requests begin at the same
    time, and their first tokens wait for this, so entries are processed one by one.
    """
    parts = []
    for ticket, num_cached in iter_unpack("<II", started):
        row = requests.row(ticket)
        if row >= 0 and int(requests.client[row]) != client:
            return None
        if row >= 0 and not requests.moved[row]:
            parts.append(pack("<II", int(requests.theirs[row]), num_cached))
    return b"".join(parts)


def _events_of(requests: RoutedRequests, events: RequestEvents, client: int) -> RequestEvents | None:
    """Return the events for this client; None if some are another client's, or of a request that has moved.

    They come with first tokens, so they are also processed one by one.
    """
    if len(events.numbers) > 4 * _FEW:
        return None
    numbers: list[int] = []
    for (ticket,) in iter_unpack("<I", events.numbers):
        row = requests.row(ticket)
        if row < 0 or requests.moved[row] or requests.client[row] != client:
            return None
        numbers.append(int(requests.theirs[row]))
    return msgspec.structs.replace(events, numbers=pack(f"<{len(numbers)}I", *numbers))


class _Parts:
    """The fields of each client's message."""

    def __init__(self, requests: RoutedRequests, epoch: int, outputs: Outputs) -> None:
        self.by_client: dict[int, dict[str, Any]] = {}
        self._requests = requests
        self._empty: dict[str, Any] = {"epoch": epoch, "step": outputs.step, "weights_version": outputs.weights_version}
        self._empty |= dict.fromkeys(("numbers", "positions", "counts", "tokens"), b"")

    def _fields(self, client: int) -> dict[str, Any]:
        return self.by_client.setdefault(client, dict(self._empty))

    def add_rows(self, outputs: Outputs, rows: Ints, clients: Ints) -> None:
        counts = np.frombuffer(outputs.counts, "<u2").astype(np.int64)
        for client, which in _groups(clients):
            tokens = np.frombuffer(outputs.tokens, "<i4")[_ragged(counts, which)]
            places = {row: place for place, row in enumerate(which.tolist())}
            fields = self._fields(client)
            fields |= {
                "numbers": self._requests.theirs[rows[which]].astype("<u4").tobytes(),
                "positions": _of(outputs.positions, "<u4", which),
                "counts": _of(outputs.counts, "<u2", which),
                "tokens": tokens.tobytes(),
                "choices": _of(outputs.choices, "<u2", which),
                "finish": _of(outputs.finish, np.uint8, which),
                "stop_tokens": [(places[row], token) for row, token in outputs.stop_tokens if row in places],
            }

    def add_others(self, outputs: Outputs) -> None:
        """Add the sparse parts: entries of single requests, by their tickets."""
        if outputs.started:
            pairs = np.frombuffer(outputs.started, "<u4").reshape(-1, 2)
            for client, which, numbers in self._split(pairs[:, 0], is_first=True):
                pairs_of = np.stack([numbers, pairs[which, 1].astype(np.int64)], axis=1)
                self._fields(client)["started"] = pairs_of.astype("<u4").tobytes()
        if outputs.drafts:
            entries = np.frombuffer(outputs.drafts, "<u4").reshape(-1, 4)
            for client, which, numbers in self._split(entries[:, 0]):
                mine = np.concatenate([numbers[:, None], entries[which, 1:].astype(np.int64)], axis=1)
                self._fields(client)["drafts"] = mine.astype("<u4").tobytes()
        if outputs.events is not None:
            self._add_events(outputs.events)
        if outputs.logprobs is not None:
            self._add_logprobs(outputs.logprobs)
        if outputs.pooled is not None:
            self._add_pooled(outputs.pooled)

    def _add_events(self, events: RequestEvents) -> None:
        names = {"choices": "<u2", "kinds": np.uint8, "causes": np.uint8, "amounts": "<u4", "times": "<i8"}
        for client, which, numbers in self._split(np.frombuffer(events.numbers, "<u4"), is_first=True):
            columns = {name: _of(getattr(events, name), dtype, which) for name, dtype in names.items()}
            self._fields(client)["events"] = RequestEvents(numbers=numbers.astype("<u4").tobytes(), **columns)

    def _add_logprobs(self, logprobs: Logprobs) -> None:
        counts = np.frombuffer(logprobs.counts, "<u4").astype(np.int64)
        for client, which, numbers in self._split(np.frombuffer(logprobs.numbers, "<u4")):
            entries = _ragged(counts, which)
            self._fields(client)["logprobs"] = Logprobs(
                numbers=numbers.astype("<u4").tobytes(),
                positions=_of(logprobs.positions, "<u4", which),
                counts=_of(logprobs.counts, "<u4", which),
                ranks=_of(logprobs.ranks, "<u4", which),
                token_ids=_of(logprobs.token_ids, "<i4", entries),
                values=_of(logprobs.values, "<f4", entries),
                choices=_of(logprobs.choices, "<u2", which),
            )

    def _add_pooled(self, pooled: Pooled) -> None:
        counts, widths = (np.frombuffer(column, "<u4").astype(np.int64) for column in (pooled.counts, pooled.widths))
        for client, which, numbers in self._split(np.frombuffer(pooled.numbers, "<u4")):
            self._fields(client)["pooled"] = Pooled(
                numbers=numbers.astype("<u4").tobytes(),
                counts=_of(pooled.counts, "<u4", which),
                widths=_of(pooled.widths, "<u4", which),
                values=_of(pooled.values, "<f4", _ragged(counts * widths, which)),
            )

    def _split(self, tickets: AnyInts, *, is_first: bool = False) -> list[tuple[int, Ints, Ints]]:
        """Return (client, indices of its entries, their numbers) of entries by ticket; entries of old tickets are left
        out.

        is_first: also of moved requests, whose clients already got such entries when they ran elsewhere.
        """
        requests = self._requests
        rows = requests.rows_of(tickets)
        known = rows >= 0
        if is_first:
            known &= ~requests.moved[rows]
        kept = known.nonzero()[0]
        groups = _groups(requests.client[rows[kept]])
        return [(client, kept[which], requests.theirs[rows[kept[which]]]) for client, which in groups]


def _groups(clients: Ints) -> list[tuple[int, Ints]]:
    """Return each client with the indices of its entries, ascending."""
    if not len(clients):
        return []
    if (clients == clients[0]).all():  # the usual case; the general one takes ten times as long for a few entries
        return [(int(clients[0]), np.arange(len(clients)))]
    order = clients.argsort(kind="stable")
    sorted_clients = clients[order]
    cuts = np.flatnonzero(np.diff(sorted_clients)) + 1
    firsts = sorted_clients[np.concatenate([[0], cuts])].tolist()
    return list(zip(firsts, np.split(order, cuts), strict=True))


def _take(outputs: Outputs, columns: OutputColumns, which: Ints, skipped: Ints | None = None) -> Outputs:
    """Return the message with these rows only. skipped: tokens to leave out at the beginning of each."""
    counts, positions = columns.counts[which], columns.positions[which]
    if skipped is None:
        skipped = np.zeros(len(which), np.int64)
    tokens = columns.tokens[_ragged(columns.counts, which, skipped)]
    places = {row: place for place, row in enumerate(which.tolist())}
    return msgspec.structs.replace(
        outputs,
        numbers=columns.numbers[which].astype("<u4").tobytes(),
        positions=(positions + skipped).astype("<u4").tobytes(),
        counts=(counts - skipped).astype("<u2").tobytes(),
        tokens=tokens.tobytes(),
        choices=_of(outputs.choices, "<u2", which),
        finish=_of(outputs.finish, np.uint8, which),
        stop_tokens=[(places[row], token) for row, token in outputs.stop_tokens if row in places],
    )


def _of(column: bytes, dtype: Any, which: Ints) -> bytes:
    """Return these entries of a column; an empty column stays empty."""
    return np.frombuffer(column, dtype)[which].tobytes() if column else b""


def _ragged(counts: Ints, which: Ints, skipped: Ints | None = None) -> Ints:
    """Return the indices of the entries of these rows, where row i has counts[i] entries. skipped: first entries of
    each to leave out.
    """
    starts, lengths = (counts.cumsum() - counts)[which], counts[which]
    if skipped is not None:
        starts, lengths = starts + skipped, lengths - skipped
    places = lengths.cumsum() - lengths
    indices: Ints = np.repeat(starts - places, lengths) + np.arange(int(lengths.sum()))
    return indices
