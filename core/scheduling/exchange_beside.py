"""What a store beyond the host has next to named blocks: blocks of layers with a window, or recurrent states.

A prefix can be used if all of its named blocks are there, and next to them what covers the tokens before the next one:
the blocks of the window, or the state after the last block. Such a state is like a block of a window of one block.
"""

from typing import Protocol

import numpy as np

from core.batch.batch import Batch
from core.batch.host_beside import UNKNOWN, HostBeside, Reach
from core.batch.kept_states import KeptStates
from core.kv.beside import Beside
from core.kv.block_names import UNNAMED
from core.kv.cache_kinds import CacheKind
from core.scheduling.store_queue import StoreQueue
from ipc.tables.arrays import NO_INTS, Bools, Int32s, Ints


class ExchangedBeside(Protocol):
    """What is exchanged next to named blocks. width: slots of the host that one takes."""

    kind: CacheKind
    width: int

    def is_there(self, reach: Reach) -> Bools:
        """Return next to which of the blocks it is in the cache or on the host, bool [n]."""

    def on_host(self, reach: Reach, first: int, end: int) -> Ints:
        """Return the slots of the host that have it, next to blocks from `first` to before `end`."""

    def reserve(self, count: int) -> Ints | None:
        """Take slots elsewhere for this many of them; None: there are too few. Empty: they take slots of the host."""

    def put(self, contents: Ints, slots: Ints) -> None:
        """Let requests find what was read into these slots [n, slots of one]. None of it was there."""

    def release(self, slots: Ints) -> None:
        """Free those of reserved slots that nothing was put into."""

    def left(self, contents: Ints, blocks: Int32s, evictions: Ints) -> tuple[Int32s, Ints]:
        """Return what a request leaves next to its blocks, and its eviction counts; see Leave.

        contents: of the blocks; UNNAMED: not to be stored. evictions: of the cache's blocks.
        """


class WindowsBeside:
    """Blocks of layers with a window, in slots of the host."""

    def __init__(self, batch: Batch, stores: StoreQueue) -> None:
        self.kind = batch.others[0].kind
        self._stores = stores
        self._on_host: HostBeside = batch.host_cache.beside[0]
        self._in_cache: Beside = batch.pool.names.beside[0]
        self.width = self._on_host.page_blocks

    def is_there(self, reach: Reach) -> Bools:
        """Return next to which blocks it is; see ExchangedBeside."""
        return reach.others[0].is_there

    def on_host(self, reach: Reach, first: int, end: int) -> Ints:
        """Return the slots of the host that have it."""
        leads = reach.others[0].leads[first:end]
        return self._on_host.slots_of(leads[leads != UNKNOWN])

    def reserve(self, count: int) -> Ints | None:
        """Return no slots: those of the host are reserved with the named blocks'."""
        return NO_INTS

    def put(self, contents: Ints, slots: Ints) -> None:
        """Let requests find what was read."""
        self._on_host.put(contents, slots.reshape(-1))

    def release(self, slots: Ints) -> None:
        """Do nothing: the host frees them."""

    def left(self, contents: Ints, blocks: Int32s, evictions: Ints) -> tuple[Int32s, Ints]:
        """Return what is next to the blocks in the cache, and store what only the host has."""
        found = self._in_cache.found[blocks].astype(np.int32)
        found[contents == UNNAMED] = 0
        self._stores.add_known(contents[(found == 0) & (contents != UNNAMED)])
        return found, evictions[found]


class StatesBeside:
    """Recurrent states, in the slots of kept ones."""

    width = 0

    def __init__(self, batch: Batch, kept: KeptStates) -> None:
        self.kind = CacheKind(batch.block_size, 1, batch.block_size + 1)
        self._batch, self._kept = batch, kept

    def is_there(self, reach: Reach) -> Bools:
        """Return after which blocks a state is kept."""
        return self._kept.has(reach.contents)

    def on_host(self, reach: Reach, first: int, end: int) -> Ints:
        """Return no slots: states are in slots of their own."""
        return NO_INTS

    def reserve(self, count: int) -> Ints | None:
        """Take slots of kept states."""
        return self._kept.reserve(count)

    def put(self, contents: Ints, slots: Ints) -> None:
        """Let requests start from the states that were read."""
        self._kept.put(contents, slots[:, 0])

    def release(self, slots: Ints) -> None:
        """Free the slots that got no state."""
        self._kept.release(slots)

    def left(self, contents: Ints, blocks: Int32s, evictions: Ints) -> tuple[Int32s, Ints]:
        """Return the slots of the states to store, without those that a step in flight may still write."""
        slots = self._kept.to_store(contents)
        if in_flight := self._batch.in_flight:
            slots[self._kept.saved_in[slots] >= in_flight[0][0]] = 0
        return slots, self._kept.times_given[slots]
