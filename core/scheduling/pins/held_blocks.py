"""HeldBlocks: the references that pins have on KV blocks."""

import numpy as np

from core.batch.batch import Batch
from ipc.tables.arrays import BlockIds, Ints


class HeldBlocks:
    """How many pins hold each page of the pool, and how many pages those of each tenant hold.

    Tenants have no pages in common. max_pages: the most of all tenants. max_of_tenant: the most of each.
    """

    def __init__(self, batch: Batch, max_pages: int, max_of_tenant: int) -> None:
        self.max_pages, self._max_of_tenant = max_pages, min(max_of_tenant, max_pages)
        self._batch, self._pool = batch, batch.pool
        self._references: Ints = np.zeros(self._pool.num_blocks, np.int64)  # by page
        self._of_tenant: dict[str, int] = {}

    def __len__(self) -> int:
        """Return the number of pages that pins hold."""
        return sum(self._of_tenant.values())

    def take(self, tenant: str, blocks: BlockIds) -> bool:
        """Hold these blocks [n], each once. Return False, and hold none, if they take more pages than pins may hold.

        This happens only if pages have several blocks, of which pins hold some.
        """
        pages = self._pool.pages_of(blocks)
        own, num_new = self._of_tenant.get(tenant, 0), int(np.count_nonzero(self._references[pages] == 0))
        if self._pool.page_blocks > 1 and (own + num_new > self._max_of_tenant or len(self) + num_new > self.max_pages):
            return False
        self._pool.hold(blocks)
        np.add.at(self._references, blocks // self._pool.page_blocks, 1)
        self._of_tenant[tenant] = own + num_new
        return True

    def give(self, tenant: str, blocks: BlockIds) -> None:
        """Give up these blocks [n], each once, the last ones first."""
        if not len(blocks):
            return
        in_flight = self._batch.in_flight
        np.subtract.at(self._references, blocks // self._pool.page_blocks, 1)
        num_gone = int(np.count_nonzero(self._references[self._pool.pages_of(blocks)] == 0))
        self._of_tenant[tenant] -= num_gone
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._pool.free(blocks[::-1], in_flight[-1][0] if in_flight else None)

    def num_references(self, blocks: BlockIds) -> Ints:
        """Return how many pins hold the page of each of these blocks [n]."""
        counts: Ints = self._references[blocks // self._pool.page_blocks]
        return counts

    def rename(self, tenants: dict[str, str]) -> None:
        """Rename the tenants. tenants: their new names."""
        self._of_tenant = {tenants[tenant]: count for tenant, count in self._of_tenant.items()}
