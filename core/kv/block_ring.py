"""BlockRing: free KV blocks whose content is still cached, the least recently freed first.

The observable order is that of a linked list with removal from the middle (vLLM's FreeKVCacheBlockQueue). It is
implemented as a ring whose entries become stale when a hit revives their blocks.
"""

import numpy as np

from ipc.tables.arrays import NO_INTS, BlockIds, Bools, Ints

_NOT_HERE = -1


class BlockRing:
    """The ring. All operations take arrays of block ids and return int64, NumPy's native index type."""

    def __init__(self, num_blocks: int) -> None:
        self._entries = np.zeros(2 * num_blocks, np.int64)  # the oldest is at head; some are stale
        self._head = 0  # absolute positions; entry p is at p % len(_entries)
        self._tail = 0
        self._position = np.full(num_blocks, _NOT_HERE, np.int64)  # block -> its live entry
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def holds(self, blocks: BlockIds) -> Bools:
        """Return which of these blocks are in the ring, bool [n]."""
        here: Bools = self._position[blocks] != _NOT_HERE
        return here

    def push(self, blocks: BlockIds) -> None:
        """Append these blocks as the most recent ones; the last one is the most recent."""
        if self._tail + len(blocks) - self._head > len(self._entries):
            self._compact()
        positions = np.arange(self._tail, self._tail + len(blocks))
        start = self._tail % len(self._entries)
        if start + len(blocks) <= len(self._entries):
            self._entries[start : start + len(blocks)] = blocks
        else:
            self._entries[positions % len(self._entries)] = blocks
        self._position[blocks] = positions
        self._tail += len(blocks)
        self._length += len(blocks)

    def discard(self, blocks: BlockIds) -> None:
        """Remove those of these blocks that are in the ring."""
        self._length -= int(np.count_nonzero(self.holds(blocks)))
        self._position[blocks] = _NOT_HERE

    def pop(self, count: int) -> Ints:
        """Remove the `count` oldest blocks and return them. The ring must hold at least that many."""
        oldest = self._oldest(count)
        self._position[oldest] = _NOT_HERE
        self._length -= count
        return oldest

    def first(self, count: int) -> Ints:
        """Return the `count` oldest blocks, or all, without removing them."""
        head = self._head
        blocks = self._oldest(min(count, self._length))
        self._head = head
        return blocks

    def clear(self) -> Ints:
        """Remove all blocks and return them, oldest first."""
        blocks = self._live()
        self._position[:] = _NOT_HERE
        self._head = self._tail = self._length = 0
        return blocks

    def _live(self) -> Ints:
        positions = np.arange(self._head, self._tail)
        blocks = self._entries.take(positions, mode="wrap")
        live: Ints = blocks[self._position[blocks] == positions]
        return live

    def _compact(self) -> None:
        live = self._live()
        self._entries[: len(live)] = live
        self._position[live] = np.arange(len(live))
        self._head, self._tail = 0, len(live)

    def _oldest(self, count: int) -> Ints:
        start = self._head % len(self._entries)
        first = self._entries[start : start + count]
        positions = np.arange(self._head, self._head + len(first))
        if np.count_nonzero(self._position[first] == positions) == count:
            self._head += count  # none of them has been revived
            return first.copy()
        found: list[Ints] = []
        missing = count
        while missing:
            positions = np.arange(self._head, min(self._tail, self._head + max(missing, 64)))
            assert len(positions), f"{missing} blocks missing from the ring, which should hold {self._length}"
            blocks = self._entries[positions % len(self._entries)]
            live = np.flatnonzero(self._position[blocks] == positions)[:missing]
            self._head += int(live[-1]) + 1 if len(live) == missing else len(positions)
            found.append(blocks[live])
            missing -= len(live)
        return np.concatenate(found)

    def check_integrity(self) -> Ints:
        """Return all blocks, oldest first. Raise AssertionError if the count is wrong."""
        num_here = int(np.count_nonzero(self._position != _NOT_HERE))
        live = self._live() if num_here else NO_INTS
        assert self._length == num_here == len(live), f"{self._length} cached, {num_here} in the ring"
        return live
