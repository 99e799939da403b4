"""PageRoom: how many pages of a KV cache a request takes, where layers with a window have blocks of their own."""

from typing import NamedTuple

import numpy as np

from ipc.options.config import EngineConfig
from ipc.tables.arrays import Bools, Ints
from ipc.tables.rounding import ceil_div


class BlockRoom(NamedTuple):
    """The blocks of a request whose layers have their blocks in common."""

    block_size: int

    def num_pages(self, num_tokens: int) -> int:
        """Return the most blocks that a request of so many tokens holds at once."""
        return ceil_div(num_tokens, self.block_size)

    def longest(self, num_pages: int) -> int:
        """Return the most tokens for which num_pages() is no more than this."""
        return num_pages * self.block_size


class PageRoom(NamedTuple):
    """The sizes of pages and windows (core/models/layers/cache_pages.py).

    A token takes a place in a block of the layers that see everything, of which a page has page_blocks, and in a block
    of the layers with a window, which is a page of its own.
    """

    block_size: int
    page_blocks: int
    window: int  # tokens that a token sees in layers with a window, its own included
    most_seen: int  # blocks that a row holds for these layers at most: those of its window and of a step's tokens

    def num_passed(self, num_tokens: int) -> int:
        """Return how many blocks of layers with a window no token from this place on reads."""
        return max(0, num_tokens - (self.window - 1)) // self.block_size

    def num_missing(self, is_there: Bools) -> Ints:
        """Return for 0 to n first blocks how many of their blocks of layers with a window are missing, int64 [n + 1].

        Those of the window before the next token are looked at. is_there [n]: whether each is.
        """
        counts = np.arange(len(is_there) + 1)
        num_passed = np.maximum(counts * self.block_size - (self.window - 1), 0) // self.block_size
        before: Ints = np.concatenate([[0], (~is_there).cumsum()])
        missing: Ints = before - before[num_passed]
        return missing

    def num_usable(self, is_there: Bools) -> int:
        """Return the largest number of first blocks of which num_missing() is 0."""
        return int(np.flatnonzero(self.num_missing(is_there) == 0)[-1])

    def num_pages(self, num_tokens: int, keeps_blocks: bool = False) -> int:
        """Return the most pages that a request of so many tokens holds at once, if it found no blocks of others.

        keeps_blocks: it has several choices. One that starts as another's fork shares pages up to within one, and then
        has pages of its own.
        """
        num_blocks = ceil_div(num_tokens, self.block_size)
        others = ceil_div(num_blocks, self.page_blocks)
        if keeps_blocks:
            return others + (self.page_blocks > 1) + num_blocks
        return others + min(num_blocks, self.most_seen)

    def pages(self, num_blocks: Ints) -> Ints:
        """Return the pages [n] of num_blocks [n] blocks of the layers that see everything."""
        return (num_blocks + (self.page_blocks - 1)) // self.page_blocks

    def longest(self, num_pages: int) -> int:
        """Return the most tokens for which num_pages() is no more than this."""
        short = num_pages * self.page_blocks // (self.page_blocks + 1)
        blocks = max(short, (num_pages - self.most_seen) * self.page_blocks)
        while blocks > 0 and self.num_pages(blocks * self.block_size) > num_pages:
            blocks -= 1
        return max(0, blocks) * self.block_size


def room_of(config: EngineConfig) -> BlockRoom | PageRoom:
    """Return what requests take of the cache of a resolved config."""
    if not config.kv_page_blocks:
        return BlockRoom(config.block_size)
    assert config.max_num_batched_tokens is not None, "the config is not resolved"
    return page_room(config, config.kv_window or 0, config.kv_page_blocks, config.max_num_batched_tokens)


def page_room(config: EngineConfig, window: int, page_blocks: int, num_step_tokens: int) -> PageRoom:
    """Return the room of pages. num_step_tokens: the most tokens of a step."""
    drafts = 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    most_seen = ceil_div(window - 1 + num_step_tokens + drafts, config.block_size) + 1
    return PageRoom(config.block_size, page_blocks, window, most_seen)
