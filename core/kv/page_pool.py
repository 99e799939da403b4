"""PagePool: a BlockPool of pages, each of which is held, free, cached or fenced as a whole.

The methods take and return the numbers that block tables have; only allocate() returns pages. A page belongs to
page_blocks blocks of the layers that see everything, and counts a reference for each time that a table has one of them;
or to one block of the layers with a window, which has the number of the page's first block. See
core/models/layers/cache_pages.py.
"""

from collections.abc import Sequence

import numpy as np

from core.kv.block_pool import BlockPool
from core.kv.page_names import PageNames
from ipc.tables.arrays import BlockIds, Bools, Ints


class PagePool(BlockPool):
    """The pool of pages 1..num_pages-1. Page 0 is never allocated: its blocks are null blocks."""

    names: PageNames

    def __init__(self, num_pages: int, block_size: int, page_blocks: int, num_rings: int = 1) -> None:
        super().__init__(num_pages, block_size, num_rings, PageNames(num_pages, block_size, page_blocks))
        self.page_blocks = page_blocks

    def blocks_in(self, pages: BlockIds) -> Ints:
        """Return the blocks of allocated pages, all of which a row takes for layers that see everything."""
        self.ref_count[pages] = self.page_blocks
        blocks: Ints = (pages[:, None].astype(np.int64) * self.page_blocks + np.arange(self.page_blocks)).reshape(-1)
        self.names.filled_beside[blocks] = 0
        return blocks

    def num_revived(self, blocks: BlockIds) -> int:
        """Return how many pages with these found blocks are free now and would leave the free lists when held."""
        return self._num_in_rings(np.unique(blocks // self.page_blocks))

    def hold(self, blocks: BlockIds) -> None:
        """Add one reference for each of these found blocks. Call this before any allocation, which might evict them."""
        pages = blocks.astype(np.int64) // self.page_blocks
        self._revive(np.unique(pages))
        np.add.at(self.ref_count, pages, 1)

    def free(self, blocks: BlockIds, fence: int | None) -> None:
        """Drop one reference for each of these blocks, in this order, as BlockPool does."""
        super().free(blocks.astype(np.int64) // self.page_blocks, fence)

    def set_urgency(self, blocks: BlockIds, urgency: Ints) -> None:
        """Set the ring in which the pages of these blocks belong, before free()."""
        super().set_urgency(blocks // self.page_blocks, urgency)

    def forget_names(self, blocks: BlockIds) -> None:
        """Remove the names of these held blocks of layers that see everything, so that they are not found any more."""
        super().forget_names(blocks)
        self._free_orphans()

    def _is_named(self, blocks: BlockIds) -> Bools:
        return self.names.is_found(blocks)

    def _forget(self, blocks: BlockIds) -> None:
        self.names.forget_pages(blocks)
        self._free_orphans()

    def _free_orphans(self) -> None:
        """Pages in the rings that nobody finds any more are blank."""
        if not self.names.orphans:
            return
        pages = np.concatenate(self.names.orphans)
        self.names.orphans.clear()
        for ring in self._rings:
            here = pages[ring.holds(pages)]
            ring.discard(here)
            self._push_blank(here)

    def check_integrity(self, tables: Sequence[BlockIds]) -> None:
        """Recount all states from scratch against the block tables of all rows. AssertionError with the numbers."""
        super().check_integrity([table // self.page_blocks for table in tables])
