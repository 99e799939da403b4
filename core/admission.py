"""Admission: which waiting requests start in this step, on whose room, and why the others do not."""

from typing import NamedTuple

import numpy as np

from core.batch import Batch
from core.batch_table import Start
from core.decisions import Cause, Examined, Verdict
from core.delay import Delay
from core.draft import Draft
from core.policies import Policy
from core.preemption import Preemption
from core.request import Request
from core.waiting_queue import WaitingQueue
from ipc.config import EngineConfig
from ipc.paged_rows import Int32s, Ints

_NOBODY: Ints = np.zeros(0, np.int64)

#: After so many preemptions for the room of its own level a request starts only with all the blocks that it can need.
MAX_PREEMPTIONS = 8


class _Needs(NamedTuple):
    """What a waiting request would start with."""

    hits: Int32s  # blocks found in the prefix cache
    content: int  # of the last of them
    num_computed_tokens: int  # in hits, or on the host
    num_tokens: int  # to compute in this step, at most
    least_tokens: int  # to compute in this step; else it does not start
    num_blocks: int  # hits included; all of them must fit
    is_reserved: bool  # all are taken at once


class Appraisal(NamedTuple):
    """What a waiting request would need to start now."""

    num_computed_tokens: int  # that it would not compute
    num_hits: int  # blocks found in the prefix cache
    num_missing_blocks: int  # to take beside them
    num_reserve_blocks: int  # that must stay free: the watermark, and more the oftener it was preempted


class Admission:
    """Requests are looked at in the policy's order. One that lacks blocks is passed by at most `admission_lookahead`
    others in its life, which is its reservation; one that lacks anything else holds the rest."""

    def __init__(
        self,
        config: EngineConfig,
        batch: Batch,
        waiting: WaitingQueue,
        policy: Policy,
        preemption: Preemption,
    ) -> None:
        self._batch = batch
        self._waiting = waiting
        self._policy = policy
        self._preemption = preemption
        self._delay = Delay(config.scheduler_delay_factor)
        self._lookahead = config.admission_lookahead
        self._watermark = self.num_watermark_blocks = int(config.watermark * batch.pool.num_blocks)
        self._reserves_all = config.reserve_full_length
        self._chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._is_chunked = config.enable_chunked_prefill
        self._max_partial = config.max_num_partial_prefills or config.max_num_seqs
        self._budget = config.max_num_batched_tokens

    def never_fits(self, request: Request) -> str | None:
        """Why the request could not run even alone, with the numbers; None when it could."""
        length = request.max_total_tokens - 1  # its last token is never computed
        needed, there_are = -(-length // self._batch.block_size), self._batch.pool.num_blocks - 1
        if needed > there_are:
            return f"the request may need {needed} KV blocks for {length} tokens, and there are {there_are}"
        if not self._is_chunked and length > self._budget:
            return (
                f"without chunked prefill a request must fit one step: its prompt and output may come to {length} "
                f"tokens, and max_num_batched_tokens is {self._budget}"
            )
        return None

    def appraise(self, request: Request) -> Appraisal:
        """Of a request that waits, between two steps."""
        draft = Draft(0, 0, 0)
        room = _Room(self._batch, draft, 0)
        needs, pool = self._needs(request, draft, room), self._batch.pool
        left = self._blocks_left(request, needs, draft, room)
        reserve = pool.num_free - pool.num_revived(needs.hits) - room.promised - left
        num_hits = len(needs.hits)
        return Appraisal(needs.num_computed_tokens, num_hits, needs.num_blocks - num_hits, reserve)

    def fill(self, draft: Draft, row_limit: int) -> None:
        """Start waiting requests while budget, rows and blocks last."""
        self._delay.begin_step(draft.now_ns)
        if row_limit and self._may_look(draft, row_limit):
            self._look(draft, _Room(self._batch, draft, row_limit))
            self._delay.end_step(draft.now_ns, len(draft.starts))

    def _may_look(self, draft: Draft, row_limit: int) -> bool:
        """False, at once, where nobody can start: that must not cost anything while many wait."""
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
        passed: Request | None = None  # the first that did not fit
        while (request := self._waiting.pop()) is not None:
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
        """Start the request, or say what it lacks; nobody is preempted for one that cannot start."""
        if draft.preempted and any(preempted.request is request for preempted in draft.preempted):
            return Examined(request, Verdict.PREEMPTED, 0, 0)
        if request.block_hashes and request.block_hashes[0] in room.first_hashes:
            self._settle(draft, room)  # who begins as one that starts in this step finds its blocks
        needs = self._needs(request, draft, room)
        lack = needs.num_blocks - len(needs.hits) - self._blocks_left(request, needs, draft, room)
        budget, victims, skipped = draft.budget, _NOBODY, _NOBODY
        if lack > 0 or room.rows < 1 or budget < needs.num_tokens:
            yields = self._batch.rows[self._policy.must_yield(request, self._batch.rows)]
            yields = self._preemption.in_order_of_sacrifice(yields)
            num_victims, given = self._count_victims(yields, needs.hits, 1 - room.rows, lack)
            if given < lack:
                needed = needs.num_blocks - len(needs.hits)
                return Examined(request, Verdict.NO_BLOCKS, needed, needed - lack)
            if num_victims + room.rows < 1:
                return Examined(request, Verdict.NO_ROW, 1, 0)
            victims, skipped = yields[:num_victims], yields[num_victims:]
            budget += draft.tokens_of(yields)
        num_tokens = min(needs.num_tokens, budget)
        if num_tokens < needs.least_tokens:
            return Examined(request, Verdict.NO_BUDGET, needs.least_tokens, budget)
        if needs.num_computed_tokens + num_tokens < request.num_tokens and room.partial >= self._max_partial:
            return Examined(request, Verdict.PARTIAL_PREFILLS, 1, 0)
        if len(victims):
            for row in victims.tolist():
                room.make(self._batch.num_promised_blocks_of(row))
                self._preemption.preempt(draft, row, Cause.MORE_URGENT)
            left = self._blocks_left(request, needs, draft, room)
            if needs.num_blocks - len(needs.hits) > left:
                return Examined(request, Verdict.FENCED, needs.num_blocks - len(needs.hits), left)
        if draft.budget < num_tokens:
            draft.take_budget(skipped, num_tokens - draft.budget)
        self._start(request, needs, num_tokens, draft, room)
        return None

    def _needs(self, request: Request, draft: Draft, room: "_Room") -> _Needs:
        hits, content = self._batch.prefix_cache.find(request)
        computed = len(hits) * self._batch.block_size
        if request.swapped is not None:
            computed = max(computed, request.swapped.num_computed_tokens)
        is_alone = not (len(self._batch) or len(self._waiting) or draft.starts or room.settling)
        missing = request.num_tokens - computed
        num_tokens = missing if is_alone else min(missing, self._chunk)
        is_reserved = self._reserves_all or request.num_preemptions >= MAX_PREEMPTIONS
        length = request.max_total_tokens - 1 if is_reserved else request.num_tokens
        num_blocks = -(-length // self._batch.block_size)
        least = 1 if self._is_chunked else missing
        return _Needs(hits, content, computed, num_tokens, least, num_blocks, is_reserved)

    def _blocks_left(self, request: Request, needs: _Needs, draft: Draft, room: "_Room") -> int:
        """Free blocks that are promised to nobody. While others run some are kept back: the watermark, and the more the
        oftener the request was preempted, so that it does not come back only to be preempted again."""
        pool, margin = self._batch.pool, 0
        if len(self._batch.rows) or draft.starts or room.settling:
            margin = self._watermark
            if request.num_preemptions:
                most = -(-(request.max_total_tokens - 1) // self._batch.block_size) - needs.num_blocks
                margin += min((1 << request.num_preemptions) - 1, most)
        revived = pool.num_revived(needs.hits) if len(needs.hits) else 0
        return pool.num_free - revived - room.promised - room.unsettled - margin

    def _count_victims(self, yields: Ints, hits: Int32s, num_rows: int, num_blocks: int) -> tuple[int, int]:
        """How many of these rows must go, from the first on, to make room for so many rows and blocks, and how many
        blocks that gives: those which nobody else holds or is about to."""
        batch, given, count = self._batch, 0, 0
        for row in yields.tolist():
            if count >= num_rows and given >= num_blocks:
                break
            blocks = batch.table.block_ids(row)
            alone = (batch.pool.ref_count[blocks] == 1) & ~np.isin(blocks, hits)
            given += int(np.count_nonzero(alone)) + batch.num_promised_blocks_of(row)
            count += 1
        return count, given

    def _start(self, request: Request, needs: _Needs, count: int, draft: Draft, room: "_Room") -> None:
        end = needs.num_computed_tokens + count
        num_given = needs.num_blocks if needs.is_reserved else -(-end // self._batch.block_size)
        if len(needs.hits):
            self._batch.pool.hold(needs.hits)  # before anything is allocated, which might evict them
        room.settling.append(_Settling(request, needs, count, num_given))
        room.unsettled += num_given - len(needs.hits)
        if request.block_hashes:
            room.first_hashes.add(request.block_hashes[0])
        draft.budget -= count
        room.rows -= 1
        room.promised += needs.num_blocks - num_given
        room.partial += end < request.num_tokens
        self._policy.start(request, min(count, max(0, end - request.num_computed_before)))

    def _settle(self, draft: Draft, room: "_Room") -> None:
        """Give those that start their blocks, and the full ones of them their names."""
        if not room.settling:
            return
        batch, size = self._batch, self._batch.block_size
        fresh, first = batch.pool.allocate(room.unsettled), 0
        starts, nums_hits = [], []
        for request, needs, count, num_given in room.settling:
            num_hits = len(needs.hits)
            block_ids = fresh[first : first + num_given - num_hits]
            first += num_given - num_hits
            if num_hits:
                block_ids = np.concatenate([needs.hits, block_ids])
            if request.swapped is not None:
                self._preemption.swap_in(request, block_ids, num_hits)
            computed = needs.num_computed_tokens
            starts.append(Start(request, block_ids, computed, (computed + count) // size, needs.content, count))
            nums_hits.append(num_hits)
        contents = batch.prefix_cache.name_starts(starts, nums_hits)
        draft.starts += [start._replace(content=content) for start, content in zip(starts, contents, strict=True)]
        room.settling.clear()
        room.first_hashes.clear()
        room.unsettled = 0


class _Settling(NamedTuple):
    """A request that starts in this step and has not got its blocks yet."""

    request: Request
    needs: _Needs
    num_tokens: int  # of this step
    num_given: int  # blocks, hits included


class _Room:
    """What is left for others in the step being planned."""

    def __init__(self, batch: Batch, draft: Draft, row_limit: int) -> None:
        table = batch.table
        self.rows = row_limit - len(batch)
        self.promised = batch.num_promised_blocks()  # blocks
        self.settling: list[_Settling] = []
        self.unsettled = 0  # blocks that those will get
        self.first_hashes: set[int] = set()  # of their first blocks; asked, never walked
        missing = table.num_tokens[draft.rows] - table.num_computed_tokens[draft.rows] - draft.counts
        self.partial = int(np.count_nonzero(missing > 1))  # prompts that take more steps

    def make(self, promised: int) -> None:
        """A row goes that had so many blocks promised."""
        self.rows += 1
        self.promised -= promised
