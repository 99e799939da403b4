"""The kinds of layers that a KV cache distinguishes, and how many of its pages a request takes."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.tables.arrays import Bools, Ints
from ipc.tables.rounding import ceil_div


class CacheKind(NamedTuple):
    """Layers that use the same block tables.

    The pool allocates pages (core/models/layers/cache_pages.py). A page has page_blocks blocks of these layers. If all
    layers use the same tables, a page is one block.
    """

    block_size: int
    page_blocks: int
    window: int = 0  # tokens that a token sees, including itself; 0 = all before it
    #: The most blocks that a row holds: those of its window and of a step's tokens. 0 = all blocks of its tokens.
    most_held: int = 0

    def pages(self, num_blocks: Ints) -> Ints:
        """Return the number of pages [n] that num_blocks [n] blocks take."""
        return (num_blocks + (self.page_blocks - 1)) // self.page_blocks

    def num_passed(self, num_tokens: int) -> int:
        """Return how many blocks are not read by any token from this position on. The kind has a window."""
        return max(0, num_tokens - (self.window - 1)) // self.block_size

    def num_missing(self, is_there: Bools) -> Ints:
        """Return how many blocks are missing to start with the first 0, 1, ... n blocks of a prompt, int64 [n + 1].

        Only blocks in the window before the next token count. is_there [n]: whether each block is there.
        """
        counts = np.arange(len(is_there) + 1)
        num_passed = np.maximum(counts * self.block_size - (self.window - 1), 0) // self.block_size
        before: Ints = np.concatenate([[0], (~is_there).cumsum()])
        missing: Ints = before - before[num_passed]
        return missing


class CacheRoom(NamedTuple):
    """The kinds of a model's layers.

    Blocks of the first kind have names; blocks of the others are found through these.
    """

    kinds: tuple[CacheKind, ...]

    def num_pages(self, num_tokens: int, keeps_blocks: bool = False) -> int:
        """Return the most pages that a request of num_tokens tokens holds at once, if it shares no blocks with others.

        keeps_blocks: it has several choices. A choice that starts as another's fork may share only part of its last
        page, and takes new pages after that.
        """
        first, *others = self.kinds
        num_blocks = -(-num_tokens // first.block_size)
        count = -(-num_blocks // first.page_blocks)
        for other in others:
            count += (first.page_blocks > 1) + num_blocks if keeps_blocks else min(num_blocks, other.most_held)
        return count

    def num_usable(self, num_blocks: int, are_there: Sequence[Bools]) -> int:
        """Return the largest number of a prompt's first num_blocks blocks with which a request can start.

        are_there: for each further kind, whether its block for each of these is there, bool [n].
        """
        missing = np.zeros(num_blocks + 1, np.int64)
        for kind, is_there in zip(self.kinds[1:], are_there, strict=True):
            missing += kind.num_missing(is_there)
        return int(np.flatnonzero(missing == 0)[-1])

    def longest(self, num_pages: int) -> int:
        """Return the most tokens for which num_pages() is at most this."""
        size, most = self.kinds[0].block_size, num_pages * self.kinds[0].page_blocks
        fitting = bisect_right(range(most + 1), num_pages, key=lambda count: self.num_pages(count * size))
        return max(0, fitting - 1) * size


def room_of(config: ResolvedConfig) -> CacheRoom:
    """Return how much of the cache requests take."""
    return cache_room(config, config.kv_window, config.kv_page_blocks, config.max_num_batched_tokens)


def cache_room(config: EngineConfig, window: int, page_blocks: int, num_step_tokens: int) -> CacheRoom:
    """Return how much requests take of a cache with such pages. page_blocks 0: all layers use the same tables.

    num_step_tokens: the most tokens of a step.
    """
    if not page_blocks:
        return CacheRoom((CacheKind(config.block_size, 1, window),))
    assert window, f"pages of {page_blocks} blocks without a window"
    drafts = 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    most_held = ceil_div(window - 1 + num_step_tokens + drafts, config.block_size) + 1
    return CacheRoom((CacheKind(config.block_size, page_blocks), CacheKind(config.block_size, 1, window, most_held)))
