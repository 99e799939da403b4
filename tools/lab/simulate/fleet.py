"""A fleet of engines in virtual time: one heap of events by time."""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from core.execution.executor import ModelInfo
from frontend.fleet.placement import Placement
from frontend.fleet.prefix_index import PrefixIndex
from frontend.fleet.replicas import Replicas
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Ints
from ipc.wire.block_roots import root_of_message
from ipc.wire.kv_events import KVEvent
from ipc.wire.messages import AddRequest, Outputs, RequestFailed
from ipc.wire.scheduling_messages import KVEvents
from tools.commands.replay.latency import Times
from tools.commands.replay.what_if.step_time import StepTime
from tools.lab.simulate.replica import Replica, Said
from tools.lab.traces.workload import TimedRequest

_NEVER = -1
_ROUTER = -1  # the router's client number at each replica that it follows
_BY_PREFIX = "prefix"
_NS = 1e-9
_MAX_IDLE_CALLS = 100_000  # consecutive steps of all replicas in which nothing ends: then the fleet is stuck


class FleetRun(NamedTuple):
    """What a simulated fleet did. Columns have one entry for each request, in virtual ns; -1: it never happened."""

    arrivals: Ints
    first_tokens: Ints
    last_tokens: Ints
    num_tokens: Ints
    ends: Ints
    replicas: Ints  # that each request ran on
    num_calls: int  # of the engines
    num_preemptions: int
    num_cached_tokens: int
    end_ns: int

    def times(self) -> list[Times]:
        """Return the times of the requests in seconds."""
        columns = (self.arrivals, self.first_tokens, self.last_tokens, self.ends, self.num_tokens)
        return [
            Times(arrival * _NS, _seconds(first), _seconds(last), _seconds(end), count)
            for arrival, first, last, end, count in zip(*(one.tolist() for one in columns), strict=True)
        ]


def simulate_fleet(
    config: ResolvedConfig,
    info: ModelInfo,
    requests: Sequence[TimedRequest],
    time: StepTime,
    *,
    num_replicas: int,
    route: str = "least_loaded",
    joins_steps: bool = True,
) -> FleetRun:
    """Run the requests, in order of arrival, until all have ended or none makes progress.

    config: of each replica. route: one of POLICIES in
    frontend/fleet/placement.py. joins_steps: see tools/lab/simulate/replica.py.
    """
    replicas = [Replica(config, info, time, joins_steps=joins_steps) for _ in range(num_replicas)]
    fleet = _Fleet(replicas, requests, route)
    fleet.run()
    return fleet.result()


class _News(NamedTuple):
    """What the router learns about a replica, ordered by time."""

    ns: int
    serial: int
    row: int  # of the replica
    num_queued: int = 0  # tokens of requests whose first token has arrived
    num_ended: int = 0  # requests
    events: Sequence[KVEvent] = ()


class _Fleet:
    def __init__(self, replicas: list[Replica], requests: Sequence[TimedRequest], route: str) -> None:
        count = len(requests)
        self._replicas, self._requests = replicas, requests
        self._table, self._index = Replicas(), PrefixIndex()
        for number, replica in enumerate(replicas):
            row = self._table.add(f"{number}").row  # which may replace the columns
            self._table.is_open[row] = True
            if route == _BY_PREFIX:
                replica.follow(_ROUTER)
        self._placement = Placement(self._table, route, 0)
        self._arrivals = np.array([one.arrival_ns for one in requests], np.int64)
        self._first, self._last, self._ends = (np.full(count, _NEVER, np.int64) for _ in range(3))
        self._counts, self._missing = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._of = np.full(count, _NEVER, np.int64)
        self._due: list[tuple[int, int]] = []  # (ns, replica), a heap; outdated entries stay in it
        self._news: list[_News] = []  # a heap of news for the router
        self._num_news = self._end_ns = self._num_idle = 0

    def run(self) -> None:
        """Process the events in order."""
        for number, request in enumerate(self._requests):
            self._run_until(request.arrival_ns)
            self._learn(request.arrival_ns)
            index = self._place(number, request.message)
            self._note(index, self._replicas[index].submit(request.client, request.message, request.arrival_ns))
            self._push(index)
        self._run_until(None)

    def result(self) -> FleetRun:
        """Return the results."""
        stats = [one.stats for one in self._replicas]
        calls = sum(one.num_calls for one in self._replicas)
        return FleetRun(
            arrivals=self._arrivals,
            first_tokens=self._first,
            last_tokens=self._last,
            num_tokens=self._counts,
            ends=self._ends,
            replicas=self._of,
            num_calls=calls,
            num_preemptions=sum(one[0] for one in stats),
            num_cached_tokens=sum(one[1] for one in stats),
            end_ns=self._end_ns,
        )

    def _place(self, number: int, message: AddRequest) -> int:
        """Choose the replica of a request, as frontend/fleet/dispatch.py does, and count the request there."""
        tokens, table = message.prompt_token_ids, self._table
        matches = self._index.match(root_of_message(message), tokens) if self._placement.needs_matches else {}
        index = self._placement.choose(matches, len(tokens) // 4)
        self._of[number] = index
        self._missing[number] = missing = max(1, len(tokens) // 4 - matches.get(index, 0))
        table.queued[index] += missing
        table.given[index] += missing
        table.live[index] += 1
        return index

    def _run_until(self, now_ns: int | None) -> None:
        """Run what is due before now_ns; None: everything."""
        while self._due and (now_ns is None or self._due[0][0] < now_ns) and self._num_idle < _MAX_IDLE_CALLS:
            due_ns, index = heapq.heappop(self._due)
            replica = self._replicas[index]
            if not replica.has_work or replica.due_ns != due_ns:
                continue  # a newer entry has replaced this one
            self._num_idle += 1
            self._note(index, replica.run_until(due_ns))
            self._push(index)

    def _learn(self, now_ns: int) -> None:
        """Give the router all news up to now."""
        table = self._table
        while self._news and self._news[0].ns <= now_ns:
            news = heapq.heappop(self._news)
            table.queued[news.row] -= news.num_queued
            table.live[news.row] -= news.num_ended
            if news.events:
                self._index.apply(news.row, news.events)

    def _tell(self, ns: int, row: int, **what: Any) -> None:
        self._num_news += 1
        heapq.heappush(self._news, _News(ns, self._num_news, row, **what))

    def _push(self, index: int) -> None:
        if self._replicas[index].has_work:
            heapq.heappush(self._due, (self._replicas[index].due_ns, index))

    def _note(self, index: int, said: Sequence[Said]) -> None:
        for client, reply, end_ns, _ in said:
            if client == _ROUTER:
                if isinstance(reply, KVEvents):
                    self._tell(end_ns, index, events=reply.events)
            elif isinstance(reply, RequestFailed):
                self._end(index, np.array([reply.number]), end_ns)
            elif isinstance(reply, Outputs):
                self._note_outputs(index, reply, end_ns)

    def _note_outputs(self, index: int, outputs: Outputs, end_ns: int) -> None:
        numbers, counts = np.frombuffer(outputs.numbers, "<u4"), np.frombuffer(outputs.counts, "<u2")
        yielding = numbers[counts > 0]
        beginning = yielding[self._counts[yielding] == 0]
        self._first[beginning] = end_ns
        self._last[yielding] = end_ns
        self._counts[yielding] += counts[counts > 0]
        if len(beginning):
            self._tell(end_ns, index, num_queued=int(self._missing[beginning].sum()))
            self._missing[beginning] = 0
        if outputs.finish:
            self._end(index, numbers[np.frombuffer(outputs.finish, "u1") > 0], end_ns)

    def _end(self, index: int, numbers: Ints, end_ns: int) -> None:
        self._ends[numbers] = end_ns
        self._tell(end_ns, index, num_ended=len(numbers), num_queued=int(self._missing[numbers].sum()))
        self._missing[numbers] = 0
        self._end_ns, self._num_idle = max(self._end_ns, end_ns), 0


def _seconds(ns: int) -> float | None:
    return None if ns == _NEVER else ns * _NS
