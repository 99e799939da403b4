"""Dispatch: where each request is placed, and which requests wait in the fleet's queue.

A request is at most at one replica. It is placed on arrival, and waits only if no replica takes it: in order of
arrival, so that one that has lost its replica precedes those that arrived later.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from frontend.fleet.forwarding import Routed
from frontend.fleet.placement import Matches, Placement
from frontend.fleet.prefix_index import PrefixIndex
from frontend.fleet.replicas import NO_REPLICA, Replica, Replicas, ReplicaState
from frontend.fleet.requests import RoutedRequests
from frontend.fleet.suspects import Suspects
from ipc.tables.arrays import Bools
from ipc.wire.messages import Abort, AddRequest, FinishReason, encode

Send = Callable[[int, bytes], None]  # (row of the replica, frame)


class TooLong(NamedTuple):
    """A request that has become too long for a message."""

    row: int
    num_bytes: int


class Dispatch:
    """The queue and the placements. send: takes a frame for a replica. prefill_min_tokens: see Stages."""

    def __init__(self, policy: str, seed: int, send: Send, prefill_min_tokens: int) -> None:
        self.replicas = Replicas()
        self.requests = RoutedRequests()
        self.stages = Stages(self.replicas, self.requests, prefill_min_tokens)
        self.index = PrefixIndex()
        self.suspects = Suspects()
        self.pauses_new = self.pauses_all = False
        self.held: set[int] = set()  # clients that do not read, whose requests do not run
        self.num_moved = 0  # number of requests placed again
        self.num_cached_tokens = 0  # cached tokens that placements relied on
        self._placement = Placement(self.replicas, policy, seed)
        self._send = send
        self._queue: list[tuple[int, int]] = []  # a heap of (order, row); an entry is valid while its row waits

    @property
    def has_queue(self) -> bool:
        """Return whether requests may wait here."""
        return bool(self._queue)

    @property
    def num_queued(self) -> int:
        """Return the number of requests that wait here."""
        return int(np.count_nonzero(self.requests.waits)) if self._queue else 0

    # --- the queue ----------------------------------------------------------------------------------------------

    def put(self, row: int) -> None:
        """Put a request into the queue, in order of arrival, or outside it while it must not run."""
        requests = self.requests
        is_held = self.pauses_all or (self.pauses_new and not requests.begun[row])
        if is_held or int(requests.client[row]) in self.held:
            requests.parked[row] = True
            return
        requests.parked[row] = False
        requests.waits[row] = True
        heapq.heappush(self._queue, (int(requests.order[row]), row))

    def place_waiting(self, now: float) -> list[TooLong]:
        """Place requests from the queue as long as replicas take them; return those that have become too long."""
        requests, apart, too_long = self.requests, list[tuple[int, int]](), list[TooLong]()
        while self._queue and np.count_nonzero(self.replicas.is_open):
            order, row = heapq.heappop(self._queue)
            if not requests.waits[row] or requests.order[row] != order:
                continue
            if self.suspects.must_be_alone(row):
                taken = self.suspects.replicas_with_one(requests)
                if not self._place(row, now, too_long, without=taken):
                    apart.append((order, row))
            else:
                self._place(row, now, too_long)
        for entry in apart:
            heapq.heappush(self._queue, entry)
        return too_long

    def _place(self, row: int, now: float, too_long: list[TooLong], without: frozenset[int] = frozenset()) -> bool:
        """Send a request to the replica that placement chooses; return False if none is left."""
        requests, replicas = self.requests, self.replicas
        tokens = requests.token_ids(row)
        num_tokens = len(tokens) // 4
        matches = self.index.match(int(requests.root[row]), tokens) if self._placement.needs_matches else {}
        closed = [one for one in without if replicas.is_open[one]]
        for one in closed:
            replicas.is_open[one] = False
        for one in self.stages.closed_for(row, matches, num_tokens):
            replicas.is_open[one] = False
            closed.append(one)
        at = self._placement.choose(matches, num_tokens)
        for one in closed:
            replicas.is_open[one] = True
        if at == NO_REPLICA:
            return False
        replica = replicas.by_row[at]
        assert replica.welcome is not None, replica
        if requests.placed[row]:
            requests.renew_ticket(row)
        requests.placed[row], requests.moved[row] = True, requests.begun[row]
        self.stages.begin(row, at, matches, num_tokens)
        frames = [encode(message) for message in self.stages.messages(row, requests.messages(row, now))]
        requests.waits[row] = False
        if len(frames[0]) > replica.welcome.limits.max_message_bytes:
            too_long.append(TooLong(row, len(frames[0])))
            return True
        cached = matches.get(at, 0)
        missing = 1 if requests.prefilled[row] else max(1, num_tokens - cached)
        self.num_cached_tokens += cached
        self.num_moved += bool(requests.moved[row])
        requests.replica[row], requests.missing[row] = at, missing
        requests.runs[row] = False
        replicas.queued[at] += missing
        replicas.given[at] += missing
        replicas.live[at] += 1
        for frame in frames:
            self._send(at, frame)
        return True

    # --- placed requests ----------------------------------------------------------------------------------------

    def note_tokens(self, rows: list[int]) -> None:
        """Note the first tokens of placed requests."""
        requests, replicas = self.requests, self.replicas
        for row in rows:
            replicas.queued[requests.replica[row]] -= requests.missing[row]
            requests.missing[row] = 0
            requests.begin(row)

    def release(self, row: int) -> None:
        """Remove a request from its replica's load: it has ended there, or moves."""
        requests, replicas = self.requests, self.replicas
        at = int(requests.replica[row])
        if at != NO_REPLICA:
            replicas.queued[at] -= requests.missing[row]
            replicas.live[at] -= 1
            requests.replica[row], requests.missing[row], requests.runs[row] = NO_REPLICA, 0, False
            self.reopen(replicas.by_row[at])

    def reopen(self, replica: Replica) -> None:
        """Allow requests to a replica that was full: it has room, or time has passed."""
        if replica.state is ReplicaState.FULL:
            replica.state = ReplicaState.OPEN
            self.replicas.is_open[replica.row] = True

    def withdraw(self, rows: list[int]) -> None:
        """Take requests back from their replicas, which are told to abort them; their later messages are dropped.

        The caller queues them or keeps them.
        """
        self.abort_at_replicas(rows)
        for row in rows:
            self.release(row)
            self.requests.renew_ticket(row)

    def abort_at_replicas(self, rows: list[int]) -> None:
        """Tell the replicas of these requests to abort them."""
        tickets: dict[int, list[int]] = {}
        for row in rows:
            if (at := int(self.requests.replica[row])) != NO_REPLICA:
                tickets.setdefault(at, []).append(self.requests.ticket(row))
        for at, numbers in tickets.items():
            self._send(at, encode(Abort(np.array(numbers, "<u4").tobytes())))

    def forget(self, row: int) -> None:
        """Remove a request that has ended."""
        self.release(row)
        self.suspects.clear(row)
        self.requests.forget(row)

    def lose(self, replica: Replica) -> list[int]:
        """Take all requests from a replica that is gone; return their rows, in order of arrival."""
        requests, rows = self.requests, self.requests.rows_at(replica.row)
        for row in rows:
            requests.replica[row], requests.missing[row] = NO_REPLICA, 0
        replicas = self.replicas
        replicas.queued[replica.row] = replicas.live[replica.row] = 0
        replicas.is_open[replica.row] = False
        self.index.forget(replica.row)
        return rows


# Stages: requests whose prompt one replica computes and whose output another, which fetches the prompt's KV blocks.
#
# A prefill replica gets the request with max_tokens=1. Its token is the request's first one, as at any replica; then
# the request continues elsewhere, like one whose replica was lost. The second replica fetches the blocks or computes
# them again (docs/scale_out.md), so nothing is held or waited for here.


_EXACT = "L2"  # the level at which another replica continues with the same tokens


class Ended(NamedTuple):
    """Outputs without the ends of first stages, and the first rows of the requests that ended one."""

    routed: Routed
    rows: list[int]


class Stages:
    """The stages of a fleet's requests. min_tokens: least tokens to compute of prompts with a first stage."""

    def __init__(self, replicas: Replicas, requests: RoutedRequests, min_tokens: int) -> None:
        self._replicas, self._requests, self._min_tokens = replicas, requests, min_tokens

    def closed_for(self, row: int, matches: Matches, num_tokens: int) -> list[int]:
        """Return the open replicas that must not get a request now: those of the other stage, unless all are."""
        replicas = self._replicas
        if not replicas.num_prefill:
            return []
        wanted = replicas.prefills if self._has_first(row, matches, num_tokens) else ~replicas.prefills
        if not (replicas.is_open & wanted).any():
            return []
        closed: list[int] = (replicas.is_open & ~wanted).nonzero()[0].tolist()
        return closed

    def begin(self, row: int, at: int, matches: Matches, num_tokens: int) -> None:
        """Note a request's replica."""
        is_first = bool(self._replicas.prefills[at]) and self._has_first(row, matches, num_tokens)
        self._requests.prefilling[row] = is_first

    def messages(self, row: int, messages: list[msgspec.Struct]) -> list[msgspec.Struct]:
        """Return the message for a replica, from the one for a replica that runs the whole request."""
        first = messages[0]
        if not self._requests.prefilling[row] or not isinstance(first, AddRequest):
            return messages
        params = first.params.changed(max_tokens=1, min_tokens=min(1, first.params.min_tokens))
        return [msgspec.structs.replace(first, params=params), *messages[1:]]

    def end(self, routed: Routed) -> Ended:
        """Remove ends of first stages from a replica's outputs: the request continues, so its client gets no end."""
        requests, columns = self._requests, routed.columns
        if (
            not self._replicas.num_prefill
            or columns.finish is None
            or not (which := self._ended(routed, columns.finish)).any()
        ):
            return Ended(routed, [])
        finish = np.where(which, 0, columns.finish).astype(np.uint8)
        outputs = msgspec.structs.replace(routed.outputs, finish=finish.tobytes())
        rows = requests.firsts(routed.rows[which])
        requests.prefilling[rows], requests.prefilled[rows] = False, True
        return Ended(Routed(outputs, columns._replace(finish=finish), routed.rows), rows)

    def _ended(self, routed: Routed, finish: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> Bools:
        ended: Bools = self._requests.prefilling[routed.rows] & (finish == FinishReason.LENGTH)
        return ended

    def _has_first(self, row: int, matches: Matches, num_tokens: int) -> bool:
        requests, replicas = self._requests, self._replicas
        if requests.prefilled[row]:
            return False
        request = requests.request(requests.ticket(row))
        if not isinstance(request, AddRequest) or request.params.n > 1 or request.params.use_beam_search:
            return False
        if request.params.max_tokens == 1 or request.params.prompt_logprobs is not None or requests.num_output(row):
            return False
        cached = max((tokens for at, tokens in matches.items() if not replicas.prefills[at]), default=0)
        if num_tokens - cached < self._min_tokens:
            return False
        welcomes = (one.welcome for one in replicas.sessions)
        return all(
            one is None or (one.numerics == _EXACT and num_tokens + 1 < one.limits.max_model_len) for one in welcomes
        )
