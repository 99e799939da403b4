"""HostCache: copies on the host of blocks that the KV cache has evicted, found by the names that these had.

A plan copies from the cache to the host first, and from the host into the cache last. So a block is copied out in the
plan that gives it away. Slots that a plan copies to or from are pinned until it is made. What is copied back stays
here, too, and is not copied out again.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from core.batch.request import Request
from core.batch.table import RequestStart
from core.kv.block_names import UNNAMED, BlockNames
from core.kv.block_ring import BlockRing
from ipc.tables.arrays import BlockIds, Bools, Int32s, Ints

if TYPE_CHECKING:
    from core.batch.batch import Batch


class HostCache:
    """The slots from `first` on of the host pool, whose slots before are those of preempted requests.

    num_slots: 0 = nothing is kept. Slots are numbered from 0 here, and from `first` on in plans.
    """

    def __init__(self, batch: "Batch", num_slots: int, first: int) -> None:
        self.num_slots = num_slots
        self.num_hits = 0  # blocks copied back, since the engine started
        self._batch = batch
        self.first = first
        self.times_given: Ints = np.zeros(num_slots, np.int64)  # how often each slot has been taken for another block
        self.names = BlockNames(num_slots, batch.block_size)
        self._blank = np.arange(num_slots - 1, -1, -1)  # a stack: the top is the end
        self._num_blank = num_slots
        self._ring = BlockRing(num_slots)  # of slots with a name that are not pinned
        self._pinned: list[Ints] = []
        self._written: list[Ints] = []  # of the pinned ones: those that the plan being made copies to
        #: Slots that something beyond the host reads or writes: they have a name or not, and are in no list.
        self.is_busy: Bools = np.zeros(num_slots, np.bool_)
        self.on_written: Callable[[Ints], None] | None = None  # called with the slots that a finished plan copies to
        if num_slots:
            batch.pool.tiers.append(self)

    @property
    def num_kept(self) -> int:
        """Return the number of blocks that are kept."""
        return len(self.names)

    def _is_named(self, slots: Ints) -> Bools:
        """Return which of these slots have content that can be found, bool [n]."""
        named: Bools = self.names.content[slots] != UNNAMED
        return named

    def _forget(self, slots: Ints) -> None:
        """Remove the names of slots that have one, and are in no list."""
        self.names.forget(slots)

    # --- what the KV cache evicts ---------------------------------------------------------------------------------

    def keep(self, blocks: BlockIds) -> None:
        """Copy blocks [n] to the host that are being evicted and still have their names, as far as there is room."""
        names = self.names
        keys, parents, token_ids = self._batch.pool.names.described(blocks)
        slots = np.array([names.block_of_key.get(key, UNKNOWN) for key in keys.tolist()], np.int64)
        known = slots[slots != UNKNOWN]
        kept = known[self._ring.holds(known)]
        self.touch(kept)  # these are the last that make room
        room = min(len(self._ring) - len(kept) + self._num_blank, int(np.count_nonzero(slots == UNKNOWN)))
        if not room:
            return
        new = np.flatnonzero(slots == UNKNOWN)[-room:]
        slots, contents = self._take(room), self._batch.pool.names.content[blocks[new]]
        names.adopt(slots, contents, keys[new], parents[new], token_ids[new])
        self._pinned.append(slots)  # a plan copies to a slot once
        self._written.append(slots)
        out = self._batch.carried.out
        out.sources.append(blocks[new].astype(np.int32))
        out.targets.append((slots + self.first).astype(np.int32))

    def forget(self) -> None:
        """Forget all blocks: the cache is emptied, or the pool is lost."""
        self.names.forget_all()
        self._push_blank(self._ring.clear())

    def forget_contents(self, contents: Ints) -> None:
        """Forget the blocks with these content numbers."""
        slots = np.flatnonzero(np.isin(self.names.content, contents[contents != UNNAMED]))
        self.names.forget(slots)
        self._release(slots)

    def _release(self, slots: Ints) -> None:
        """Let these slots, which have lost their names, be blank; those that something reads or writes, later."""
        unread = slots[self._ring.holds(slots)]
        self._ring.discard(unread)
        self._push_blank(unread)

    # --- what requests start with ---------------------------------------------------------------------------------

    def find(self, request: Request, num_hits: int, content: int) -> tuple[Int32s | None, int]:
        """Return the slots of the blocks that follow a waiting request's hits, and the content number of the last one.

        None: there are none. num_hits: blocks that the KV cache has, the last of which has this content number.
        """
        size = self._batch.block_size
        count = (len(request.token_ids) - 1) // size
        if count <= num_hits or not request.first_key or request.needs_whole_prompt:
            return None, content
        token_ids = request.token_ids[num_hits * size : count * size].reshape(-1, size)
        slots, content = self.names.find(content, token_ids, request.block_hashes[num_hits:count])
        return (slots, content) if len(slots) else (None, content)

    def pin(self, start: RequestStart) -> None:
        """Let no other block take the slots from which a request starts until the plan is made: it reads them."""
        assert start.host_slots is not None, "the host has nothing for this start"
        self._pin(start.host_slots)

    def copy_back(self, start: RequestStart) -> None:
        """Copy what the host has for a request into its blocks, which get their names."""
        assert start.host_slots is not None, "the host has nothing for this start"
        self._copy_back(start.host_slots, start.block_ids[start.num_hits : start.num_hits + start.num_loaded])

    def _pin(self, slots: Int32s | Ints) -> None:
        self._ring.discard(slots)
        self._pinned.append(slots.astype(np.int64))

    def _copy_back(self, slots: Int32s, blocks: Int32s) -> None:
        names = self.names
        keys, parents, token_ids = names.described(slots)
        self._batch.pool.names.adopt(blocks, names.content[slots], keys, parents, token_ids)
        self.num_hits += len(slots)
        back = self._batch.carried.back
        back.sources.append(slots + np.int32(self.first))
        back.targets.append(blocks)

    def end_plan(self) -> None:
        """Release the slots that the finished plan reads and writes: they are the most recent ones."""
        if self._pinned:
            slots = self._all_pinned()
            named = self._is_named(slots)
            idle = ~self.is_busy[slots]
            self._ring.push(slots[named & idle])
            self._push_blank(slots[~named & idle])  # forgotten meanwhile
            self._pinned.clear()
        if self._written:
            slots = np.concatenate(self._written)
            self._written.clear()
            if self.on_written is not None:
                self.on_written(slots[self._is_named(slots)])

    # --- what is beyond the host -----------------------------------------------------------------------------------

    def in_plan(self, slots: Ints) -> Int32s:
        """Return the numbers that plans have for these slots."""
        return (slots + self.first).astype(np.int32)

    def reserve(self, count: int) -> Ints:
        """Take up to `count` slots, without a name, for something that writes them until unlock()."""
        slots = self._take(min(count, len(self._ring) + self._num_blank))
        self.is_busy[slots] = True
        return slots

    def is_idle(self, slots: Ints) -> Bools:
        """Return which of these slots have content that nothing reads or writes, bool [n]."""
        return self._ring.holds(slots)

    def lock(self, slots: Ints) -> None:
        """Let no other block take these slots until unlock(): something reads them. They are found meanwhile."""
        self._ring.discard(slots)
        self.is_busy[slots] = True

    def unlock(self, slots: Ints) -> None:
        """Let these slots be used again; those with a name are the most recent ones."""
        self.is_busy[slots] = False
        slots = slots[~np.isin(slots, self._all_pinned())]
        named = self._is_named(slots)
        self._ring.push(slots[named])
        self._push_blank(slots[~named])

    # --- slots ----------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> Ints:
        """Take slots, blank ones first, then those that were used least recently, which lose their names."""
        from_blank = min(count, self._num_blank)
        slots = self._blank[self._num_blank - from_blank : self._num_blank][::-1].copy()
        self._num_blank -= from_blank
        if from_blank < count:
            evicted = self._ring.pop(count - from_blank)
            self._forget(evicted)
            slots = np.concatenate([slots, evicted])
        self.times_given[slots] += 1
        return slots

    def touch(self, slots: Ints) -> None:
        """Let those of these slots that could make room be the last to do so."""
        slots = slots[self._ring.holds(slots)]
        self._ring.discard(slots)
        self._ring.push(slots)

    def _all_pinned(self) -> Ints:
        """Return each pinned slot once, in the order in which they were pinned."""
        slots = np.concatenate([np.zeros(0, np.int64), *self._pinned])
        _, first = np.unique(slots, return_index=True)
        return slots[np.sort(first)]

    def _push_blank(self, slots: Ints) -> None:
        self._blank[self._num_blank : self._num_blank + len(slots)] = slots
        self._num_blank += len(slots)

    def check_integrity(self) -> None:
        """Raise AssertionError with the numbers when slots are lost or doubled, or a name is wrong."""
        if not self.num_slots:
            assert not len(self.names), "blocks are found on the host, which has no slot"
            assert not len(self._ring), "a ring of no slots has blocks"
            return  # what follows is of slots
        self.names.check_integrity()
        self._ring.check_integrity()
        slots = np.arange(self.num_slots)
        states = np.zeros((self.num_slots, 3), np.bool_)
        states[self._blank[: self._num_blank], 0] = True
        states[:, 1] = self._ring.holds(slots)
        states[self._all_pinned(), 2] = True
        states[self.is_busy, 2] = True
        odd = np.flatnonzero(states.sum(1) != 1)
        assert not len(odd), f"slots {odd[:8]} are (blank, kept, pinned or busy) = {states[odd[:8]].tolist()}"
        assert self._num_blank == states[:, 0].sum(), "a slot is blank twice"
        named = self._is_named(slots)
        assert named[states[:, 1]].all(), "a kept slot has no name"
        assert not named[states[:, 0]].any(), "a blank slot has a name"


#: In place of a slot: the block is not kept.
UNKNOWN = -1
