"""WindowBatch: a Batch whose rows have blocks of their own for layers with a window, beside layers that see all tokens.

The pool is one of pages (core/models/layers/cache_pages.py). A row's blocks in layers that see everything stay until it
ends. Those in layers with a window go back when the window has passed. In the methods' numbers the pool's blocks are
pages.
"""

import numpy as np

from core.batch.batch import Batch
from core.batch.new_blocks import NewBlocks
from core.batch.request import Request
from core.batch.table import RequestStart, WindowStart
from core.batch.window_cache import WindowCache, WindowForks
from core.batch.window_host import WindowHost
from core.batch.window_table import WindowTable
from core.kv.block_pool import NULL_BLOCK
from core.kv.page_pool import PagePool
from core.kv.page_room import page_room
from ipc.options.config import EngineConfig
from ipc.tables.arrays import BlockIds, Bools, Int32s, Ints, Rows
from ipc.tables.rounding import ceil_div


def make_batch(config: EngineConfig, eos_token_ids: tuple[int, ...]) -> Batch:
    """Return the batch of a resolved config."""
    return (WindowBatch if config.kv_page_blocks else Batch)(config, eos_token_ids)


class WindowBatch(Batch):
    """The rows, with the blocks of both kinds of layers."""

    blocks_of_a_block = 2
    pool: PagePool
    prefix_cache: WindowCache
    forks: WindowForks
    host_cache: WindowHost

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...]) -> None:
        assert config.kv_window, f"pages of {config.kv_page_blocks} blocks without a window"
        assert config.kv_page_blocks, "the layers have their blocks in common"
        assert config.max_num_batched_tokens is not None, "the config is not resolved"
        self.windows = WindowTable(config.max_num_seqs)
        self._pages = config.kv_page_blocks
        self.room = page_room(config, config.kv_window, config.kv_page_blocks, config.max_num_batched_tokens)
        super().__init__(config, eos_token_ids)
        self.prefix_cache.host = self.host_cache if self.host_cache.num_slots else None

    def _make_host(self, num_slots: int, first: int) -> WindowHost:
        return WindowHost(self, num_slots, first, self._pages)

    def _make_pool(self, config: EngineConfig, num_blocks: int, num_rings: int) -> PagePool:
        return PagePool(num_blocks, config.block_size, self._pages, num_rings)

    def _make_cache(self, config: EngineConfig) -> WindowCache:
        return WindowCache(self.table, self.pool, config.enable_prefix_caching, self.room)

    def _make_forks(self) -> WindowForks:
        return WindowForks(self.table, self.windows, self.pool, self.prefix_cache, self.in_flight, self.room)

    # --- rows that run --------------------------------------------------------------------------------------------

    def has_all_blocks(self, rows: Rows) -> Bools:
        """Return which rows have all the blocks that they can ever need, bool [n]."""
        most = self.num_blocks_of(self.table.max_computed_tokens[rows])
        has_all: Bools = (self.table.num_blocks[rows] >= most) & (self.windows.num_blocks[rows] >= most)
        return has_all

    def lacking(self, rows: Rows, ends: Ints) -> Ints:
        """Return how many pages [n] rows must be given before ends [n] of their tokens are computed."""
        blocks = self.num_blocks_of(ends)
        others = self.room.pages(np.maximum(blocks - self.table.num_blocks[rows], 0))
        missing: Ints = others + np.maximum(blocks - self.windows.num_blocks[rows], 0)
        return missing

    def room_of(self, rows: Rows) -> Ints:
        """Return how many tokens [n] the rows' blocks have room for."""
        return np.minimum(self.table.num_blocks[rows], self.windows.num_blocks[rows]) * self.block_size

    def grow(self, new: NewBlocks, rows: Rows, lacking: Ints, counts: Ints) -> None:
        """Give rows the pages that they lack, as lacking() says, for counts [n] more tokens."""
        table, windows = self.table, self.windows
        blocks = self.num_blocks_of(table.num_computed_tokens[rows] + counts)
        seen = np.maximum(blocks - windows.num_blocks[rows], 0)
        pages, of_windows = self.pool.allocate(int(lacking.sum())), int(seen.sum())
        others, growing = lacking - seen, lacking > seen
        if growing.any():
            block_ids = self.pool.blocks_in(pages[of_windows:])
            new.add(table.append_blocks(rows[growing], others[growing] * self._pages, block_ids), block_ids)
        if of_windows:
            growing, block_ids = seen > 0, pages[:of_windows] * self._pages
            first = windows.num_blocks[rows[growing]]
            owners = windows.append(rows[growing], seen[growing], block_ids)
            new.add_windows(owners, block_ids)
            places = first.repeat(seen[growing]) + np.arange(of_windows)
            places -= (seen[growing].cumsum() - seen[growing]).repeat(seen[growing])
            self.pool.names.filled_beside[table.blocks.get(owners, places)] = block_ids

    def num_promised_blocks(self) -> int:
        """Return the number of pages that rows still need for their known tokens; starts must leave these free."""
        return int(self._promised(self.rows).sum())

    def num_promised_blocks_of(self, row: int) -> int:
        """Return this row's share of num_promised_blocks()."""
        return int(self._promised(np.array([row]))[0])

    def _promised(self, rows: Rows) -> Ints:
        table, windows = self.table, self.windows
        known, released = self.num_blocks_of(table.num_tokens[rows]), windows.num_released[rows]
        others = self.room.pages(np.maximum(known - table.num_blocks[rows], 0))
        most = np.where(
            table.keeps_blocks[rows] > 0, known - released, np.minimum(known - released, self.room.most_seen)
        )
        promised: Ints = others + np.maximum(most - (windows.num_blocks[rows] - released), 0)
        return promised

    def release_passed(self) -> None:
        """Free the blocks of layers with a window that no row reads again; they keep their names, as in Batch."""
        table, windows, rows = self.table, self.windows, self.rows
        if not len(rows):
            return
        passed = (table.num_computed_tokens[rows] - (self._window - 1)) >> self._shift
        if self.prefix_cache.is_enabled:
            np.minimum(passed, table.num_named_blocks[rows], out=passed)
        due = (passed > windows.num_released[rows]) & (table.keeps_blocks[rows] == 0)
        if np.count_nonzero(due):
            rows, passed = rows[due], passed[due]
            self._free_windows(rows, passed)
            windows.num_released[rows] = passed

    def _free_windows(self, rows: Rows, lasts: Ints) -> BlockIds:
        """Free the rows' blocks in layers with a window before places lasts[i], row after row, tail first."""
        return self._drop(self.windows.blocks, rows, self.windows.num_released[rows], lasts)

    def _free_all(self, rows: Rows) -> BlockIds:
        freed: list[BlockIds] = []
        for row in rows.tolist():
            one = np.array([row])
            freed += [self._free_windows(one, self.windows.num_blocks[one]), super()._free_all(one)]
        self.windows.remove(rows)
        return np.concatenate(freed)

    def renew(self, new: NewBlocks) -> None:
        """Add all blocks in layers with a window of the rows that the runner gets anew."""
        rows = list(self.carried.renewed_rows)
        new.drop_windows(rows)
        for row in rows:
            blocks = self.windows.blocks.read(row, 0, int(self.windows.num_blocks[row]))
            new.add_windows(np.full(len(blocks), row), blocks)

    def take_over(self, row: int, source: int) -> None:
        """Let an idle row of a beam search become a copy of another idle row of it, as in Batch."""
        super().take_over(row, source)
        windows, last = self.windows, int(self.table.num_tokens[source])
        shared, first = last >> self._shift, int(windows.num_released[source])
        old, new = (windows.blocks.read(one, 0, int(windows.num_blocks[one])) for one in (row, source))
        self.pool.hold(new[first:shared])
        dropped = old[int(windows.num_released[row]) : shared]
        self.pool.free(dropped[::-1], self.in_flight[-1][0] if self.in_flight else None)
        windows.blocks.set(np.full(shared, row), np.arange(shared), new[:shared])
        windows.num_released[row] = first
        if last & (self.block_size - 1):
            self._copy(int(new[shared]), int(old[shared]))

    def _copy(self, source: int, target: int) -> None:
        """Let the next plan copy a block of layers with a window: all blocks of its page."""
        inside, within = np.arange(self._pages, dtype=np.int32), self.carried.within
        within.sources.append(source + inside)
        within.targets.append(target + inside)

    # --- copies on the host ---------------------------------------------------------------------------------------

    def num_copied(self, num_tokens: Ints) -> Ints:
        """Return the number of blocks [n] that are copied to the host with num_tokens [n] tokens of a row."""
        blocks = self.num_blocks_of(num_tokens)
        passed = np.maximum(num_tokens - (self._window - 1), 0) >> self._shift
        copied: Ints = blocks + self._pages * (blocks - passed)
        return copied

    def copied_blocks(self, row: int, num_tokens: int) -> Int32s | None:
        """Return the blocks with what the row's next token after so many reads, those of windows last; see Batch."""
        first, count = self.room.num_passed(num_tokens), ceil_div(num_tokens, self.block_size)
        if self.windows.num_released[row] > first:
            return None
        seen = self.windows.blocks.read(row, first, count)
        return np.concatenate([self.table.blocks.read(row, 0, count), self._inside(seen)])

    def blocks_to_fill(self, start: RequestStart, num_tokens: int) -> tuple[Ints, Int32s]:
        """Return which of the blocks copied with num_tokens tokens the request lacks, and its own for them."""
        others, own = super().blocks_to_fill(start, num_tokens)
        first, count, window = self.room.num_passed(num_tokens), ceil_div(num_tokens, self.block_size), start.window
        assert window is not None, "a start without its windows' blocks"
        places = np.arange(window.num_passed + len(window.hits), count)
        lacking = count + ((places - first)[:, None] * self._pages + np.arange(self._pages)).reshape(-1)
        return np.concatenate([others, lacking]), np.concatenate([own, self._inside(window.block_ids[places])])

    def _inside(self, blocks: Int32s) -> Int32s:
        """Return all blocks of the pages of these blocks of layers with a window."""
        inside: Int32s = np.add.outer(blocks, np.arange(self._pages, dtype=np.int32)).reshape(-1)
        return inside

    # --- requests that start --------------------------------------------------------------------------------------

    def most_blocks(self, request: Request) -> int:
        """Return how many pages the request may hold at once."""
        return self.room.num_pages(request.max_computed_tokens, bool(request.choices))

    def most_blocks_of_beams(self, num_shared: int, num_own: int) -> int:
        """Return how many pages the beams of a search may hold together."""
        return 3 * num_shared + 2 * num_own  # shared ones may be found in two places, each alone in its page

    def num_held(self, row: int) -> int:
        """Return how many pages the row holds, shared ones included."""
        held = np.concatenate([self.table.block_ids(row), self.windows.block_ids(row)])
        return len(np.unique(held // self._pages))

    def lacking_of(self, start: RequestStart, num_blocks: int) -> int:
        """Return how many pages the request must be given to start with so many blocks, hits included."""
        window = start.window
        if window is None:
            window = start.window = self._window_start(start)
        others = max(0, num_blocks - start.num_hits)
        return -(-others // self._pages) + max(0, self._num_seen(start, window, num_blocks) - window.num_hits)

    def _window_start(self, start: RequestStart) -> WindowStart:
        num_passed = self.room.num_passed(start.num_computed_tokens)
        if start.fork is not None:
            return WindowStart(num_passed, start.fork.window_blocks[num_passed : start.num_hits])
        if start.host_slots is not None:
            return self.host_cache.window_start(start, num_passed)
        return WindowStart(num_passed, self.prefix_cache.beside(start.hits, num_passed))

    def _num_seen(self, start: RequestStart, window: WindowStart, num_blocks: int) -> int:
        """Return how many blocks of layers with a window the request has where it has num_blocks of the others."""
        seen = num_blocks - window.num_passed
        return seen if start.request.choices else min(seen, self.room.most_seen)

    def num_revived(self, start: RequestStart) -> int:
        """Return how many pages of the request's hits are free now."""
        return self.pool.num_revived(self._hits(start))

    def hold(self, start: RequestStart) -> None:
        """Hold the request's hits, before any allocation, which might evict them."""
        self.pool.hold(self._hits(start))

    def _hits(self, start: RequestStart) -> Int32s:
        assert start.window is not None, "a start without its windows' blocks"
        return np.concatenate([start.hits, start.window.found])

    def place(self, starts: list[RequestStart], blocks: Int32s) -> None:
        """Give each of these requests num_taken of the pages, behind its hits."""
        first = 0
        for start in starts:
            self._place(start, blocks[first : first + start.num_taken])
            first += start.num_taken

    def _place(self, start: RequestStart, blocks: Int32s) -> None:
        window = start.window
        assert window is not None, "a start without its windows' blocks"
        num_seen = max(0, self._num_seen(start, window, start.num_given) - window.num_hits)
        seen, others = (
            blocks[:num_seen] * np.int32(self._pages),
            self.pool.blocks_in(blocks[num_seen:]).astype(np.int32),
        )
        start.block_ids = np.concatenate([start.hits, others])
        start.num_given = len(start.block_ids)
        begin, first = window.hits, window.num_passed + len(window.hits)
        if num_copied := len(window.leads):
            begin = begin.copy()
            begin[begin == NULL_BLOCK], seen = seen[:num_copied], seen[num_copied:]
        window.block_ids = np.concatenate([np.zeros(window.num_passed, np.int32), begin, seen])
        self.pool.names.filled_beside[start.block_ids[first : first + len(seen)]] = seen
        if start.fork is not None and start.fork.copied_block != NULL_BLOCK:
            self.carried.within.add(start.fork.copied_block, int(start.block_ids[start.num_hits]))
            self._copy(int(start.fork.window_blocks[start.num_hits]), int(window.block_ids[start.num_hits]))

    def note_freed(self, row: int, num_dropped: Int32s, start: RequestStart) -> int:
        """Count the references that the row's end would drop, as in Batch; return how many pages would come free."""
        held = np.concatenate([self.table.block_ids(row), self.windows.block_ids(row)]) // self._pages
        np.add.at(num_dropped, held, 1)
        pages = np.unique(held)
        alone = (self.pool.ref_count[pages] == num_dropped[pages]) & ~np.isin(pages, self._hits(start) // self._pages)
        return int(np.count_nonzero(alone))

    def launch(self, starts: list[RequestStart]) -> Ints:
        """Give these requests rows, and return the rows in the order of the requests."""
        rows = super().launch(starts)
        windows = [start.window for start in starts if start.window is not None]
        self.windows.add(rows, [one.num_passed for one in windows], [one.block_ids for one in windows])
        return rows

    def check_integrity(self) -> None:
        """Check the tables, the pool and the order. Errors: AssertionError with the numbers."""
        super().check_integrity()
        self.windows.check_integrity(self.rows)
        places = self.windows.num_blocks[self.rows]
        assert (places <= self.table.num_blocks[self.rows]).all(), f"{places} blocks beside {self.table.num_blocks}"

    def _held(self) -> list[BlockIds]:
        windows: list[BlockIds] = [self.windows.block_ids(row) for row in self.rows.tolist()]
        return [*super()._held(), *windows, *(blocks[blocks > 0] for _, blocks in self.forks.kept_windows)]
