"""Counters of the scheduler since its start."""

import msgspec

from core.batch.table import RequestStart
from core.kv.block_pool import BlockPool
from core.scheduling.decisions import Decision, Verdict
from ipc.arrays import Ints, Rows

_HEAD_COUNTERS: dict[Verdict, str] = {
    verdict: f"num_head_{verdict.name.lower()}" for verdict in Verdict if verdict is not Verdict.HOLDS_THE_REST
}


class SchedulerStats(msgspec.Struct):
    num_steps: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_scheduled_rows: int = 0
    max_scheduled_rows: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    max_used_blocks: int = 0
    num_recomputed_tokens: int = 0  # computed before, and again after a preemption: the measure of thrash
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_skipped: int = 0  # times a running request wanted tokens and got none
    num_head_no_row: int = 0  # steps in which the first waiting request did not start, by what it lacked
    num_head_no_budget: int = 0
    num_head_preempted: int = 0
    num_head_fenced: int = 0
    num_head_no_blocks: int = 0
    num_head_partial_prefills: int = 0

    def count_starts(self, starts: list[RequestStart]) -> None:
        """Before has_started of their requests is set."""
        num_prompt_tokens = 0
        for start in starts:
            request, num_found = start.request, start.num_computed_tokens
            if request.has_started:
                self.num_recomputed_tokens += max(0, request.num_computed_before - num_found)
            else:
                num_prompt_tokens += request.num_prompt_tokens
                self.prefix_cache_hits += num_found
        self.num_prompt_tokens += num_prompt_tokens
        self.prefix_cache_queries += num_prompt_tokens

    def count_decision(self, decision: Decision) -> None:
        self.num_skipped += decision.num_skipped
        if decision.examined:
            name = _HEAD_COUNTERS[decision.examined[0].verdict]
            setattr(self, name, getattr(self, name) + 1)

    def count_step(self, rows: Rows, counts: Ints, pool: BlockPool) -> None:
        self.num_steps += 1
        self.num_scheduled_tokens += int(counts.sum())
        self.num_scheduled_rows += len(rows)
        self.max_scheduled_rows = max(self.max_scheduled_rows, len(rows))
        self.max_used_blocks = max(self.max_used_blocks, pool.num_blocks - 1 - pool.num_free - pool.num_fenced)
