"""Admission: which waiting requests start in this step, which rows are preempted for them, and why others wait."""

from typing import NamedTuple

import numpy as np

from core.batch.batch import Batch
from core.batch.request import Request
from core.batch.table import RequestStart
from core.scheduling.block_exchange import BlockExchange
from core.scheduling.decisions import Cause, Examined, Verdict
from core.scheduling.draft import Draft
from core.scheduling.limits import Limit, PartialPrefills
from core.scheduling.parts import SchedulerParts
from core.scheduling.preemption import Preemption
from ipc.tables.arrays import Ints
from ipc.tables.rounding import ceil_div

#: After this many preemptions by running requests, a request starts only with all the blocks that it can ever need.
MAX_PREEMPTIONS = 8


class Appraisal(NamedTuple):
    """What a waiting request would need to start now."""

    num_computed_tokens: int  # found in the cache or on the host; not computed again
    num_hits: int  # blocks found in the prefix cache
    num_missing_blocks: int  # to allocate in addition to the hits
    num_reserve_blocks: int  # kept free: the watermark, and more after each preemption


class Admission:
    """Starts waiting requests, examining them in the policy's order.

    A request that lacks blocks or a limit's resource (a verdict above HOLDS_THE_REST) lets at most
    `admission_lookahead` others pass during its life. After that the resource is reserved for it. Any other verdict
    holds all requests behind it.
    """

    def __init__(self, parts: SchedulerParts, preemption: Preemption) -> None:
        config, batch, policy = parts.config, parts.batch, parts.policy
        self._batch, self._waiting, self._policy, self._preemption = batch, parts.waiting, policy, preemption
        self._block_size = batch.block_size
        self._delay = Delay(config.scheduler_delay_factor)
        self._lookahead = config.admission_lookahead
        self._watermark = self.num_watermark_blocks = int(config.watermark * batch.pool.num_blocks)
        self._reserves_all = config.reserve_full_length
        self._budget = config.max_num_batched_tokens
        self._chunk = config.long_prefill_token_threshold or self._budget
        self._is_chunked = config.enable_chunked_prefill
        max_partial = config.max_num_partial_prefills or config.max_num_seqs
        self._partial_prefills = PartialPrefills(batch.table, policy, max_partial)  # checked where a prompt is cut
        self._limits: list[Limit] = []  # checked for every request
        self.exchange: BlockExchange | None = None  # if the config has a store of blocks beyond the host

    def add_limit(self, limit: Limit) -> None:
        """Add a limit that is checked before a request starts. Call this before the first step."""
        self._limits.append(limit)
        self._batch.on_release.append(limit.give_back)

    def never_fits(self, request: Request) -> str | None:
        """Return why the request could not run even alone, with the numbers, or None if it could."""
        length = request.max_computed_tokens
        needed = self._batch.room.num_pages(length, keeps_blocks=bool(request.choices))
        there_are = self._batch.pool.num_blocks - 1
        if needed > there_are:
            return f"the request may need {needed} KV blocks for {length} tokens, and there are {there_are}"
        if not self._is_chunked and length > self._budget:
            return (
                f"without chunked prefill a request must fit one step: its prompt and output may come to {length} "
                f"tokens, and max_num_batched_tokens is {self._budget}"
            )
        return None

    def blocks_to_start(self, request: Request) -> int:
        """Return the most blocks that the request needs to start: those that it holds, and its reserve."""
        is_reserved = self._reserves_all or request.num_preemptions
        return ceil_div(request.max_computed_tokens if is_reserved else len(request.token_ids), self._block_size)

    def room(self) -> "_Room":
        """Return the rows and blocks left between two steps, for appraise()."""
        return _Room(self._batch, 0)

    def appraise(self, request: Request, room: "_Room") -> Appraisal:
        """Return what a waiting request would need. Valid between two steps."""
        pool = self._batch.pool
        start = self._start_of(request, room)
        left = self._blocks_left(start, room)
        revived = self._batch.num_revived(start) if start.num_hits else 0
        reserve = pool.num_free - revived - room.promised - left
        return Appraisal(start.num_computed_tokens, start.num_hits, start.num_lacking, reserve)

    def fill(self, draft: Draft, row_limit: int) -> None:
        """Start waiting requests while budget, rows and blocks last."""
        self._delay.begin_step(draft.now_ns)
        if row_limit and self._may_look(draft, row_limit):
            self._look(draft, _Room(self._batch, row_limit))
            self._delay.end_step(draft.now_ns, len(draft.starts))

    def _may_look(self, draft: Draft, row_limit: int) -> bool:
        """Return whether any request may start.

        This must be cheap if the answer is False: many requests may be waiting.
        """
        first = self._waiting.peek()
        if first is None or not self._delay.has_passed(draft.now_ns, first, len(self._batch)):
            return False
        if draft.budget and len(self._batch) < row_limit:
            return True
        if self._policy.must_yield(first, self._batch.rows).any():
            return True
        draft.examined.append(Examined(first, Verdict.NO_ROW if draft.budget else Verdict.NO_BUDGET, 1, 0))
        return False

    def _look(self, draft: Draft, room: "_Room") -> None:
        kept: list[Request] = []
        passed: Request | None = None  # the first request that did not fit
        while (request := self._waiting.pop()) is not None:
            if self.exchange is not None and self.exchange.ask(request, draft.now_ns):
                if self.exchange.asks_left <= 0:
                    break  # the others are examined in the next step
                continue
            refusal = self._try(request, draft, room)
            if refusal is None:
                if passed is not None:
                    passed.num_overtaken += 1
            else:
                kept.append(request)
                draft.examined.append(refusal)
                passed = passed or request
                if refusal.verdict < Verdict.HOLDS_THE_REST or len(kept) > self._lookahead:
                    break
            if passed is not None and passed.num_overtaken >= self._lookahead:
                break
        for request in kept:
            self._waiting.push(request)
        self._settle(draft, room)

    def _try(self, request: Request, draft: Draft, room: "_Room") -> Examined | None:
        """Start the request, or return what it lacks."""
        if draft.preempted and any(preempted.request is request for preempted in draft.preempted):
            return Examined(request, Verdict.PREEMPTED, 0, 0)
        if request.first_key in room.first_keys:
            self._settle(draft, room)  # so that the request finds the blocks of one that starts in this step
        start = self._start_of(request, room)
        lack = start.num_lacking - self._blocks_left(start, room)
        refusal: Examined | None = None
        if lack <= 0 < room.rows and start.num_tokens <= draft.budget:
            if start.num_tokens < start.num_missing_tokens or self._limits:
                refusal = self._cut(start, draft.budget, draft)
        else:
            refusal = self._preempt_for(start, lack, draft, room)
        if refusal is None:
            self._start(start, draft, room)
        return refusal

    def _preempt_for(self, start: RequestStart, lack: int, draft: Draft, room: "_Room") -> Examined | None:
        """Take the missing row, blocks and tokens from rows that must yield to the request, or return what it lacks.

        No row is preempted for a request that could not start afterwards. Only fences can delay the start.
        """
        request, rows = start.request, self._batch.rows
        rows = rows[self._policy.must_yield(request, rows)]
        if start.fork is not None:  # its source stays: its blocks must not be freed before they are shared
            rows = rows[~np.isin(rows, [choice.row for choice in request.choices])]
        yields = self._preemption.victims_first(rows)
        num_victims, given = self._count_victims(yields, start, 1 - room.rows, lack)
        needed = start.num_lacking
        if given < lack:
            return Examined(request, Verdict.NO_BLOCKS, needed, needed - lack)
        if num_victims + room.rows < 1:
            return Examined(request, Verdict.NO_ROW, 1, 0)
        if refusal := self._cut(start, draft.budget + draft.tokens_of(yields), draft):
            return refusal
        if num_victims:
            for row in yields[:num_victims].tolist():
                room.make(self._batch.num_promised_blocks_of(row))
                self._preemption.preempt(draft, row, Cause.MORE_URGENT)
            left = self._blocks_left(start, room)
            if needed > left:
                return Examined(request, Verdict.FENCED, needed, left)
        if draft.budget < start.num_tokens:
            draft.take_budget(yields[num_victims:], start.num_tokens - draft.budget)
        return None

    def _cut(self, start: RequestStart, budget: int, draft: Draft) -> Examined | None:
        """Cut the request's tokens to the budget, or return what it lacks: tokens, or a limit's resource."""
        missing = start.num_missing_tokens
        start.num_tokens = count = min(start.num_tokens, budget)
        if start.num_tokens < missing:
            least = 1 if self._is_chunked else missing
            if start.num_tokens < least:
                return Examined(start.request, Verdict.NO_BUDGET, least, budget)
            if refusal := self._partial_prefills.lacks(start, draft):
                return refusal
        for limit in self._limits:
            if refusal := limit.lacks(start, draft):
                return refusal
        if start.num_tokens < count == missing:  # a limit has cut it
            return self._partial_prefills.lacks(start, draft)
        return None

    def _start_of(self, request: Request, room: "_Room") -> RequestStart:
        """Return how the request would start now."""
        hits, content = self._batch.prefix_cache.find(request)
        num_hits, length = len(hits), len(request.token_ids)
        computed = num_hits * self._block_size
        fork = self._batch.forks.find(request, hits) if request.choices else None
        if fork is not None:
            hits, num_hits, computed = fork.blocks, len(fork.blocks), fork.num_tokens
        slots, num_loaded = None, 0
        if request.swapped is not None:
            computed = max(computed, request.swapped.num_computed_tokens)
        elif fork is None and self._batch.host_cache.num_slots:
            slots, content = self._batch.host_cache.find(request, num_hits, content)
            num_loaded = 0 if slots is None else len(slots)
            computed += num_loaded * self._block_size
        missing = num_tokens = length - computed
        if missing > self._chunk and (room.rows < room.row_limit or len(self._waiting)):
            num_tokens = self._chunk
        is_reserved = self._reserves_all or request.num_preemptions >= MAX_PREEMPTIONS
        if is_reserved:
            length = request.max_computed_tokens
        num_blocks = -(-length // self._block_size)
        start = RequestStart(
            request=request,
            hits=hits,
            num_hits=num_hits,
            content=content,
            num_computed_tokens=computed,
            num_missing_tokens=missing,
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            num_lacking=num_blocks - num_hits,
            is_reserved=is_reserved,
            fork=fork,
            host_slots=slots,
            num_loaded=num_loaded,
        )
        if self._batch.others:
            start.num_lacking = self._batch.lacking_of(start, num_blocks)
        return start

    def _blocks_left(self, start: RequestStart, room: "_Room") -> int:
        """Return how many free blocks this start may take; negative if promises exceed them.

        Promised blocks are left out, and so are hits that would leave the free list. While other rows run, two reserves
        are left out too: the watermark, and a number that doubles with each preemption of the request, so that it does
        not resume only to be preempted again.
        """
        pool, request = self._batch.pool, start.request
        left = pool.num_free - room.promised - room.unsettled
        if start.num_hits:
            left -= self._batch.num_revived(start)
        if room.rows < room.row_limit:
            left -= self._watermark
            if request.num_preemptions:
                most = ceil_div(request.max_computed_tokens, self._block_size) - start.num_blocks
                left -= min((1 << request.num_preemptions) - 1, most)
        return left

    def _count_victims(self, yields: Ints, start: RequestStart, num_rows: int, num_blocks: int) -> tuple[int, int]:
        """Return (how many of these rows, from the first on, must go to free num_rows and num_blocks; their blocks).

        A block counts if no other request holds it or is about to. A block that victims share is freed with the last of
        them.
        """
        batch, given, count = self._batch, 0, 0
        # references held by victims, by block
        num_dropped = np.zeros(batch.pool.num_blocks if len(yields) else 0, np.int32)
        for row in yields.tolist():
            if count >= num_rows and given >= num_blocks:
                break
            given += batch.note_freed(row, num_dropped, start) + batch.num_promised_blocks_of(row)
            count += 1
        return count, given

    def _start(self, start: RequestStart, draft: Draft, room: "_Room") -> None:
        request, count = start.request, start.num_tokens
        end = start.num_computed_tokens + count
        start.num_given = given = start.num_blocks if start.is_reserved else -(-end // self._block_size)
        start.num_taken = start.num_lacking
        if given < start.num_blocks:
            start.num_taken = self._batch.lacking_of(start, given)
        if start.num_hits:
            self._batch.hold(start)
        if start.host_slots is not None:
            self._batch.host_cache.pin(start)
        room.settling.append(start)
        room.unsettled += start.num_taken
        if request.first_key:
            room.first_keys.add(request.first_key)
        draft.budget -= count
        room.rows -= 1
        room.promised += start.num_lacking - start.num_taken
        if count < start.num_missing_tokens:
            self._partial_prefills.take(start, draft)
        for limit in self._limits:
            limit.take(start, draft)
        self._policy.start(start)

    def _settle(self, draft: Draft, room: "_Room") -> None:
        """Give the starting requests their blocks, and name the full ones."""
        if not room.settling:
            return
        self._batch.place(room.settling, self._batch.pool.allocate(room.unsettled).astype(np.int32))
        for start in room.settling:
            if start.host_slots is not None:
                self._batch.host_cache.copy_back(start)
            if start.request.swapped is not None:
                self._preemption.swap_in(start)
        self._batch.prefix_cache.name_starts(room.settling)
        draft.starts += room.settling
        room.settling.clear()
        room.first_keys.clear()
        room.unsettled = 0


class _Room:
    """Rows and blocks that are left for more requests in the step being planned."""

    def __init__(self, batch: Batch, row_limit: int) -> None:
        self.row_limit = row_limit
        self.rows = row_limit - len(batch)  # free rows; fewer than row_limit means other rows run
        self.promised = batch.num_promised_blocks()  # blocks promised to running rows
        self.settling: list[RequestStart] = []  # starting in this step, still without blocks
        self.unsettled = 0  # blocks that _settle() will allocate for them
        # keys of their first blocks; for lookups only, since a set has no fixed order
        self.first_keys: set[int] = set()

    def make(self, promised: int) -> None:
        """Count a preempted row, to which this number of blocks was promised."""
        self.rows += 1
        self.promised -= promised


# Delay: waits for more prompts so that they share a step (like scheduler_delay_factor of vLLM 0.x).


class Delay:
    """Delays the start of requests.

    No request starts until the first in the queue has waited `factor` times as long as the last step that started
    requests took, unless no request is running.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._began_ns: int | None = None  # start of the last step, if it started requests
        self._latency_ns = 0  # duration of the last step that started requests

    def begin_step(self, now_ns: int) -> None:
        """Record the start of a step, which is the end of the previous one."""
        if self._began_ns is not None:
            self._latency_ns = now_ns - self._began_ns
            self._began_ns = None

    def has_passed(self, now_ns: int, first: Request, num_running: int) -> bool:
        """Return whether requests may start. first: the first request in the queue."""
        return not num_running or now_ns - first.arrival_ns >= self._factor * self._latency_ns

    def end_step(self, now_ns: int, num_started: int) -> None:
        """Record how many requests were started by this step, which began at now_ns."""
        if num_started:
            self._began_ns = now_ns
