"""BlocksAhead: allocates memory for KV blocks before a step needs them.

The system assigns a cache's memory when it is written. It clears each new page first, while the step waits: for a
prompt of 2,000 tokens, clearing 60 MiB took a tenth of its time. So pages are allocated while there is nothing else to
do. They are for blocks up to a bounded number beyond the highest one in use, because the pool allocates new blocks in
ascending order.
"""

from kernels.arrays import Int32s
from kernels.memory.huge_pages import take_pages
from kernels.memory.kv_cache import KVCache

_AHEAD_BYTES = 256 << 20  # for all layers together
AHEAD_TOKENS = 16_384
_PIECE_BYTES = 2 << 20  # for one layer, at a time; takes a few milliseconds


class BlocksAhead:
    """The pages allocated ahead for a cache in host memory."""

    def __init__(self, cache: KVCache) -> None:
        self._layers = cache.memory
        self._num_blocks = cache.num_blocks
        self._block_bytes = self._layers[0].nbytes // cache.num_blocks  # per layer
        all_layers = self._block_bytes * len(self._layers)
        self._ahead = min(_AHEAD_BYTES // all_layers, AHEAD_TOKENS // cache.block_size)
        self._piece = max(1, _PIECE_BYTES // self._block_bytes)
        self._highest = 0  # highest block that has been in use
        self._num_taken = 0  # number of blocks that have memory in every layer
        self._end = 0  # number of blocks that have memory in the layers before _layer
        self._layer = 0

    def use(self, block_ids: Int32s) -> None:
        """Record that these blocks are in use now."""
        if len(block_ids):
            self._highest = max(self._highest, int(block_ids.max()))

    def take(self) -> bool:
        """Allocate some memory. Return False if no more is needed for now."""
        if self._layer == 0:  # all layers get the same number of blocks
            wanted = min(self._num_blocks, self._highest + self._ahead)
            self._end = min(wanted, self._num_taken + self._piece)
        begin, end = self._num_taken, self._end
        if begin >= end:
            return False
        if not take_pages(self._layers[self._layer], begin * self._block_bytes, end * self._block_bytes):
            # the system cannot allocate pages ahead: it does so when they are written
            self._num_blocks = self._layer = 0
            return False
        self._layer += 1
        if self._layer == len(self._layers):
            self._layer, self._num_taken = 0, end
        return True
