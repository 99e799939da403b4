"""SchedulerStats: the scheduler's counters since its start."""

from typing import Any

import msgspec
import numpy as np

from core.batch.batch import Batch
from core.batch.table import RequestStart
from core.execution.plan import SchedulerOutput
from core.kv.block_pool import BlockPool
from core.scheduling.decisions import Decision, Verdict
from core.scheduling.waiting_queue import WaitingQueue
from ipc.tables.arrays import Ints
from ipc.wire.messages import Statistics
from ipc.wire.metrics_messages import STEP_TOKEN_BOUNDS, step_token_bucket

_HEAD_COUNTERS: dict[Verdict, str] = {
    verdict: f"num_head_{verdict.name.lower()}" for verdict in Verdict if verdict is not Verdict.HOLDS_THE_REST
}


class SchedulerStats(Statistics):
    """The Statistics message with the counters kept up to date.

    The message's gauges stay 0 here: statistics() reads them when a client asks.
    """

    def count_starts(self, starts: list[RequestStart]) -> None:
        """Count starting requests. Call this before has_started of these requests is set."""
        num_prompt_tokens = 0
        for start in starts:
            request, num_found = start.request, start.num_computed_tokens
            if request.has_started:
                self.num_recomputed_tokens += max(0, request.num_computed_before - num_found)
            else:
                num_prompt_tokens += request.num_prompt_tokens
                if num_found:
                    num_forked = 0 if start.fork is None else start.fork.num_forked_tokens
                    self.prefix_cache_hits += num_found - num_forked
        self.num_prompt_tokens += num_prompt_tokens
        self.prefix_cache_queries += num_prompt_tokens

    def count_decision(self, decision: Decision) -> None:
        """Count the skipped rows of a step, and the verdict on the first waiting request that did not start."""
        self.num_skipped += decision.num_skipped
        if decision.examined:
            name = _HEAD_COUNTERS[decision.examined[0].verdict]
            setattr(self, name, getattr(self, name) + 1)

    def count_step(self, plan: SchedulerOutput, pool: BlockPool) -> None:
        """Count a step that runs this plan. The pool provides the number of blocks in use."""
        self.num_steps += 1
        num_tokens = plan.num_tokens
        self.num_scheduled_tokens += num_tokens
        self.step_tokens[step_token_bucket(num_tokens)] += 1
        self.num_scheduled_rows += len(plan.rows)
        self.max_scheduled_rows = max(self.max_scheduled_rows, len(plan.rows))
        self.max_used_blocks = max(self.max_used_blocks, pool.num_blocks - 1 - pool.num_free - pool.num_fenced)

    def count_drafts(self, counts: Ints, right: Ints) -> None:
        """Count the verified drafts of some rows [n] and how many of them were right [n], from the first on."""
        self.num_drafts += len(counts)
        self.num_draft_tokens += int(counts.sum())
        self.num_accepted_tokens += int(right.sum())
        reached = np.bincount(right)[::-1].cumsum()[::-1][1:].tolist()  # drafts that were right at each position
        known = self.num_accepted_tokens_per_pos
        known += [0] * (len(reached) - len(known))
        for position, count in enumerate(reached):
            known[position] += count


def new_stats() -> SchedulerStats:
    """Return counters that are all 0."""
    required: dict[str, Any] = {field.name: 0 for field in msgspec.structs.fields(SchedulerStats) if field.required}
    return SchedulerStats(**required, step_tokens=[0] * (len(STEP_TOKEN_BOUNDS) + 1))


def statistics(stats: SchedulerStats, batch: Batch, waiting: WaitingQueue, **gauges: int) -> Statistics:
    """Return the counters and the gauges of these parts, and other gauges of the scheduler by name."""
    found = {
        "num_running": len(batch),
        "num_waiting": len(waiting),
        "num_blocks": batch.pool.num_blocks,
        "num_free_blocks": batch.pool.num_free,
        "block_size": batch.block_size,
        "num_on_hold": waiting.num_held,
        "num_unbegun": waiting.num_unbegun,
        "num_host_blocks": batch.host_cache.num_slots,
        "num_kept_blocks": batch.host_cache.num_kept,
        "num_host_hits": batch.host_cache.num_hits,
        "step_tokens": stats.step_tokens.copy(),
    }
    return Statistics(**{**msgspec.structs.asdict(stats), **found, **gauges})
