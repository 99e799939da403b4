"""JoinedSteps: decoding steps with the same decisions, simulated as one.

If every row decodes, no row ends and none can start, the next steps differ only in the blocks that rows get and name,
and these are known in advance. So the table, the pool and the counters are set to the state that as many calls of
EngineCore.step() would produce; a test compares both. Only the scheduler's step number is not counted.
"""

import numpy as np

from core.engine import EngineCore
from core.kv.block_names import block_key, hash_blocks
from ipc.options.resolved import ResolvedConfig
from ipc.options.workers import most_in_flight
from ipc.tables.arrays import NO_INTS, Ints
from ipc.wire.metrics_messages import step_token_bucket
from tools.commands.replay.what_if.oracle_executor import OracleExecutor


class JoinedSteps:
    """The steps of one simulated engine. config: its own. Requests have one choice each, sample, and have no deadline.

    count: how many of the next steps make the same decisions, found by look(); rows [R]: the rows that get a token in
    each.
    """

    def __init__(self, config: ResolvedConfig, engine: EngineCore, executor: OracleExecutor) -> None:
        self._scheduler, self._executor = engine.scheduler, executor
        self._size = config.block_size
        self._most_rows = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._is_possible = _may_join(config, executor) and not self._scheduler.cuts
        self.count = 0
        self.rows: Ints = NO_INTS
        self._grows: Ints = NO_INTS  # [R] step, from 0, in which each row gets a block; past the last if none
        self._fills: Ints = NO_INTS  # [R] the step in which it computes the last token of its block

    def look(self) -> int:
        """Find count; it is 0 if the next step may do anything except give each row one token."""
        self.count = 0
        scheduler, batch = self._scheduler, self._scheduler.batch
        self.rows = rows = batch.rows
        if not self._is_possible or not 0 < len(rows) < self._budget:
            return 0
        table, pool = scheduler.table, scheduler.pool
        lengths, num_prompt = table.num_tokens[rows], table.num_prompt_tokens[rows]
        positions = lengths - num_prompt
        ends = self._executor.next_end(rows, positions, table.max_total_tokens[rows] - num_prompt)
        count = int((ends - positions).min()) - 1
        if count < 2 or np.count_nonzero(lengths - table.num_computed_tokens[rows] != 1) or not self._starts_nothing():
            return 0
        count = min(count, self._size)
        self._grows = table.num_blocks[rows] * self._size - lengths + 1
        growing = np.sort(self._grows[self._grows < count])
        if len(growing) > pool.num_free:
            count = int(growing[pool.num_free])
            growing = growing[: pool.num_free]
        if scheduler.batch.prefix_cache.is_enabled:
            self._fills = (table.num_named_blocks[rows] + 1) * self._size - lengths
            if int(self._fills.min()) < 0 or self._evicts_what_it_names(len(growing), count):
                return 0
        self.count = count
        return count

    def num_read(self) -> int:
        """Return the KV tokens that the first of the steps reads; each later one reads len(rows) more."""
        return int(self._scheduler.table.num_tokens[self.rows].sum())

    def take(self, count: int) -> None:
        """Simulate this many of the steps: at most self.count."""
        scheduler, rows = self._scheduler, self.rows
        table, batch, stats = scheduler.table, scheduler.batch, scheduler.stats
        lengths = table.num_tokens[rows]
        owners, places = rows.repeat(count), (lengths[:, None] + np.arange(count)).ravel()
        positions = places - table.num_prompt_tokens[owners]
        table.tokens.ensure(rows, lengths + count)
        table.tokens.set(owners, places, self._executor.tokens_at(owners, positions))
        self._executor.count_made_up(owners, positions)
        if len(growing := _in_turn(self._grows, count)):
            taking = rows[growing]
            table.append_blocks(taking, np.ones(len(taking), np.int64), scheduler.pool.allocate(len(taking)))
        table.num_tokens[rows] = lengths + count
        table.num_computed_tokens[rows] = lengths + count - 1
        if batch.prefix_cache.is_enabled and len(filling := _in_turn(self._fills, count)):
            naming = rows[filling]
            batch.prefix_cache.name_full_blocks(naming, table.num_computed_tokens[naming])
        num_rows, pool = len(rows), scheduler.pool
        stats.num_steps += count
        stats.num_scheduled_tokens += count * num_rows
        stats.num_generation_tokens += count * num_rows
        stats.step_tokens[step_token_bucket(num_rows)] += count
        stats.num_scheduled_rows += count * num_rows
        stats.max_scheduled_rows = max(stats.max_scheduled_rows, num_rows)
        stats.max_used_blocks = max(stats.max_used_blocks, pool.num_blocks - 1 - pool.num_free - pool.num_fenced)
        if scheduler.waiting.peek() is not None:
            stats.num_head_no_row += count

    def _starts_nothing(self) -> bool:
        """Return whether no waiting request could start or preempt another one as long as no row ends."""
        first = self._scheduler.waiting.peek()
        if first is None:
            return True
        rows = self.rows
        return len(rows) == self._most_rows and not self._scheduler.policy.must_yield(first, rows).any()

    def _evicts_what_it_names(self, num_blocks: int, count: int) -> bool:
        """Return whether the steps may evict a block whose content they also name: then the order matters."""
        scheduler, table = self._scheduler, self._scheduler.table
        evicted = scheduler.pool.next_evicted(num_blocks)
        which = np.flatnonzero(self._fills < count)
        if not len(evicted) or not len(which):
            return False
        rows, firsts = self.rows[which], table.num_named_blocks[self.rows[which]] * self._size
        owners, places = rows.repeat(self._size), (firsts[:, None] + np.arange(self._size)).ravel()
        is_new = places >= table.num_tokens[owners]  # of these steps; earlier ones have other values in the table
        tokens = table.tokens.get(owners, places)
        tokens[is_new] = self._executor.tokens_at(owners[is_new], (places - table.num_prompt_tokens[owners])[is_new])
        tokens = tokens.reshape(-1, self._size)
        keys = block_key(table.content[rows].view(np.uint64), hash_blocks(tokens))
        return bool(np.isin(keys, scheduler.pool.names.described(evicted)[0]).any())


def _may_join(config: ResolvedConfig, executor: OracleExecutor) -> bool:
    """Return whether steps of an engine with these options may be joined at all."""
    keeps = config.num_host_blocks or config.kv_window or executor.info.state_bytes
    charges = config.scheduling_policy == "fair" or config.scheduler_delay_factor
    return most_in_flight(config) == 1 and config.speculative_config is None and not (keeps or charges)


def _in_turn(steps: Ints, count: int) -> Ints:
    """Return the indices of the entries below count, by entry and then by index."""
    order = np.argsort(steps, kind="stable")
    in_turn: Ints = order[: np.searchsorted(steps[order], count)]
    return in_turn
