"""Batch: the running requests, with their rows, order and blocks. Rows begin and end here."""

from collections import deque
from collections.abc import Callable

import numpy as np

from core.batch.carried import Carried
from core.batch.forks import Forks
from core.batch.host_cache import HostCache
from core.batch.kept_states import KeptStates
from core.batch.new_blocks import NewBlocks
from core.batch.prefix_cache import PrefixCache
from core.batch.request import Request
from core.batch.stop_check import StopCheck
from core.batch.table import BatchTable, RequestStart
from core.kv.block_pool import NULL_BLOCK, BlockPool
from ipc.options.config import EngineConfig
from ipc.tables.arrays import BlockIds, Bools, Int32s, Ints, Rows
from ipc.tables.paged_rows import PagedRows
from ipc.tables.rounding import ceil_div


class Batch:
    """The rows of running requests, sorted by (rank, serial), and what belongs to them: table, pool and cache."""

    blocks_of_a_block = 1  # blocks of the pool that a row takes for block_size tokens

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...]) -> None:
        assert config.num_blocks_override is not None, "the config is not resolved"
        self.block_size = config.block_size
        self._shift = config.block_size.bit_length() - 1  # block sizes are powers of two
        self.table = BatchTable(config.max_num_seqs)
        self._tells_urgency = config.scheduling_policy == "priority"
        self.pool = self._make_pool(config, config.num_blocks_override, 3 if self._tells_urgency else 1)
        self.prefix_cache = self._make_cache(config)
        self.stop_check = StopCheck(self.table, eos_token_ids)
        self.rows: Ints = np.zeros(0, np.int64)
        self.in_flight: deque[tuple[int, Ints, Ints]] = deque()  # (step, the plan's rows, their tenancies)
        self.forks = self._make_forks()
        self.carried = Carried()
        self.kept_states: KeptStates | None = None  # of a model with recurrent layers
        self._window = config.kv_window or 0  # tokens that a token sees; 0: all before it
        self.host_cache = self._make_host(config.num_host_blocks or 0, config.num_swap_blocks or 0)
        self.before_release: list[Callable[[Rows], None]] = []  # called with rows that are about to be released
        self.on_release: list[Callable[[Request], None]] = []  # called for each request that loses its row
        self.on_copy: list[Callable[[int, int], None]] = []  # called with a row that becomes a copy, and its source

    def _make_pool(self, config: EngineConfig, num_blocks: int, num_rings: int) -> BlockPool:
        return BlockPool(num_blocks, config.block_size, num_rings)

    def _make_cache(self, config: EngineConfig) -> PrefixCache:
        return PrefixCache(self.table, self.pool.names, config.enable_prefix_caching)

    def _make_host(self, num_slots: int, first: int) -> HostCache:
        return HostCache(self, num_slots, first)

    def _make_forks(self) -> Forks:
        return Forks(self.table, self.pool, self.prefix_cache, self.in_flight)

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self.rows)

    def num_blocks_of(self, num_tokens: Ints) -> Ints:
        """Return the number of blocks [n] that num_tokens [n] tokens take."""
        return (num_tokens + (self.block_size - 1)) >> self._shift

    def has_all_blocks(self, rows: Rows) -> Bools:
        """Return which rows have all the blocks that they can ever need, bool [n]."""
        table = self.table
        most: Bools = table.num_blocks[rows] >= self.num_blocks_of(table.max_computed_tokens[rows])
        return most

    def lacking(self, rows: Rows, ends: Ints) -> Ints:
        """Return how many blocks [n] rows must be given before ends [n] of their tokens are computed."""
        missing: Ints = np.maximum(((ends + (self.block_size - 1)) >> self._shift) - self.table.num_blocks[rows], 0)
        return missing

    def room_of(self, rows: Rows) -> Ints:
        """Return how many tokens [n] the rows' blocks have room for."""
        return self.table.num_blocks[rows] * self.block_size

    def grow(self, new: NewBlocks, rows: Rows, lacking: Ints, counts: Ints) -> None:
        """Give rows the blocks that they lack, as lacking() says, for counts [n] more tokens."""
        blocks = self.pool.allocate(int(lacking.sum()))
        new.add(self.table.append_blocks(rows, lacking, blocks), blocks)

    def most_blocks(self, request: Request) -> int:
        """Return how many blocks the request may hold at once."""
        return ceil_div(request.max_computed_tokens, self.block_size)

    def num_promised_blocks(self) -> int:
        """Return the number of blocks that rows still need for their known tokens; starts must leave these free."""
        table, rows = self.table, self.rows
        return int(np.maximum(self.num_blocks_of(table.num_tokens[rows]) - table.num_blocks[rows], 0).sum())

    def num_promised_blocks_of(self, row: int) -> int:
        """Return this row's share of num_promised_blocks()."""
        return max(0, ceil_div(int(self.table.num_tokens[row]), self.block_size) - int(self.table.num_blocks[row]))

    def most_blocks_of_beams(self, num_shared: int, num_own: int) -> int:
        """Return how many blocks the beams of a search may hold together: shared ones, and the others of each beam."""
        return num_shared + num_own

    def num_held(self, row: int) -> int:
        """Return how many blocks the row holds, shared ones included."""
        return len(self.table.block_ids(row))

    # --- copies on the host ---------------------------------------------------------------------------------------

    def num_copied(self, num_tokens: Ints) -> Ints:
        """Return the number of blocks [n] that are copied to the host with num_tokens [n] tokens of a row."""
        return self.num_blocks_of(num_tokens)

    def copied_blocks(self, row: int, num_tokens: int) -> Int32s | None:
        """Return the blocks with what the row's next token after so many reads; None: it has given some back."""
        if self.table.num_released[row]:
            return None  # the copy would lack the first blocks, which it would get back under their names
        return self.table.blocks.read(row, 0, ceil_div(num_tokens, self.block_size))

    def blocks_to_fill(self, start: RequestStart, num_tokens: int) -> tuple[Ints, Int32s]:
        """Return which of the blocks copied with num_tokens tokens the request lacks, and its own for them."""
        lacking = np.arange(start.num_hits, ceil_div(num_tokens, self.block_size))
        return lacking, start.block_ids[lacking]

    # --- requests that start --------------------------------------------------------------------------------------

    def lacking_of(self, start: RequestStart, num_blocks: int) -> int:
        """Return how many blocks the request must be given to start with so many, hits included."""
        return num_blocks - start.num_hits

    def num_revived(self, start: RequestStart) -> int:
        """Return how many of the request's hits are free now."""
        return self.pool.num_revived(start.hits)

    def hold(self, start: RequestStart) -> None:
        """Hold the request's hits, before any allocation, which might evict them."""
        self.pool.hold(start.hits)

    def place(self, starts: list[RequestStart], blocks: Int32s) -> None:
        """Give each of these requests num_taken of the blocks, behind its hits."""
        first = 0
        for start in starts:
            fresh = blocks[first : first + start.num_taken]
            first += start.num_taken
            start.block_ids = np.concatenate([start.hits, fresh]) if start.num_hits else fresh
            if start.fork is not None and start.fork.copied_block != NULL_BLOCK:
                self.carried.within.add(start.fork.copied_block, int(fresh[0]))

    def note_freed(self, row: int, num_dropped: Int32s, start: RequestStart) -> int:
        """Count the references that the row's end would drop, in num_dropped [num_blocks], which has those of others.

        Return how many blocks would come free; the hits of the request that starts would not.
        """
        blocks = self.table.block_ids(row)
        num_dropped[blocks] += 1
        alone = (self.pool.ref_count[blocks] == num_dropped[blocks]) & ~np.isin(blocks, start.hits)
        return int(np.count_nonzero(alone))

    def launch(self, starts: list[RequestStart]) -> Ints:
        """Give these requests rows, and return the rows in the order of the requests."""
        rows = self.table.add(starts)
        for start in starts:
            params = start.request.sampling
            if params is not None and params.stop_token_ids:
                self.stop_check.add(start.request.row, params.stop_token_ids)
        if self.kept_states is not None:
            self.kept_states.begin(starts, self.carried)
        table, merged = self.table, np.concatenate([self.rows, rows])
        keys = (table.serial[merged], table.rank[merged])
        if len(self.rows) and self._is_sorted(*keys):
            self.rows = merged
        else:
            self.rows = merged[np.lexsort(keys)]
        return rows

    def release(self, rows: Rows) -> list[Request]:
        """Free the rows and their blocks, tail first, and return their requests."""
        for notice in self.before_release:
            notice(rows)
        table = self.table
        blocks = self._free_all(rows)
        self.stop_check.remove(rows)
        if len(rows) == 1:
            self.rows = self.rows[self.rows != rows[0]]
        else:
            gone = np.zeros(len(table.tenancy), np.bool_)
            gone[rows] = True
            self.rows = self.rows[~gone[self.rows]]
        self.carried.removed_rows.extend(rows.tolist())
        if self.carried.renewed_rows:
            self._forget_renewal(rows.tolist(), blocks)
        removed = table.remove(rows)
        for listener in self.on_release:
            for request in removed:
                listener(request)
        return removed

    def release_passed(self) -> None:
        """Free the blocks that no row reads again: of tokens before the window of the row's next token.

        They keep their names, so the prefix cache has them until they are allocated again; a row's blocks are named
        before they are freed. The executor's tables still have them, and its kernels do not read them.
        """
        if not self._window or not len(self.rows):
            return
        table, rows = self.table, self.rows
        passed = (table.num_computed_tokens[rows] - (self._window - 1)) >> self._shift
        if self.prefix_cache.is_enabled:
            np.minimum(passed, table.num_named_blocks[rows], out=passed)
        due = (passed > table.num_released[rows]) & (table.keeps_blocks[rows] == 0)
        if np.count_nonzero(due):
            rows, passed = rows[due], passed[due]
            self._free(rows, table.num_released[rows], passed)
            table.num_released[rows] = passed

    def _free_all(self, rows: Rows) -> BlockIds:
        """Free all blocks of rows that end; return them."""
        return self._free(rows, self.table.num_released[rows], self.table.num_blocks[rows])

    def renew(self, new: NewBlocks) -> None:
        """Add blocks of the rows that the runner gets anew, as far as they are not told with the rows: here none."""

    def _free(self, rows: Rows, firsts: Ints, lasts: Ints) -> BlockIds:
        """Free the rows' blocks from firsts[i] to before lasts[i], row after row, tail first; return them."""
        return self._drop(self.table.blocks, rows, firsts, lasts)

    def _drop(self, tables: PagedRows, rows: Rows, firsts: Ints, lasts: Ints) -> BlockIds:
        counts = lasts - firsts
        ends = counts.cumsum()
        places = (ends + firsts).repeat(counts) - np.arange(1, int(ends[-1]) + 1)
        blocks = tables.get(rows.repeat(counts), places)
        if self._tells_urgency:  # ring 0, 1, 2: less urgent than the default priority, equal, more
            self.pool.set_urgency(blocks, (1 - np.sign(self.table.level[rows])).repeat(counts))
        self.pool.free(blocks, self.in_flight[-1][0] if self.in_flight else None)
        return blocks

    def take_carried(self) -> Carried:
        """Return what the plan being finished carries; what comes from now on is the next plan's."""
        if (carried := self.carried) or self.kept_states is not None:
            self.carried = Carried()
        if self.kept_states is not None:
            self.kept_states.keep(self.in_flight[-1][1], self.carried)
        self.host_cache.end_plan()
        return carried

    def take_over(self, row: int, source: int) -> None:
        """Let an idle row of a beam search become a copy of another idle row of it, which has as many tokens.

        Whole blocks are shared; the part-filled one is copied into the row's own. The runner gets the row anew.
        """
        table, last = self.table, int(self.table.num_tokens[source])
        shared = last >> self._shift
        old, new = table.block_ids(row), table.block_ids(source)
        self.pool.hold(new[:shared])
        self.pool.free(old[:shared][::-1], self.in_flight[-1][0] if self.in_flight else None)
        places = np.arange(shared)
        table.blocks.set(np.full(shared, row), places, new[:shared])
        if last & (self.block_size - 1):
            self.carried.within.add(int(new[shared]), int(old[shared]))
        first = int(table.num_prompt_tokens[row])
        table.tokens.set(np.full(last - first, row), np.arange(first, last), table.tokens.read(source, first, last))
        table.content[row], table.num_named_blocks[row] = table.content[source], table.num_named_blocks[source]
        request, num_kept = table.request[row], first >> self._shift
        assert request is not None, f"row {row} has no request"
        if len(request.block_hashes) > num_kept:  # it has waited with other tokens behind its prompt
            request.block_hashes = request.block_hashes[:num_kept]
        for listener in self.on_copy:
            listener(row, source)

    def copy_state(self, row: int, source: int) -> None:
        """Copy the recurrent state of the row `source` to another row."""
        self.carried.states.add(source, row)

    def release_to_wait(self, row: int) -> Request:
        """Free the row of a request that resumes later, and return the request with its tokens."""
        table = self.table
        token_ids, computed = table.token_ids(row), int(table.num_computed_tokens[row])
        drafts = int(table.num_drafted[row]), int(table.num_accepted[row])
        (request,) = self.release(np.array([row]))
        request.token_ids = token_ids
        request.num_drafted, request.num_accepted = drafts
        request.num_computed_before = max(request.num_computed_before, computed)
        self.prefix_cache.prepare(request)
        return request

    def _forget_renewal(self, rows: list[int], blocks: BlockIds) -> None:
        """Drop what the next plan was to tell of rows that are gone: their renewal, and copies into their blocks."""
        for row in rows:
            self.carried.renewed_rows.pop(row, None)
        self.carried.within.drop_into(blocks)

    def _is_sorted(self, serials: Ints, ranks: Ints) -> bool:
        later = (ranks[1:] > ranks[:-1]) | ((ranks[1:] == ranks[:-1]) & (serials[1:] > serials[:-1]))
        return int(np.count_nonzero(later)) == len(later)

    def check_integrity(self) -> None:
        """Check the table, the pool and the order. Errors: AssertionError with the numbers."""
        self.table.check_integrity(self.rows)
        self.pool.check_integrity(self._held())
        self.host_cache.check_integrity()
        if self.kept_states is not None:
            self.kept_states.check_integrity()
        if len(self.rows) > 1:
            serials, ranks = self.table.serial[self.rows], self.table.rank[self.rows]
            assert self._is_sorted(serials, ranks), f"out of order: {self.rows}"

    def _held(self) -> list[BlockIds]:
        """Return all block tables, and the blocks that are kept for forks."""
        return [*map(self.table.block_ids, self.rows.tolist()), *(blocks for _, blocks in self.forks.kept)]
