"""Batch: the running requests with their rows, order and blocks. It allocates and releases rows.

A row has a block table for each kind of layer (core/kv/cache_kinds.py). Most models have one kind. Layers with a window
that have their own blocks are a second kind: a row frees blocks that their window has passed, but keeps the blocks of
the first kind until it ends. In the counts of most methods, a block of the pool is a page.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from core.batch.block_table import BlockTable, OtherKind
from core.batch.carried import Carried, CarriedColumns
from core.batch.forks import Forks
from core.batch.host_cache import HostCache
from core.batch.kept_states import KeptStates
from core.batch.new_blocks import NewBlocks
from core.batch.prefix_cache import PrefixCache
from core.batch.request import Request
from core.batch.stop_check import StopCheck
from core.batch.table import BatchTable, OtherStart, RequestStart
from core.kv.block_pool import NULL_BLOCK, BlockPool
from core.kv.cache_kinds import room_of
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import BlockIds, Bools, Int32s, Ints, Rows
from ipc.tables.rounding import ceil_div


class Keeper(Protocol):
    """Holds blocks that no row need hold."""

    def held(self) -> list[Int32s]:
        """Return the blocks, each as often as it is held."""

    def num_references(self, blocks: BlockIds) -> Ints:
        """Return how often each of these blocks [n] is held."""


class Batch:
    """The rows of running requests, sorted by (rank, serial), and what belongs to them: table, pool and cache."""

    def __init__(self, config: ResolvedConfig, eos_token_ids: tuple[int, ...]) -> None:
        self.block_size = config.block_size
        self._shift = config.block_size.bit_length() - 1  # block sizes are powers of two
        self.room = room_of(config)
        self.first, *others = self.room.kinds
        self.table = BatchTable(config.max_num_seqs)  # it has the blocks of the first kind of layer
        self.others = tuple(
            OtherKind(number, kind, BlockTable(config.max_num_seqs)) for number, kind in enumerate(others)
        )
        self.tables: tuple[BlockTable, ...] = (self.table, *(other.table for other in self.others))
        kinds_of_tables = zip(self.room.kinds, self.tables, strict=True)
        self._sliding = [(kind.window, table) for kind, table in kinds_of_tables if kind.window]
        #: For each table: how many blocks of the pool one of its blocks takes.
        self._widths = [self.first.page_blocks // kind.page_blocks for kind in self.room.kinds]
        self._tells_urgency = config.scheduling_policy == "priority"
        num_rings = 3 if self._tells_urgency else 1
        self.pool = BlockPool(
            config.num_blocks_override, config.block_size, num_rings, self.first.page_blocks, len(others)
        )
        self.prefix_cache = PrefixCache(self.table, self.pool, self.room, config.enable_prefix_caching)
        self.stop_check = StopCheck(self.table, eos_token_ids)
        self.rows: Ints = np.zeros(0, np.int64)
        self.in_flight: deque[tuple[int, Ints, Ints]] = deque()  # (step, the plan's rows, their tenancies)
        self.forks = Forks(self.tables, self.room, self.pool, self.prefix_cache, self.in_flight)
        self.keepers: list[Keeper] = []
        self.carried = Carried()
        self.kept_states: KeptStates | None = None  # for a model with recurrent layers
        self.host_cache = HostCache(self, config.num_host_blocks, config.num_swap_blocks)
        if others and self.host_cache.num_slots:
            self.prefix_cache.host = self.host_cache
        self.before_release: list[Callable[[Rows], None]] = []  # called with rows that are about to be released
        self.before_passed: list[Callable[[Rows], None]] = []  # called with rows that are about to free passed blocks
        self.on_release: list[Callable[[Request], None]] = []  # called for each request that loses its row
        self.on_copy: list[Callable[[int, int], None]] = []  # called with a row that becomes a copy, and its source

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self.rows)

    def num_blocks_of(self, num_tokens: Ints) -> Ints:
        """Return the number of blocks [n] that num_tokens [n] tokens take."""
        return (num_tokens + (self.block_size - 1)) >> self._shift

    def has_all_blocks(self, rows: Rows) -> Bools:
        """Return which rows already have all the blocks that they can ever need, bool [n]."""
        most = self.num_blocks_of(self.table.max_computed_tokens[rows])
        has_all: Bools = self.table.num_blocks[rows] >= most
        for other in self.others:
            has_all &= other.table.num_blocks[rows] >= most
        return has_all

    def lacking(self, rows: Rows, ends: Ints) -> Ints:
        """Return how many blocks [n] the rows lack to compute ends [n] of their tokens."""
        blocks = (ends + (self.block_size - 1)) >> self._shift
        missing: Ints = np.maximum(blocks - self.table.num_blocks[rows], 0)
        if self.others:  # otherwise a block is a page
            missing = self.first.pages(missing)
            for other in self.others:
                missing += np.maximum(blocks - other.table.num_blocks[rows], 0)
        return missing

    def room_of(self, rows: Rows) -> Ints:
        """Return how many tokens [n] fit in the rows' blocks."""
        held = self.table.num_blocks[rows]
        for other in self.others:
            held = np.minimum(held, other.table.num_blocks[rows])
        return held * self.block_size

    def grow(self, new: NewBlocks, rows: Rows, lacking: Ints, counts: Ints) -> None:
        """Give rows the blocks that they lack, as returned by lacking(), for counts [n] more tokens."""
        pages = self.pool.allocate(int(lacking.sum()))
        if self.others:
            self._grow_all(new, rows, lacking, counts, pages)
        else:
            new.add(self.table.append_blocks(rows, lacking, pages), pages)

    def _grow_all(self, new: NewBlocks, rows: Rows, lacking: Ints, counts: Ints, pages: Ints) -> None:
        """Give rows the pages that they lack: those of further kinds of layers first."""
        of_others: list[tuple[OtherKind, Ints, Ints]] = []
        for other in self.others:
            ends = self.num_blocks_of(self.table.num_computed_tokens[rows] + counts)
            missing = np.maximum(ends - other.table.num_blocks[rows], 0)
            lacking, num_pages = lacking - missing, int(missing.sum())
            of_others.append((other, missing, pages[:num_pages]))
            pages = pages[num_pages:]
        owners, lacking = rows[lacking > 0], lacking[lacking > 0] * self.pool.page_blocks
        if len(pages):
            blocks = self.pool.blocks_in(pages)
            new.add(self.table.append_blocks(owners, lacking, blocks), blocks)
        for other, missing, own in of_others:
            if len(own):
                self._grow_other(new, other, rows[missing > 0], missing[missing > 0], own)

    def _grow_other(self, new: NewBlocks, other: OtherKind, rows: Rows, counts: Ints, pages: Ints) -> None:
        """Give rows[i] counts[i] > 0 blocks of another kind of layer.

        The rows have the first kind's blocks for these tokens.
        """
        blocks = pages * self.pool.page_blocks
        places = other.table.num_blocks[rows].repeat(counts) + np.arange(len(blocks))
        places -= (counts.cumsum() - counts).repeat(counts)
        owners = other.table.append_blocks(rows, counts, blocks)
        new.add_other(other.number, owners, blocks)
        self.pool.names.beside[other.number].filled[self.table.blocks.get(owners, places)] = blocks

    def num_promised_blocks(self) -> int:
        """Return how many blocks rows still need for their known tokens. Starting requests must leave these free."""
        return int(self._promised(self.rows).sum())

    def num_promised_blocks_of(self, row: int) -> int:
        """Return this row's share of num_promised_blocks()."""
        return int(self._promised(np.array([row]))[0])

    def _promised(self, rows: Rows) -> Ints:
        table = self.table
        known = self.num_blocks_of(table.num_tokens[rows])
        promised: Ints = np.maximum(known - table.num_blocks[rows], 0)
        if self.others:
            promised = self.first.pages(promised)
        for other in self.others:
            released = other.table.num_released[rows]
            wanted = known - released
            wanted = np.where(table.keeps_blocks[rows] > 0, wanted, np.minimum(wanted, other.kind.most_held))
            promised += np.maximum(wanted - (other.table.num_blocks[rows] - released), 0)
        return promised

    def most_blocks_of_beams(self, num_shared: int, num_own: int) -> int:
        """Return the most blocks that a search's beams hold together: num_shared shared ones, and num_own for each.

        With several kinds of layers, shared blocks may be in two places, each alone in its page.
        """
        return (2 * len(self.tables) - 1) * num_shared + len(self.tables) * num_own

    def num_common_blocks(self) -> int:
        """Return how many leading blocks all running rows have in common; 0 with windows, or if fewer than 2 run.

        A row holds a block once, and equal blocks are in equal places. So their references are counted, not compared.
        """
        count = len(self.rows)
        if count < 2 or self._sliding or self.others:
            return 0
        row = int(self.rows[0])
        blocks = self.table.blocks.read(row, 0, int(self.table.num_blocks[row]))
        if not len(blocks) or self.pool.ref_count[blocks[0]] < count:
            return 0
        references = self.pool.ref_count[blocks]
        for keeper in self.keepers:
            references = references - keeper.num_references(blocks)
        is_common = references == count
        return len(blocks) if is_common.all() else int(is_common.argmin())

    def num_held(self, row: int) -> int:
        """Return how many blocks the row holds, including shared ones."""
        return len(self.pool.pages_of(self._blocks_of(row)))

    def _blocks_of(self, row: int) -> Int32s:
        """Return the row's blocks in all of its tables."""
        return np.concatenate([table.block_ids(row) for table in self.tables])

    # --- copies on the host ---------------------------------------------------------------------------------------

    def num_copied(self, num_tokens: Ints) -> Ints:
        """Return how many blocks [n] are copied to the host with num_tokens [n] tokens of a row."""
        blocks = copied = self.num_blocks_of(num_tokens)
        for other in self.others:
            passed = np.maximum(num_tokens - (other.kind.window - 1), 0) >> self._shift
            copied = copied + self.pool.page_blocks * (blocks - passed)
        return copied

    def copied_blocks(self, row: int, num_tokens: int) -> Int32s | None:
        """Return the blocks read by the token after num_tokens tokens of the row, those of further kinds last.

        None: the row has freed some of them. The copy would lack them, and the row would get them back under their
        names.
        """
        if self.table.num_released[row]:
            return None
        count = ceil_div(num_tokens, self.block_size)
        copied = [self.table.blocks.read(row, 0, count)]
        for other in self.others:
            first = other.kind.num_passed(num_tokens)
            if other.table.num_released[row] > first:
                return None
            copied.append(self._inside(other.table.blocks.read(row, first, count)))
        return np.concatenate(copied)

    def blocks_to_fill(self, start: RequestStart, num_tokens: int) -> tuple[Ints, Int32s]:
        """Return which of the blocks copied with num_tokens tokens the request lacks, and its own blocks for them."""
        num_blocks, width = ceil_div(num_tokens, self.block_size), self.pool.page_blocks
        lacking, own, num_before = [np.arange(start.num_hits, num_blocks)], [], num_blocks
        own.append(start.block_ids[lacking[0]])
        for other, given in zip(self.others, start.others, strict=True):
            first = other.kind.num_passed(num_tokens)
            places = np.arange(given.num_passed + len(given.hits), num_blocks)
            lacking.append(num_before + np.add.outer((places - first) * width, np.arange(width)).reshape(-1))
            own.append(self._inside(given.block_ids[places]))
            num_before += (num_blocks - first) * width
        return np.concatenate(lacking), np.concatenate(own)

    def _inside(self, blocks: Int32s) -> Int32s:
        """Return all blocks of the pool in the pages of these blocks of a further kind of layer."""
        return self.pool.inside(blocks // self.pool.page_blocks).astype(np.int32)

    # --- requests that start --------------------------------------------------------------------------------------

    def lacking_of(self, start: RequestStart, num_blocks: int) -> int:
        """Return how many blocks the request must be given to start with num_blocks blocks, including hits."""
        lacking = -(-(num_blocks - start.num_hits) // self.pool.page_blocks)
        for other in self.others:
            if other.number == len(start.others):
                start.others.append(self._other_of(start, other))
            lacking += self._lacking_of_other(start, other, num_blocks)
        return lacking

    def _other_of(self, start: RequestStart, other: OtherKind) -> OtherStart:
        """Return what the request has of a further kind of layer: blocks found with its hits, or its source's."""
        num_passed = other.kind.num_passed(start.num_computed_tokens)
        if start.fork is not None:
            return OtherStart(num_passed, start.fork.others[other.number][num_passed : start.num_hits])
        if start.host_slots is not None:
            return self.host_cache.other_start(start, other.number, num_passed)
        found = self.pool.names.beside[other.number].found[start.hits[num_passed:]]
        return OtherStart(num_passed, found.astype(np.int32))

    def _lacking_of_other(self, start: RequestStart, other: OtherKind, num_blocks: int) -> int:
        """Return how many blocks of a further kind the request lacks to start with num_blocks of the first kind."""
        given = start.others[other.number]
        held = num_blocks - given.num_passed
        if not start.request.choices:
            held = min(held, other.kind.most_held)
        return max(0, held - given.num_hits)

    def num_revived(self, start: RequestStart) -> int:
        """Return how many of the request's hits are free now."""
        return self.pool.num_revived(self._hits_of(start))

    def hold(self, start: RequestStart) -> None:
        """Hold the request's hits. Call this before any allocation, which might evict them."""
        self.pool.hold(self._hits_of(start))

    def _hits_of(self, start: RequestStart) -> Int32s:
        if not start.others:
            return start.hits
        return np.concatenate([start.hits, *(other.found for other in start.others)])

    def place(self, starts: list[RequestStart], pages: Int32s) -> None:
        """Give each of these requests num_taken of the pages, after its hits."""
        others, first = self.others, 0
        of_others: Sequence[tuple[OtherKind, Int32s]] = ()
        for start in starts:
            fresh = pages[first : first + start.num_taken]
            first += start.num_taken
            if others:
                fresh, of_others = self._split(start, fresh)
            start.block_ids = np.concatenate([start.hits, fresh]) if start.num_hits else fresh
            if start.fork is not None and start.fork.copied_block != NULL_BLOCK:
                self.carried.within.add(start.fork.copied_block, int(start.block_ids[start.num_hits]))
            if others:
                for other, own in of_others:
                    self._place_other(start, other, own)

    def _split(self, start: RequestStart, pages: Int32s) -> tuple[Int32s, list[tuple[OtherKind, Int32s]]]:
        """Return a starting request's new blocks of the first kind of layer, and its pages of the further kinds."""
        of_others = []
        for other in self.others:
            count = self._lacking_of_other(start, other, start.num_given)
            of_others.append((other, pages[:count]))
            pages = pages[count:]
        return self.pool.blocks_in(pages), of_others

    def _place_other(self, start: RequestStart, other: OtherKind, pages: Int32s) -> None:
        """Give a starting request its blocks of a further kind of layer: new pages, after its hits."""
        given, fresh = start.others[other.number], pages * np.int32(self.pool.page_blocks)
        begin, first = given.hits, given.num_passed + len(given.hits)
        if num_copied := len(given.leads):
            begin = begin.copy()
            begin[begin == NULL_BLOCK], fresh = fresh[:num_copied], fresh[num_copied:]
        given.block_ids = np.concatenate([np.zeros(given.num_passed, np.int32), begin, fresh])
        start.num_given = len(start.block_ids)  # the blocks of whole pages
        self.pool.names.beside[other.number].filled[start.block_ids[first : first + len(fresh)]] = fresh
        if start.fork is not None and start.fork.copied_block != NULL_BLOCK:
            source, target = start.fork.others[other.number][start.num_hits], given.block_ids[start.num_hits]
            self._copy(self.pool.page_blocks, int(source), int(target))

    def note_freed(self, row: int, num_dropped: Int32s, start: RequestStart) -> int:
        """Add the references that the row's end would drop to num_dropped [num_blocks], which has those of other rows.

        Return how many blocks would be freed, not counting the hits of the request that starts.
        """
        blocks, size = self._blocks_of(row), self.pool.page_blocks
        np.add.at(num_dropped, blocks // size, 1)
        pages = self.pool.pages_of(blocks)
        alone = self.pool.ref_count[pages] == num_dropped[pages]
        alone &= ~np.isin(pages, self._hits_of(start) // size)
        return int(np.count_nonzero(alone))

    def launch(self, starts: list[RequestStart]) -> Ints:
        """Give these requests rows, and return the rows in the order of the requests."""
        rows = self.table.add(starts)
        for start in starts:
            params = start.request.sampling
            if params is not None and params.stop_token_ids:
                self.stop_check.add(start.request.row, params.stop_token_ids)
        for other in self.others:
            own = [start.others[other.number] for start in starts]
            other.table.begin_rows(rows, [one.num_passed for one in own], [one.block_ids for one in own])
        if self.kept_states is not None:
            self.kept_states.begin(starts, self.host_cache.names, self.carried)
        table, merged = self.table, np.concatenate([self.rows, rows])
        unsure = merged[max(0, len(self.rows) - 1) :]  # those before are in order
        if not self._is_sorted(table.serial[unsure], table.rank[unsure]):
            merged = merged[np.lexsort((table.serial[merged], table.rank[merged]))]
        self.rows = merged
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
        """Free the blocks that no row will read again: their tokens are before the window of the row's next token.

        They keep their names, so the prefix cache can find them until they are allocated again; a row's blocks are
        named before they are freed. The executor's tables still contain them, but its kernels do not read them.
        """
        for window, table in self._sliding:
            rows = self.rows
            passed = (self.table.num_computed_tokens[rows] - (window - 1)) >> self._shift
            if self.prefix_cache.is_enabled:
                np.minimum(passed, self.table.num_named_blocks[rows], out=passed)
            due = (passed > table.num_released[rows]) & (self.table.keeps_blocks[rows] == 0)
            if np.count_nonzero(due):
                rows, passed = rows[due], passed[due]
                for notice in self.before_passed:
                    notice(rows)
                self._free(table, rows, table.num_released[rows], passed)
                table.num_released[rows] = passed

    def _free_all(self, rows: Rows) -> BlockIds:
        """Free all blocks of rows that end, and return the blocks."""
        if not self.others:
            return self._free(self.table, rows, self.table.num_released[rows], self.table.num_blocks[rows])
        freed = [  # row after row, window blocks first
            self._free(table, some, table.num_released[some], table.num_blocks[some])
            for some in rows[:, None]
            for table in reversed(self.tables)
        ]
        for other in self.others:
            other.table.end_rows(rows)
        return np.concatenate(freed)

    def _free(self, table: BlockTable, rows: Rows, firsts: Ints, lasts: Ints) -> BlockIds:
        """Free the rows' blocks from firsts[i] to before lasts[i], row after row, tail first, and return them."""
        counts = lasts - firsts
        ends = counts.cumsum()
        places = (ends + firsts).repeat(counts) - np.arange(1, int(ends[-1]) + 1)
        blocks = table.blocks.get(rows.repeat(counts), places)
        if self._tells_urgency:  # ring 0, 1, 2: less urgent than, equal to, or more urgent than the default priority
            self.pool.set_urgency(blocks, (1 - np.sign(self.table.level[rows])).repeat(counts))
        self.pool.free(blocks, self.in_flight[-1][0] if self.in_flight else None)
        return blocks

    def renew(self, new: NewBlocks) -> None:
        """Add the new blocks of rows that are sent to the runner again, unless they are sent with the rows."""
        rows = list(self.carried.renewed_rows)
        new.drop_others(rows)
        for other in self.others:
            for row in rows:
                blocks = other.table.blocks.read(row, 0, int(other.table.num_blocks[row]))
                new.add_other(other.number, np.full(len(blocks), row), blocks)

    def take_carried(self) -> CarriedColumns:
        """Return what the plan being finished carries. Later changes go into the next plan."""
        columns = self.carried.take()
        self.host_cache.end_plan()
        return columns

    def take_over(self, row: int, source: int) -> None:
        """Make an idle row of a beam search a copy of another idle row of the search that has as many tokens.

        Whole blocks are shared. The partly filled block is copied into the row's own block. The row is sent to the
        runner again.
        """
        table, last = self.table, int(self.table.num_tokens[source])
        for width, one in zip(self._widths, self.tables, strict=True):
            self._share(one, row, source, last, width)
        first = int(table.num_prompt_tokens[row])
        table.tokens.set(np.full(last - first, row), np.arange(first, last), table.tokens.read(source, first, last))
        table.content[row], table.num_named_blocks[row] = table.content[source], table.num_named_blocks[source]
        request, num_kept = table.request[row], first >> self._shift
        assert request is not None, f"row {row} has no request"
        if len(request.block_hashes) > num_kept:  # while it waited it had other tokens after its prompt
            request.block_hashes = request.block_hashes[:num_kept]
        for listener in self.on_copy:
            listener(row, source)

    def _share(self, table: BlockTable, row: int, source: int, num_tokens: int, width: int) -> None:
        """Let a row share the source's whole blocks of num_tokens tokens, and copy the partly filled block."""
        shared, first = num_tokens >> self._shift, int(table.num_released[source])
        old, new = (table.blocks.read(one, 0, int(table.num_blocks[one])) for one in (row, source))
        self.pool.hold(new[first:shared])
        dropped = old[int(table.num_released[row]) : shared]
        self.pool.free(dropped[::-1], self.in_flight[-1][0] if self.in_flight else None)
        table.blocks.set(np.full(shared, row), np.arange(shared), new[:shared])
        table.num_released[row] = first
        if num_tokens & (self.block_size - 1):
            self._copy(width, int(new[shared]), int(old[shared]))

    def _copy(self, width: int, source: int, target: int) -> None:
        """Add to the next plan a copy of `width` blocks of the pool within the cache."""
        inside, within = np.arange(width, dtype=np.int32), self.carried.within
        within.sources.append(source + inside)
        within.targets.append(target + inside)

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
        """Drop what the next plan was to carry for rows that are gone: their renewal, and copies into their blocks."""
        for row in rows:
            self.carried.renewed_rows.pop(row, None)
        self.carried.within.drop_into(blocks)

    def _is_sorted(self, serials: Ints, ranks: Ints) -> bool:
        later = (ranks[1:] > ranks[:-1]) | ((ranks[1:] == ranks[:-1]) & (serials[1:] > serials[:-1]))
        return int(np.count_nonzero(later)) == len(later)

    def check_integrity(self) -> None:
        """Check the table, the pool and the order. Errors: AssertionError with the numbers."""
        self.table.check_integrity(self.rows)
        for other in self.others:
            other.table.check_blocks(self.rows)
            places = other.table.num_blocks[self.rows]
            assert (places <= self.table.num_blocks[self.rows]).all(), f"{places} others, {self.table.num_blocks}"
        self.pool.check_integrity(self._held())
        self.host_cache.check_integrity()
        if self.kept_states is not None:
            self.kept_states.check_integrity()
        if len(self.rows) > 1:
            serials, ranks = self.table.serial[self.rows], self.table.rank[self.rows]
            assert self._is_sorted(serials, ranks), f"out of order: {self.rows}"

    def _held(self) -> list[BlockIds]:
        """Return all block tables, and the blocks that are kept for forks."""
        held: list[BlockIds] = [table.block_ids(row) for table in self.tables for row in self.rows.tolist()]
        for keeper in self.keepers:
            held += keeper.held()
        return [*held, *self.forks.held()]
