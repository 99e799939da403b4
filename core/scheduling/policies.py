"""The scheduling policies: which request goes first, and which rows must yield to which request.

A policy gives every request a rank (smaller goes first, ties by arrival) and a level (a waiting request may take slots,
blocks and token budget from running ones of a larger level). Everything else is the same for all policies and is in
core/scheduling/admission.py and core/scheduling/preemption.py.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from core.batch.request import Request
from core.batch.table import BatchTable, RequestStart
from core.scheduling.virtual_time import TOKEN, VirtualTime
from core.scheduling.waiting_lines import FairLine, Line
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Bools, Ints, Rows

NS_PER_S = 1_000_000_000
_FARTHEST = 2**62  # ranks are int64; 146 years


class Policy(Protocol):
    """A scheduling policy. `rows` are always rows of running requests."""

    @property
    def line(self) -> Line | FairLine:
        """Return the line in which requests wait."""

    def arrive(self, request: Request) -> None:
        """Set the new request's rank and level."""

    def end(self, requests: list[Request]) -> None:
        """Handle the end of requests, which are in no queue and have no rows."""

    def forget(self, party: int) -> None:
        """Forget a client or tenant that is gone."""

    def set_weight(self, party: int, weight: float) -> None:
        """Set the weight of a client or tenant: its share relative to others of weight 1."""

    def start(self, start: RequestStart) -> None:
        """Handle the start of a request."""

    def serve(self, rows: Rows, counts: Ints) -> None:
        """Record that these rows get counts [n] tokens in this step, which num_computed_tokens does not include yet.

        Rows of requests that start in this step are left out.
        """

    def in_order(self, rows: Ints) -> Ints:
        """Return the rows in the order in which they are served."""

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        """Return which of the rows must yield to this waiting request, bool [n].

        rows: all that are running. Those of one party are in the order of rank and arrival. A choice never takes the
        room of another choice whose blocks it shares, whatever this returns.
        """

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        """Return columns [n], most significant first. The row with the largest values is the first victim."""


class Fcfs:
    """First come, first served. The priority of requests is ignored."""

    def __init__(self, table: BatchTable) -> None:
        self.line: Line = Line()
        self._table = table

    def arrive(self, request: Request) -> None:
        """Give all requests the same rank and level."""
        request.rank = request.level = 0

    def end(self, requests: list[Request]) -> None:
        """Do nothing: this policy keeps no state of requests."""

    def forget(self, party: int) -> None:
        """Do nothing: this policy keeps no state of clients."""

    def set_weight(self, party: int, weight: float) -> None:
        """Do nothing: clients do not matter."""

    def start(self, start: RequestStart) -> None:
        """Do nothing: served tokens do not matter."""

    def serve(self, rows: Rows, counts: Ints) -> None:
        """Do nothing: served tokens do not matter."""

    def in_order(self, rows: Ints) -> Ints:
        """Return the rows unchanged. They are in this order already: ranks do not change while a request runs."""
        return rows

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        """Return False for all rows."""
        return np.zeros(len(rows), np.bool_)

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        """Return no columns."""
        return ()


class Priority(Fcfs):
    """Smaller priority first, then earlier arrival.

    With aging, a request goes before one that is n priorities more urgent if it arrived more than n * aging_seconds
    earlier. It still takes room only from less urgent requests.
    """

    def __init__(self, table: BatchTable, aging_seconds: float) -> None:
        super().__init__(table)
        self._aging_ns = round(aging_seconds * NS_PER_S)

    def arrive(self, request: Request) -> None:
        """Set the level to the priority, and the rank to the priority or, with aging, to the aged arrival in ns."""
        request.level = request.priority
        rank = request.arrival_ns + request.priority * self._aging_ns if self._aging_ns else request.priority
        request.rank = max(-_FARTHEST, min(rank, _FARTHEST))

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        """Return which rows are less urgent and also later in the queue."""
        table = self._table
        rank, level = table.rank[rows], table.level[rows]
        later = (rank > request.rank) | ((rank == request.rank) & (table.serial[rows] > request.serial))
        yields: Bools = (level > request.level) & later
        return yields

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        """Return the level: the least urgent row is the first victim."""
        return (self._table.level[rows],)


class Fair:
    """A weighted share of tokens for every party, plus what others leave. Within a party: priority, then arrival.

    A party is a client, or a tenant that clients name in their requests.

    A waiting request takes room from a party that is more than `quantum` tokens ahead of its own, and borrowed rows
    (core/scheduling/policies.py) from one that has a later place in the queue. Within its own party, it takes room from
    less urgent requests. So a request that yields is behind it in the queue, and cannot take the room back while its
    blocks are fenced. Tokens recomputed after a preemption are not counted. Otherwise two clients with long prompts
    would take each other's room forever, because each would be ahead again before it has one new token.
    """

    def __init__(self, table: BatchTable, quantum: int, max_num_seqs: int) -> None:
        self._table = table
        self._quantum = quantum * TOKEN
        self._times = VirtualTime()
        self._shares = RowShares(self._times, max_num_seqs)
        self.line: FairLine = FairLine(self._times)

    def arrive(self, request: Request) -> None:
        """Count the request for its client; set rank and level to the priority."""
        self._times.enter(request.party)
        request.rank = request.level = request.priority

    def end(self, requests: list[Request]) -> None:
        """Count the requests as ended."""
        for request in requests:
            self._times.leave(request.party)

    def forget(self, party: int) -> None:
        """Remove the client's virtual time."""
        self._times.forget(party)

    def set_weight(self, party: int, weight: float) -> None:
        """Set the client's weight."""
        self._times.set_weight(party, weight)

    def start(self, start: RequestStart) -> None:
        """Charge the tokens of the starting request that were not computed before."""
        new = start.num_computed_tokens + start.num_tokens - start.request.num_computed_before
        self._times.charge_one(start.request.party, max(0, min(new, start.num_tokens)))

    def serve(self, rows: Rows, counts: Ints) -> None:
        """Charge the rows' tokens that were not computed before."""
        table = self._table
        new = table.num_computed_tokens[rows] + counts - table.num_computed_before[rows]
        self._times.charge(table.party[rows], np.clip(new, 0, counts))

    def in_order(self, rows: Ints) -> Ints:
        """Return the rows by virtual time, then client, rank and serial."""
        table = self._table
        order = np.lexsort((table.serial[rows], table.rank[rows], table.party[rows], self._at(rows)))
        return rows[order]

    def must_yield(self, request: Request, rows: Rows) -> Bools:
        """Return which rows are less urgent rows of the same party, borrowed, or of a party too far ahead."""
        parties = self._table.party[rows]
        own = parties == request.party
        less_urgent: Bools = self._table.level[rows] > request.level
        num_own = int(np.count_nonzero(own))
        if num_own == len(own):
            return less_urgent
        lead = self._times.at(parties) - self._times.of(request.party)
        yields = lead > self._quantum
        if num_own < self._shares.of(request.party):
            yields |= self._times.behind(parties, request.party) & self._shares.borrowed(parties)
        return np.where(own, less_urgent, yields)

    def victim_keys(self, rows: Rows) -> tuple[Ints, ...]:
        """Return virtual time, client, level: the least urgent row of the client furthest ahead is the first victim."""
        return self._at(rows), self._table.party[rows], self._table.level[rows]

    def _at(self, rows: Rows) -> Ints:
        return self._times.at(self._table.party[rows])


#: Creates a policy for a table of running requests.
BuildPolicy: TypeAlias = Callable[[ResolvedConfig, BatchTable], Policy]


def build_policy(config: ResolvedConfig, table: BatchTable) -> Policy:
    """Return the policy of --scheduling-policy."""
    match config.scheduling_policy:
        case "fcfs":
            return Fcfs(table)
        case "priority":
            return Priority(table, config.priority_aging_seconds)
        case "fair":
            return Fair(table, config.fair_quantum, config.max_num_seqs)


# RowShares: how many rows of the batch each party is entitled to, and which running rows are borrowed.


class RowShares:
    """The rows [max_num_seqs] of the batch, divided among the parties with live requests by their weights.

    Each party is entitled to at least one row. It may borrow unused rows. Only a party with fewer rows than its
    entitlement may take one from another. So a row that is taken is never taken back by the same rule, and the rule
    preempts at most one row for each start.
    """

    def __init__(self, times: VirtualTime, max_num_seqs: int) -> None:
        self._times = times
        self._max_num_seqs = max_num_seqs

    def of(self, party: int) -> int:
        """Return the number of rows that one party is entitled to."""
        return int(self._due(np.array([party]))[0])

    def borrowed(self, parties: Ints) -> Bools:
        """Return which rows exceed the share of their party, bool [n]. They are the last ones of each party.

        parties: of all running rows [n]. The rows of one party are in the order in which they are served.
        """
        order = parties.argsort(kind="stable")
        together = parties[order]
        place = np.empty(len(parties), np.int64)  # place of each row among those of its party
        place[order] = np.arange(len(parties)) - together.searchsorted(together)
        is_borrowed: Bools = place >= self._due(parties)
        return is_borrowed

    def _due(self, parties: Ints) -> Ints:
        weights, total = self._times.weights(parties)
        return np.maximum(1, self._max_num_seqs * weights // total)
