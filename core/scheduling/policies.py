"""The scheduling policies: who goes first, who makes room for whom.

A policy gives every request a rank (smaller goes first, ties by arrival) and a level (a waiting request may take slots,
blocks and token budget from running ones of a larger level). All else, for all policies alike, is in
core/scheduling/admission.py and core/scheduling/preemption.py.
"""

from typing import Protocol

import numpy as np

from core.batch.request import Request
from core.batch.table import BatchTable, RequestStart
from core.scheduling.virtual_time import TOKEN, VirtualTime
from core.scheduling.waiting_lines import FairLine, Line
from ipc.arrays import Bools, Ints, Rows
from ipc.config import EngineConfig

NS_PER_S = 1_000_000_000
_FARTHEST = 2**62  # ranks are int64; 146 years


class Policy(Protocol):
    """line: where requests wait. Rows are of running requests."""

    @property
    def line(self) -> Line | FairLine: ...

    def arrive(self, request: Request) -> None:
        """Set the new request's rank and level."""

    def end(self, request: Request) -> None:
        """The request has ended; it is in no line and has no row."""

    def forget(self, client: int) -> None:
        """The client is gone."""

    def set_weight(self, client: int, weight: float) -> None:
        """The client's share."""

    def start(self, start: RequestStart) -> None:
        """A request starts."""

    def serve(self, rows: Rows, counts: Ints) -> None:
        """These rows get so many tokens in this step, which are not counted as computed yet; those of requests that
        start are left out."""

    def in_order(self, rows: Ints) -> Ints:
        """The rows, first to be served first."""

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        """Which of the rows make room for this waiting request."""

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        """Columns, the most significant first: the row with the largest values is the first victim."""


class Fcfs:
    """First come, first served; the priority of requests is ignored."""

    def __init__(self, table: BatchTable) -> None:
        self.line: Line = Line()
        self._table = table

    def arrive(self, request: Request) -> None:
        request.rank = request.level = 0

    def end(self, request: Request) -> None:
        """Nothing is kept of it."""

    def forget(self, client: int) -> None:
        """Nothing is kept of clients."""

    def set_weight(self, client: int, weight: float) -> None:
        """Clients do not matter."""

    def start(self, start: RequestStart) -> None:
        """Served tokens do not matter."""

    def serve(self, rows: Rows, counts: Ints) -> None:
        """Served tokens do not matter."""

    def in_order(self, rows: Ints) -> Ints:
        """rows are in this order already: ranks do not change while a request runs."""
        return rows

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        return np.zeros(len(rows), np.bool_)

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        return ()


class Priority(Fcfs):
    """Smaller priority first, then arrival. With aging a request goes before one that is n priorities more urgent when
    it came more than n * aging_seconds earlier; room is taken only from less urgent ones all the same."""

    def __init__(self, table: BatchTable, aging_seconds: float) -> None:
        super().__init__(table)
        self._aging_ns = round(aging_seconds * NS_PER_S)

    def arrive(self, request: Request) -> None:
        request.level = request.priority
        rank = request.arrival_ns + request.priority * self._aging_ns if self._aging_ns else request.priority
        request.rank = max(-_FARTHEST, min(rank, _FARTHEST))

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        table = self._table
        rank, level = table.rank[rows], table.level[rows]
        later = (rank > request.rank) | ((rank == request.rank) & (table.serial[rows] > request.serial))
        yields: Bools = (level > request.level) & later
        return yields

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        return (self._table.level[rows],)


class Fair:
    """Every client its weighted share of tokens, and what others leave; within a client priority, then arrival.

    A waiting request takes room from a client that is more than `quantum` tokens ahead of its own, and within its
    client from less urgent requests. What is computed again after a preemption is not counted: else two clients with
    long prompts would take each other's room for ever, each ahead again before it has one new token.
    """

    def __init__(self, table: BatchTable, quantum: int) -> None:
        self._table = table
        self._quantum = quantum * TOKEN
        self._times = VirtualTime()
        self.line: FairLine = FairLine(self._times)

    def arrive(self, request: Request) -> None:
        self._times.enter(request.client)
        request.rank = request.level = request.priority

    def end(self, request: Request) -> None:
        self._times.leave(request.client)

    def forget(self, client: int) -> None:
        self._times.forget(client)

    def set_weight(self, client: int, weight: float) -> None:
        self._times.set_weight(client, weight)

    def start(self, start: RequestStart) -> None:
        new = start.num_computed_tokens + start.num_tokens - start.request.num_computed_before
        self._times.charge_one(start.request.client, max(0, min(new, start.num_tokens)))

    def serve(self, rows: Rows, counts: Ints) -> None:
        table = self._table
        new = table.num_computed_tokens[rows] + counts - table.num_computed_before[rows]
        self._times.charge(table.client[rows], np.clip(new, 0, counts))

    def in_order(self, rows: Ints) -> Ints:
        table = self._table
        order = np.lexsort((table.serial[rows], table.rank[rows], table.client[rows], self._at(rows)))
        return rows[order]

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        own = self._table.client[rows] == request.client
        less_urgent = self._table.level[rows] > request.level
        ahead = self._at(rows) > self._times.of(request.client) + self._quantum
        yields: Bools = np.where(own, less_urgent, ahead)
        return yields

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        return self._at(rows), self._table.client[rows], self._table.level[rows]

    def _at(self, rows: Rows) -> Ints:
        return self._times.at(self._table.client[rows])


def build_policy(config: EngineConfig, table: BatchTable) -> Policy:
    """That of --scheduling-policy."""
    match config.scheduling_policy:
        case "fcfs":
            return Fcfs(table)
        case "priority":
            return Priority(table, config.priority_aging_seconds)
        case "fair":
            return Fair(table, config.fair_quantum)
