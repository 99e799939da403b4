"""Forks: a choice of a request starts with what another choice of it has computed.

Whole blocks are shared. The last block is copied, because both choices will write to it. A copy has the same bits as
its source, so a choice gets the tokens that it would get alone.
"""

from collections import deque

from core.batch.block_table import BlockTable
from core.batch.prefix_cache import PrefixCache
from core.batch.request import NO_ROW, Request
from core.batch.table import Fork
from core.kv.block_pool import NULL_BLOCK, BlockPool
from core.kv.cache_kinds import CacheRoom
from ipc.tables.arrays import Int32s, Ints
from ipc.tables.rounding import ceil_div


class Forks:
    """Finds what a waiting choice can take over from the running choices of its message."""

    def __init__(
        self,
        tables: tuple[BlockTable, ...],
        room: CacheRoom,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        in_flight: deque[tuple[int, Ints, Ints]],
    ) -> None:
        """tables: one per kind of layer. in_flight: the batch's, whose last step fences blocks that are freed."""
        self._tables, self._others = tables, room.kinds[1:]
        self._pool = pool
        self._in_flight = in_flight
        #: Whether rows are never forked, because they have recurrent states, which are only of their last computed
        #: tokens.
        self.is_off = False
        self.least_shared = 1  # in tokens: if a prompt is no longer than this, each choice computes its own
        #: Choices, and for each kind of layer the blocks with their prompt, of a choice that has ended.
        self.kept: list[tuple[list[Request], list[Int32s]]] = []
        self._prefix_cache = prefix_cache
        self._block_size = prefix_cache.block_size

    def find(self, request: Request, hits: Int32s) -> Fork | None:
        """Return the prompt as computed by a running choice, except the request's last token, or None.

        hits: the blocks found in the prefix cache. None: the prefix cache has just as much. If the prefix cache is on,
        it has the whole blocks, and only the partly filled one comes from the choice. It may lack some after
        reset_prefix_cache(); then nothing is forked.
        """
        if self.is_off or request.swapped is not None or request.needs_whole_prompt:
            return None
        num_cached, is_named = len(hits) * self._block_size, self._prefix_cache.is_enabled
        row, kept, num_tokens = self._source(request)
        num_shared = num_tokens // self._block_size
        if num_tokens <= num_cached or (is_named and num_shared != len(hits)):
            return None
        count = ceil_div(num_tokens, self._block_size)
        found, *others = kept if row == NO_ROW else [table.blocks.read(row, 0, count) for table in self._tables]
        blocks = hits if is_named else found[:num_shared]
        if others and not self._can_use(request, blocks, others, num_tokens):
            return None
        is_whole = num_tokens == num_shared * self._block_size
        copied = NULL_BLOCK if is_whole else int(found[num_shared])
        return Fork(blocks, copied, num_tokens, num_tokens - num_cached, tuple(one[:count] for one in others))

    def _can_use(self, request: Request, blocks: Int32s, others: list[Int32s], num_tokens: int) -> bool:
        """Return whether the source has the blocks of further kinds that the request's first token reads."""
        if not self._prefix_cache.fits(request, blocks):
            return False  # the source is a fork, and so was its own source
        count = ceil_div(num_tokens, self._block_size)
        windows = zip(self._others, others, strict=True)
        # A source that has resumed may have fewer.
        return all((found[kind.num_passed(num_tokens) : count] != NULL_BLOCK).all() for kind, found in windows)

    def num_sure(self, num_prompt_tokens: int) -> int:
        """Return how many blocks of a prompt its choices are certain to share."""
        return 0 if self.is_off else (num_prompt_tokens - 1) // self._block_size

    def keep(self, request: Request) -> None:
        """Keep the prompt's blocks of a choice that ends, for choices that start in the next plan; see drop()."""
        count, kept = ceil_div(request.num_prompt_tokens, self._block_size), list[Int32s]()
        for table in self._tables:
            kept.append(table.blocks.read(request.row, 0, min(count, int(table.num_blocks[request.row]))))
            self._pool.hold(kept[-1][int(table.num_released[request.row]) :])
        self.kept.append((request.choices, kept))

    def drop(self, choices: list[Request] | None = None) -> None:
        """Free the blocks that were kept, for all messages or for the one with these choices."""
        kept, self.kept = self.kept, []
        for owners, blocks in kept:
            if choices is not None and owners is not choices:
                self.kept.append((owners, blocks))
                continue
            for one in blocks:
                self._pool.free(one[one > NULL_BLOCK][::-1], self._in_flight[-1][0] if self._in_flight else None)

    def held(self) -> list[Int32s]:
        """Return the kept blocks."""
        return [one[one > NULL_BLOCK] for _, blocks in self.kept for one in blocks]

    def _source(self, request: Request) -> tuple[int, list[Int32s], int]:
        """Return the row or kept blocks with most of the request's prompt, and the number of tokens; 0: none.

        Tokens of steps in flight count, because blocks are copied after these steps.
        """
        wanted = min(request.num_prompt_tokens, request.num_tokens - 1)
        for choices, blocks in self.kept:
            if choices is request.choices:
                return NO_ROW, blocks, wanted
        table, best, most = self._prefix_cache.table, NO_ROW, 0
        for choice in request.choices:
            if choice.row != NO_ROW and most < wanted:
                computed = min(int(table.num_computed_tokens[choice.row]), wanted)
                if computed > most:
                    best, most = choice.row, computed
        return best, [], most
