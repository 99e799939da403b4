"""PageNames: which KV block holds which content, and which blocks of layers with a window hold the same tokens.

Only blocks of the layers that see everything have names. A block of the layers with a window is found beside one of
these, and either may be evicted without the other.
"""

import numpy as np

from core.kv.block_names import BlockNames
from ipc.tables.arrays import BlockIds, Bools, Int32s, Ints, TokenIds

_NONE = 0  # in place of a block


class PageNames(BlockNames):
    """The names of blocks in pages of page_blocks each. A block of layers with a window is the first of its page."""

    def __init__(self, num_pages: int, block_size: int, page_blocks: int) -> None:
        super().__init__(num_pages * page_blocks, block_size)
        self.page_blocks = page_blocks
        #: Of each block that a row fills: the row's block of layers with a window, of the same tokens.
        self.filled_beside: Ints = np.zeros(num_pages * page_blocks, np.int64)
        self.beside: Ints = np.zeros(num_pages * page_blocks, np.int64)  # of each block with a name: what is found
        self.owner: Ints = np.zeros(num_pages, np.int64)  # of each page that is found: the block beside which it is
        self.orphans: list[Ints] = []  # pages that nobody finds any more, for the pool

    def is_found(self, pages: BlockIds) -> Bools:
        """Return which pages have content that can be found, bool [n]."""
        inside: Ints = self.content.reshape(-1, self.page_blocks)[pages]
        found: Bools = inside.any(1) | (self.owner[pages] != _NONE)
        return found

    def name_run(self, blocks: Int32s, parent: int, token_ids: TokenIds, hashes: list[int]) -> int:
        """Name consecutive blocks of one row, as BlockNames does, and let those beside them be found."""
        content = super().name_run(blocks, parent, token_ids, hashes)
        found, _ = self.find(parent, token_ids, hashes)
        self._let_find(blocks[: len(found)], found)
        return content

    def _enter(self, blocks: Int32s, contents: Ints, parents: Ints, token_ids: TokenIds) -> Ints | None:
        owners = super()._enter(blocks, contents, parents, token_ids)
        if owners is None:
            self._let_find(blocks, blocks)
        else:
            same = (self._parent[owners] == parents) & (self._tokens[owners] == token_ids).all(1)
            self._let_find(blocks[same], owners[same])
        return owners

    def _let_find(self, blocks: BlockIds, owners: BlockIds) -> None:
        """Let what is filled beside blocks [n] be found beside owners [n], which have the names of their content."""
        filled, self.filled_beside[blocks] = self.filled_beside[blocks], _NONE
        self.put_beside(owners, filled)

    def put_beside(self, owners: BlockIds, blocks: BlockIds) -> None:
        """Let blocks [n] of layers with a window be found beside owners [n], which have names; not where one is.

        0 among the blocks stands for none.
        """
        new = ((blocks != _NONE) & (self.beside[owners] == _NONE)).nonzero()[0]
        owners, first = np.unique(owners[new], return_index=True)
        blocks = blocks[new][first]
        self.beside[owners] = blocks
        self.owner[blocks // self.page_blocks] = owners

    def forget(self, blocks: BlockIds) -> None:
        """Remove the names of these blocks, all of which have one. What lies beside them is not found any more."""
        beside = self.beside[blocks]
        pages = beside[beside != _NONE] // self.page_blocks
        if len(pages):
            self.beside[blocks], self.owner[pages] = _NONE, _NONE
            self.orphans.append(pages)
        super().forget(blocks)

    def forget_pages(self, pages: BlockIds) -> None:
        """Let nothing in these pages be found any more."""
        owners = self.owner[pages]
        self.beside[owners[owners != _NONE]] = _NONE
        self.owner[pages] = _NONE
        inside = (pages[:, None] * self.page_blocks + np.arange(self.page_blocks)).reshape(-1)
        named = inside[self.content[inside] != 0]
        if len(named):
            self.forget(named)

    def forget_all(self) -> None:
        """Remove the names of all blocks."""
        super().forget_all()
        self.beside[:] = _NONE
        self.owner[:] = _NONE

    def check_integrity(self) -> None:
        """Raise AssertionError when a name or what lies beside it is wrong."""
        super().check_integrity()
        owners = np.flatnonzero(self.beside)
        assert (self.content[owners] != 0).all(), f"found beside blocks without a name: {owners}"
        pages = self.beside[owners] // self.page_blocks
        assert (self.owner[pages] == owners).all(), f"pages {pages} have owners {self.owner[pages]}, not {owners}"
        assert len(owners) == np.count_nonzero(self.owner), "a page is found beside a block that does not know it"
        assert not self.orphans, f"forgotten orphans: {self.orphans}"
