"""PrefixCache: finds whole KV blocks by their content. core/kv/block_names.py explains the names."""

from typing import Protocol

import numpy as np

from core.batch.kept_states import KeptStates
from core.batch.request import Request
from core.batch.table import BatchTable, RequestStart
from core.kv.block_names import block_key, hash_blocks
from core.kv.block_pool import NULL_BLOCK, BlockPool
from core.kv.cache_kinds import CacheRoom
from ipc.tables.arrays import NO_INT32S, Int32s, Ints, Rows
from ipc.tables.rounding import ceil_div


class HostReach(Protocol):
    """Keeps blocks on the host."""

    def num_usable(self, request: Request, hits: Int32s, content: int) -> int:
        """Return how many of a waiting request's first blocks it can start with. hits: all that the cache has."""

    def num_before_state(self, request: Request, contents: Ints) -> int | None:
        """Return with how many of the cache's blocks, by their contents, a request should start to reach a state here.

        None: no state here is later than the cache's.
        """


class PrefixCache:
    """Names the blocks of running rows and finds the blocks of waiting requests.

    In layers that see the whole context, a request needs all blocks before its first token. In layers with a window
    that have their own blocks, it needs those of the window. If some of these are evicted, it finds fewer tokens.
    """

    def __init__(self, table: BatchTable, pool: BlockPool, room: CacheRoom, enabled: bool) -> None:
        self.table = table
        self._names = pool.names
        self._room, self._num_pages = room, pool.num_blocks - 1
        self.block_size = pool.names.block_size
        self._shift = self.block_size.bit_length() - 1  # block sizes are powers of two
        self.is_enabled = enabled
        self.kept_states: KeptStates | None = None  # for a model with recurrent layers
        self.host: HostReach | None = None  # with further kinds of layers, or recurrent ones

    def prepare(self, request: Request) -> None:
        """Hash the whole blocks of a request that will wait, once, because many steps may look it up."""
        if self.is_enabled and (count := request.num_tokens // self.block_size) > (have := len(request.block_hashes)):
            token_ids = request.token_ids[have * self.block_size : count * self.block_size]
            request.block_hashes.extend(hash_blocks(token_ids.reshape(-1, self.block_size)).tolist())
            if not have:
                request.first_key = block_key(request.root, request.block_hashes[0])

    def find(self, request: Request) -> tuple[Int32s, int]:
        """Return the usable blocks with the waiting request's first tokens, and the last one's content number.

        With recurrent layers, the state after the last block must be kept.
        """
        if request.first_key not in self._names.block_of_key:
            return NO_INT32S, request.root
        blocks, content = self.find_all(request)
        if self.kept_states is None and not self._names.beside:
            return blocks, content
        count = len(blocks)
        if self.kept_states is not None:
            request.known_end = count * self.block_size
            contents = self._names.content[blocks]
            before = None if self.host is None else self.host.num_before_state(request, contents)
            count = self.kept_states.reachable(contents) if before is None else before
        if count and self._names.beside:
            count = self._num_usable(request, blocks, content)
        if count == len(blocks):
            return blocks, content
        return blocks[:count], int(self._names.content[blocks[count - 1]]) if count else request.root

    def find_all(self, request: Request) -> tuple[Int32s, int]:
        """Return the named blocks with the waiting request's first tokens, and the last one's content number.

        The request's last token is never included, because it must be computed. A request that needs its whole prompt
        computed gets no blocks.
        """
        if request.needs_whole_prompt:
            return NO_INT32S, request.root
        count = (len(request.token_ids) - 1) // self.block_size
        token_ids = request.token_ids[: count * self.block_size].reshape(count, self.block_size)
        return self._names.find(request.root, token_ids, request.block_hashes[:count])

    def _num_usable(self, request: Request, hits: Int32s, content: int) -> int:
        """Return how many of these found blocks can be used: their windows' blocks are in the cache or on the host.

        Blocks copied back for a swapped request do not belong to the host cache.
        """
        if self.host is not None and request.swapped is None:
            count = min(len(hits), self.host.num_usable(request, hits, content))
        else:
            count = self._room.num_usable(
                len(hits), [beside.found[hits] != NULL_BLOCK for beside in self._names.beside]
            )
        return count if self.fits(request, hits[:count]) else 0

    def fits(self, request: Request, hits: Int32s) -> bool:
        """Return whether the request could ever finish with these first blocks.

        Their pages may also hold others' blocks.
        """
        first, num_hits = self._room.kinds[0], len(hits)
        most = self._room.num_pages(request.max_computed_tokens, bool(request.choices))
        if most + num_hits <= self._num_pages:
            return True
        shared = len(np.unique(hits // first.page_blocks))
        total = ceil_div(request.max_computed_tokens, self.block_size)
        own = ceil_div(total - num_hits, first.page_blocks) - ceil_div(total, first.page_blocks)
        return most + shared + own <= self._num_pages

    def name_full_blocks(self, rows: Rows, ends: Ints) -> None:
        """Name the blocks whose tokens are all known and will be computed by the end of the step being planned.

        ends [n]: how many known tokens of the rows are computed after that step. A request that finds the blocks runs
        in this step or a later one, and every layer stores the step's K and V before it reads.
        """
        if not self.is_enabled:
            return
        table = self.table
        more = (ends >> self._shift) - table.num_named_blocks[rows]
        full = (more > 0).nonzero()[0]
        if not len(full):
            return
        rows, more = rows[full], more[full]
        named = table.num_named_blocks[rows]
        one = more == 1
        if np.count_nonzero(one) == len(rows):
            self._name_one_each(rows, named)
            return
        self._name_one_each(rows[one], named[one])
        for row, start, count in zip(rows[~one].tolist(), named[~one].tolist(), more[~one].tolist(), strict=True):
            blocks = table.blocks.read(row, start, start + count)
            tokens = table.tokens.read(row, start * self.block_size, (start + count) * self.block_size)
            tokens = tokens.reshape(count, self.block_size)
            hashes = hash_blocks(tokens).tolist()
            table.content[row] = self._names.name_run(blocks, int(table.content[row]), tokens, hashes)
            table.num_named_blocks[row] = start + count

    def name_starts(self, starts: list[RequestStart]) -> None:
        """Name the full blocks of these requests, except hits and blocks copied back, which already have names.

        No two requests may have the same first block unless it is a hit, and then not the same next block.
        """
        if not self.is_enabled:
            return
        size, shift, names = self.block_size, self._shift, self._names
        fresh: list[RequestStart] = []  # starts whose next content is new
        blocks, tokens, lengths = [], [], []
        for start in starts:
            request, named = start.request, start.num_hits + start.num_loaded
            full = start.num_named_blocks = (start.num_computed_tokens + start.num_tokens) >> shift
            if full == named:
                continue
            block_ids, token_ids = start.block_ids[named:full], request.token_ids[named * size : full * size]
            key = block_key(start.content, request.block_hashes[named]) if named else request.first_key
            if key in names.block_of_key:
                hashes = request.block_hashes[named:full]
                start.content = names.name_run(block_ids, start.content, token_ids.reshape(-1, size), hashes)
                continue
            fresh.append(start)
            blocks.append(block_ids)
            tokens.append(token_ids)
            lengths.append(full - named)
        if fresh:
            parents = np.array([start.content for start in fresh])
            token_ids = np.concatenate(tokens).reshape(-1, size)
            lasts = names.name_runs(np.concatenate(blocks), np.array(lengths), parents, token_ids)
            for start, last in zip(fresh, lasts.tolist(), strict=True):
                start.content = last

    def _name_one_each(self, rows: Rows, indices: Ints) -> None:
        """Name one block of each row: the one at indices[i] in the table of rows[i]."""
        table, size = self.table, self.block_size
        token_ids = table.tokens.get_runs(rows, indices * size, size)
        blocks = table.blocks.get(rows, indices)
        table.content[rows] = self._names.name(blocks, table.content[rows], token_ids)
        table.num_named_blocks[rows] = indices + 1
