"""RequestMeter: measures requests at the engine's border, where all of them pass.

A time starts when the border has received a request and ends when it hands over the tokens. So it includes the waits
that a client sees, but not the network or the client's own work. Names and buckets are vLLM's, so that dashboards work.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from ipc.tables.arrays import Ints
from ipc.wire.messages import FinishReason, Outputs, RequestFailed, ServerMessage, Submission
from ipc.wire.metrics_messages import Histogram, Metrics
from ipc.wire.scheduling_messages import EventKind, RequestEvents

# fmt: off
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_NS = 1e-9
_CHOICE_BITS = 16


class Log(Protocol):
    """Writes a log line with fields."""

    def __call__(self, text: str, **fields: object) -> None: ...


_NO_KEYS: Ints = np.empty(0, np.int64)


class _Ended(NamedTuple):
    """The measurements of one ended choice, by the names of their histograms; nan = none."""

    e2e_request_latency_seconds: float
    request_queue_time_seconds: float
    request_prefill_time_seconds: float
    request_decode_time_seconds: float
    request_inference_time_seconds: float
    request_time_per_output_token_seconds: float
    request_prompt_tokens: float
    request_generation_tokens: float
    request_num_preemptions: float
    request_params_max_tokens: float
    request_params_n: float  # once per request, when its last choice ends
    request_max_num_generation_tokens: float  # likewise, for the longest choice


class _Group(msgspec.Struct, eq=False):
    """What the choices of one request share."""

    request: Submission
    arrival: float
    num_open: int
    client: int
    num_prompt_tokens: int
    longest: int = 0  # output tokens
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first: float = 0.0
    scheduled: float = 0.0
    num_preemptions: int = 0


class _Choice(msgspec.Struct, eq=False):
    """One live choice. Times: monotonic seconds; 0 = not yet."""

    group: _Group
    scheduled: float = 0.0
    first: float = 0.0
    num_preemptions: int = 0


class _Client(msgspec.Struct, eq=False):
    """The live choices of one client, by key: number and choice combined into one integer.

    Choices that got a token in the last message with tokens share the time of their last token. The others are strays.
    """

    choices: dict[int, _Choice] = msgspec.field(default_factory=dict)
    time: float = 0.0
    frame: tuple[bytes, bytes] = (b"", b"")  # columns numbers and choices of that message, if none of its rows ended
    keys: Ints = msgspec.field(default_factory=lambda: _NO_KEYS)  # keys of its rows, without those that ended
    strays: dict[int, float] = msgspec.field(default_factory=dict)  # key -> time of the last token


class RequestMeter:
    """The measurements of all requests. Call it with the socket's lock held. Times: monotonic seconds.

    log: called at each request's end; None = it is not logged.

    If each client has the same requests in a step as in the previous one, the step costs one histogram update per
    client.
    """

    def __init__(self, max_model_len: int, log: Log | None = None) -> None:
        self._log = log
        tokens = decades(max_model_len)
        bounds = dict.fromkeys(_Ended._fields, _REQUEST_S) | {
            "request_time_per_output_token_seconds": _TOKEN_S,
            "request_prompt_tokens": tokens,
            "request_generation_tokens": tokens,
            "request_num_preemptions": (0.0, *_CHOICES),
            "request_params_max_tokens": tokens,
            "request_params_n": _CHOICES,
            "request_max_num_generation_tokens": tokens,
        }
        self._ended = Samples(bounds)
        self._first_token = Samples({"time_to_first_token_seconds": _FIRST_TOKEN_S})
        self._next_token = Samples({"inter_token_latency_seconds": _TOKEN_S})
        self._clients: dict[int, _Client] = {}
        self._arrived: list[tuple[int, Submission, float]] = []  # requests of clients that are not in there yet
        self._num_finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._num_refused: dict[str, int] = {}

    def metrics(self, call: int, num_sessions: int) -> Metrics:
        """Return everything measured so far as the answer to a call."""
        samples = (self._first_token, self._next_token, self._ended)
        histograms = {name: histogram for each in samples for name, histogram in each.histograms().items()}
        return Metrics(call, True, histograms, dict(self._num_finished), dict(self._num_refused), num_sessions)

    def note_request(self, client: int, request: Submission, refusal: RequestFailed | None, now: float) -> None:
        """Record a request that has arrived, and its refusal. A request that is sent twice counts once.

        It is entered later, because its first token waits for what happens here, but not for what follows a message.
        """
        if refusal is not None:
            name = refusal.code.name
            self._num_refused[name] = self._num_refused.get(name, 0) + 1
            if self._log is not None:
                self._log("request refused", client=client, number=request.number, reason=name)
            return
        self._arrived.append((client, request, now))

    def _enter_arrived(self) -> None:
        for client, request, arrival in self._arrived:
            own = self._clients.setdefault(client, _Client())
            first = request.number << _CHOICE_BITS
            if first not in own.choices:
                group = _Group(request, arrival, request.params.n, client, len(request.prompt_token_ids) // 4)
                for choice in range(request.params.n):
                    own.choices[first + choice] = _Choice(group)
        self._arrived.clear()

    def note_messages(self, messages: Sequence[tuple[int, ServerMessage]], now: float) -> None:
        """Record the messages of a step as they are handed over."""
        self._enter_arrived()
        for client, message in messages:
            own = self._clients.get(client)
            if own is None:
                continue
            if isinstance(message, Outputs):
                if message.events is not None:
                    self._note_events(own, message.events)
                if message.started and self._log is not None:
                    self._note_cached(own, message.started)
                if message.numbers:
                    self._note_outputs(own, message, now)
            elif isinstance(message, RequestFailed):
                first = message.number << _CHOICE_BITS
                failed = own.choices.get(first)
                for choice in range(0 if failed is None else failed.group.request.params.n):
                    self._forget(own, first + choice, "error", now)

    def forget_client(self, client: int) -> None:
        """Count a client's remaining requests as aborted."""
        self._enter_arrived()
        own = self._clients.pop(client, _Client())
        for key in list(own.choices):
            self._forget(own, key, "abort", None)

    # --- one client's messages ---

    def _note_outputs(self, own: _Client, message: Outputs, now: float) -> None:
        if not message.finish and (message.numbers, message.choices) == own.frame:
            self._next_token.add_many(now - own.time, len(own.keys))
            own.time = now
            return
        keys = np.frombuffer(message.numbers, "<u4").astype(np.int64) << _CHOICE_BITS
        if message.choices:
            keys += np.frombuffer(message.choices, "<u2")
        counts = np.frombuffer(message.counts, "<u2")
        positions = np.frombuffer(message.positions, "<u4")
        has_tokens = counts > 0
        num_with_tokens = np.count_nonzero(has_tokens)
        if num_with_tokens:
            self._note_tokens(own, keys[has_tokens], positions[has_tokens], now)
        if message.finish:
            ends = np.frombuffer(message.finish, np.uint8)
            for row in np.flatnonzero(ends).tolist():
                num_tokens = int(positions[row]) + int(counts[row])
                self._end(own, int(keys[row]), FinishReason(int(ends[row])), num_tokens, now)
            if num_with_tokens == len(keys):
                own.keys = keys[ends == 0]
            else:  # rows without tokens: aborts, which have their own message
                own.keys = own.keys[np.isin(own.keys, keys[ends > 0], invert=True)]
            own.frame = (b"", b"")
        elif num_with_tokens == len(keys):
            own.frame = (message.numbers, message.choices)

    def _note_tokens(self, own: _Client, keys: Ints, positions: Ints, now: float) -> None:
        """Record that these choices got tokens. Most of them got their previous tokens together."""
        is_first = positions == 0
        going_on = keys[~is_first]
        if np.array_equal(going_on, own.keys):
            self._next_token.add_many(now - own.time, len(going_on))
        else:
            missing = dict.fromkeys(own.keys.tolist())
            for key in going_on.tolist():
                if key in missing:
                    del missing[key]
                    self._next_token.add_many(now - own.time, 1)
                elif key in own.strays:
                    self._next_token.add_many(now - own.strays.pop(key), 1)
                elif key in own.choices:  # it continues after tokens that its client got from an earlier engine
                    own.choices[key].first = now
            own.strays |= dict.fromkeys((key for key in missing if key in own.choices), own.time)
        for key in keys[is_first].tolist():
            choice = own.choices.get(key)
            if choice is not None:
                choice.first = now
                choice.group.first = choice.group.first or now
                self._first_token.add((now - choice.group.arrival,))
        own.keys, own.time, own.frame = keys, now, (b"", b"")

    def _note_events(self, own: _Client, events: RequestEvents) -> None:
        numbers, kinds = np.frombuffer(events.numbers, "<u4"), np.frombuffer(events.kinds, np.uint8)
        choices, times = np.frombuffer(events.choices, "<u2"), np.frombuffer(events.times, "<i8")
        keys = (numbers.astype(np.int64) << _CHOICE_BITS) + choices
        for key, kind, time_ns in zip(keys.tolist(), kinds.tolist(), times.tolist(), strict=True):
            choice = own.choices.get(key)
            if choice is not None and kind == EventKind.SCHEDULED:
                choice.scheduled = time_ns * _NS
                choice.group.scheduled = choice.group.scheduled or choice.scheduled
            elif choice is not None and kind == EventKind.PREEMPTED:
                choice.num_preemptions += 1
                choice.group.num_preemptions += 1

    @staticmethod
    def _note_cached(own: _Client, started: bytes) -> None:
        for number, num_cached in np.frombuffer(started, "<u4").reshape(-1, 2).tolist():
            choice = own.choices.get(number << _CHOICE_BITS)
            if choice is not None:
                choice.group.num_cached_tokens = num_cached

    def _end(self, own: _Client, key: int, reason: FinishReason, num_tokens: int, now: float) -> None:
        last = own.strays.get(key, own.time)  # for a choice without a token: not used
        choice = own.choices.get(key)
        if choice is None:
            return
        group, nan = choice.group, math.nan
        group.longest = max(group.longest, num_tokens)
        group.num_output_tokens += num_tokens
        self._forget(own, key, reason.name.lower(), now)
        begun, answered = choice.scheduled, choice.first
        is_whole = group.num_open == 0  # the request has ended
        self._ended.add(
            _Ended(
                e2e_request_latency_seconds=now - group.arrival,
                request_queue_time_seconds=max(0.0, begun - group.arrival) if begun else nan,
                request_prefill_time_seconds=answered - begun if begun and answered else nan,
                request_decode_time_seconds=last - answered if answered else nan,
                request_inference_time_seconds=last - begun if begun and answered else nan,
                request_time_per_output_token_seconds=(last - answered) / (num_tokens - 1)
                if answered and num_tokens > 1
                else nan,
                request_prompt_tokens=group.num_prompt_tokens,
                request_generation_tokens=num_tokens,
                request_num_preemptions=choice.num_preemptions,
                request_params_max_tokens=group.request.params.max_tokens or nan,
                request_params_n=group.request.params.n if is_whole else nan,
                request_max_num_generation_tokens=group.longest if is_whole else nan,
            )
        )

    def _forget(self, own: _Client, key: int, reason: str, now: float | None) -> None:
        """End a choice, and log its request with the last one. now: None = its client has gone."""
        choice = own.choices.pop(key, None)
        own.strays.pop(key, None)
        if choice is None:
            return
        group = choice.group
        group.num_open -= 1
        self._num_finished[reason] += 1
        if group.num_open == 0 and self._log is not None:
            self._log("request ended", **_described(group, reason if now is not None else "client gone", now))


def _described(group: _Group, reason: str, now: float | None) -> dict[str, object]:
    """Return the log fields for a request that has ended. Times: milliseconds; None = unknown.

    A request that arrives may be taken by a step that was about to start. Then the step's time is before its arrival.
    """

    def ms(end: float | None) -> float | None:
        return round(max(0.0, end - group.arrival) * 1000, 1) if end else None

    return {
        "client": group.client,
        "number": group.request.number,
        "reason": reason,
        "prompt_tokens": group.num_prompt_tokens,
        "cached_tokens": group.num_cached_tokens,
        "output_tokens": group.num_output_tokens,
        "choices": group.request.params.n,
        "queue_ms": ms(group.scheduled),
        "first_token_ms": ms(group.first),
        "total_ms": ms(now),
        "preemptions": group.num_preemptions,
    }


# Samples: values gathered in a list, and counted into histogram buckets on demand.


_MOST_KEPT = 1024  # rows of values waiting to be counted


class Samples:
    """Histograms that get their values together: one row has a value for each; nan = none.

    bounds: upper bounds of the buckets, by the histogram's name.
    """

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        self._bounds = {name: np.array(each, np.float64) for name, each in bounds.items()}
        self._lists = [list(each) for each in bounds.values()]
        self._counts = {name: np.zeros(len(each) + 1, np.int64) for name, each in bounds.items()}
        self._totals = dict.fromkeys(bounds, 0.0)
        self._rows: list[Sequence[float]] = []
        self._first = next(iter(bounds))

    def add(self, row: Sequence[float]) -> None:
        """Add one value for each histogram, in the order of their names."""
        self._rows.append(row)
        if len(self._rows) >= _MOST_KEPT:
            self._count()

    def add_many(self, value: float, count: int) -> None:
        """Add one value `count` times to the first histogram."""
        self._counts[self._first][bisect_left(self._lists[0], value)] += count
        self._totals[self._first] += value * count

    def histograms(self) -> dict[str, Histogram]:
        """Return all histograms by name."""
        self._count()
        return {
            name: Histogram(bounds.tolist(), self._counts[name].tolist(), self._totals[name])
            for name, bounds in self._bounds.items()
        }

    def _count(self) -> None:
        if not self._rows:
            return
        columns = np.array(self._rows, np.float64).T
        self._rows = []
        for (name, bounds), column in zip(self._bounds.items(), columns, strict=True):
            values = column[~np.isnan(column)]
            buckets = np.searchsorted(bounds, values, side="left")
            self._counts[name] += np.bincount(buckets, minlength=len(bounds) + 1)
            self._totals[name] += float(values.sum())


def decades(highest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `highest`: vLLM's buckets for numbers of tokens."""
    values: list[float] = []
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if unit * factor > highest:
                return tuple(values)
            values.append(float(unit * factor))
        unit *= 10
