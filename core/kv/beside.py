"""Beside: which KV blocks of another kind of layer hold the same tokens as which named blocks.

Blocks of the first kind of layer have names (core/kv/block_names.py). A block of another kind is found through one of
these, and either can be evicted without the other. It is a page of the pool, and its number is that of the page's first
block (core/models/layers/cache_pages.py).
"""

import numpy as np

from ipc.tables.arrays import NO_INTS, BlockIds, Ints

_NONE = 0  # used instead of a block


class Beside:
    """The blocks of one kind of layer that belong to named blocks.

    filled [num_blocks]: for each block that a row fills, the row's block of this kind with the same tokens. found
    [num_blocks]: for each named block, the block of this kind that requests find; 0 = none. owner [num_pages]: for each
    page that is found, the named block it belongs to. orphans: pages that can no longer be found, for the pool.
    """

    def __init__(self, num_pages: int, page_blocks: int) -> None:
        self.page_blocks = page_blocks
        self.filled: Ints = np.zeros(num_pages * page_blocks, np.int64)
        self.found: Ints = np.zeros(num_pages * page_blocks, np.int64)
        self.owner: Ints = np.zeros(num_pages, np.int64)
        self.orphans: list[Ints] = []

    def let_find(self, blocks: BlockIds, owners: BlockIds) -> None:
        """Make what is filled next to blocks [n] findable through owners [n], which have the names of their content."""
        filled, self.filled[blocks] = self.filled[blocks], _NONE
        self.put(owners, filled)

    def put(self, owners: BlockIds, blocks: BlockIds) -> None:
        """Make blocks [n] findable through owners [n], which have names, except for owners that already have one.

        0 among the blocks means none.
        """
        new = ((blocks != _NONE) & (self.found[owners] == _NONE)).nonzero()[0]
        owners, first = np.unique(owners[new], return_index=True)
        blocks = blocks[new][first]
        self.found[owners] = blocks
        self.owner[blocks // self.page_blocks] = owners

    def forget(self, owners: BlockIds) -> None:
        """Make nothing findable through these named blocks any more."""
        found = self.found[owners]
        pages = found[found != _NONE] // self.page_blocks
        if len(pages):
            self.found[owners], self.owner[pages] = _NONE, _NONE
            self.orphans.append(pages)

    def forget_pages(self, pages: BlockIds) -> None:
        """Make these pages unfindable."""
        owners = self.owner[pages]
        self.found[owners[owners != _NONE]] = _NONE
        self.owner[pages] = _NONE

    def forget_all(self) -> None:
        """Make all pages unfindable."""
        self.found[:] = _NONE
        self.owner[:] = _NONE

    def take_orphans(self) -> Ints:
        """Return the pages that have become unfindable since the last call."""
        if not self.orphans:
            return NO_INTS
        pages = np.concatenate(self.orphans)
        self.orphans.clear()
        return pages

    def check_integrity(self, contents: Ints) -> None:
        """Raise AssertionError if something belongs to a block without a name. contents: of all blocks."""
        owners = np.flatnonzero(self.found)
        assert (contents[owners] != 0).all(), f"found through blocks without a name: {owners}"
        pages = self.found[owners] // self.page_blocks
        assert (self.owner[pages] == owners).all(), f"pages {pages} have owners {self.owner[pages]}, not {owners}"
        assert len(owners) == np.count_nonzero(self.owner), "a page's owner does not refer to it"
        assert not self.orphans, f"forgotten orphans: {self.orphans}"
