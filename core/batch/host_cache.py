"""HostCache: copies on the host of blocks that the KV cache has evicted, found by the names they had.

A plan first copies from the cache to the host, and last from the host into the cache. So a block is copied to the host
in the plan that reuses it. Slots that a plan copies to or from are pinned until the plan is made. A block that is
copied back also stays here, and is not copied to the host again. Blocks of all kinds of layers share one LRU order of
slots.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from core.batch.block_table import OtherKind
from core.batch.carried import Carried
from core.batch.host_beside import UNKNOWN, HostBeside, OtherReach, Reach
from core.batch.kept_states import KeptStates
from core.batch.prefix_cache import PrefixCache
from core.batch.request import Request
from core.batch.table import OtherStart, RequestStart
from core.kv.beside import Beside
from core.kv.block_names import UNNAMED, BlockNames
from core.kv.block_pool import BlockPool
from core.kv.block_ring import BlockRing
from core.kv.cache_kinds import CacheRoom
from ipc.tables.arrays import NO_INT32S, Bools, Int32s, Ints


class CachedBlocks(Protocol):
    """What a host cache uses of a batch: the KV cache's blocks, and the plan that is being made."""

    block_size: int
    pool: BlockPool
    prefix_cache: PrefixCache
    room: CacheRoom
    others: tuple[OtherKind, ...]
    carried: Carried
    kept_states: KeptStates | None


class HostCache:
    """The slots of the host pool from `first` on. The slots before belong to preempted requests.

    num_slots: 0 = nothing is kept. Slots are numbered from 0 here, and from `first` on in plans.
    """

    def __init__(self, batch: CachedBlocks, num_slots: int, first: int) -> None:
        self.num_slots = num_slots
        self.num_hits = 0  # blocks copied back since the engine started
        self._batch = batch
        self.first = first
        self.times_given: Ints = np.zeros(num_slots, np.int64)  # how often each slot has been given to another block
        self.names = BlockNames(num_slots, batch.block_size)
        self.beside = tuple(HostBeside(num_slots, batch.pool.page_blocks) for _ in batch.others)
        self._blank = np.arange(num_slots - 1, -1, -1)  # a stack; its top is at the end
        self._num_blank = num_slots
        self._ring = BlockRing(num_slots)  # slots with a name that are not pinned
        self._pinned: list[Ints] = []
        self._written: list[Ints] = []  # pinned slots that the plan being made copies to
        #: Slots that are being read or written for a store beyond the host. They may have names, and are in no list.
        self.is_busy: Bools = np.zeros(num_slots, np.bool_)
        self.on_written: Callable[[Ints], None] | None = None  # called with the slots that a finished plan copies to
        if num_slots:
            batch.pool.tiers.append(self)

    @property
    def num_kept(self) -> int:
        """Return the number of slots with kept content."""
        return len(self.names) + sum(own.num_slots for own in self.beside)

    def _is_named(self, slots: Ints) -> Bools:
        """Return which of these slots have findable content, bool [n]."""
        named: Bools = self.names.content[slots] != UNNAMED
        for own in self.beside:
            named |= own.content[slots] != UNNAMED
        return named

    def _forget(self, slots: Ints) -> None:
        """Remove the names of evicted slots. If a block has several slots, the others become blank."""
        rest = slots
        for own in self.beside:
            contents = np.unique(own.content[slots])
            rest = rest[own.content[rest] == UNNAMED]
            lost = own.forget(contents[contents != UNNAMED])
            self._release(lost[~np.isin(lost, slots)])
        self.names.forget(rest)

    # --- what the KV cache evicts ---------------------------------------------------------------------------------

    def keep(self, pages: Ints) -> None:
        """Copy to the host what is in pages [n] that are being evicted, and what cannot be found without them.

        As much is copied as there is room for.
        """
        pool = self._batch.pool
        blocks = pool.inside(pages)
        if self.beside:
            blocks = blocks[pool.names.content[blocks] != UNNAMED]
        if len(blocks):
            self._keep_named(blocks)
        for own, beside in zip(self.beside, pool.names.beside, strict=True):
            found = beside.found[blocks]
            orphans = np.unique(found[found != 0] // pool.page_blocks)
            # A page that a row holds may be computed only in the step being planned.
            orphans = orphans[pool.ref_count[orphans] == 0]
            evicted = pages[beside.owner[pages] != 0]
            self._keep_beside(own, beside, np.concatenate([evicted, orphans[~np.isin(orphans, evicted)]]))

    def _keep_named(self, blocks: Ints) -> None:
        """Copy named blocks to the host, as many as there is room for."""
        names = self.names
        keys, parents, token_ids = self._batch.pool.names.described(blocks)
        slots = np.array([names.block_of_key.get(key, UNKNOWN) for key in keys.tolist()], np.int64)
        room = self._room_beside(slots[slots != UNKNOWN], int(np.count_nonzero(slots == UNKNOWN)))
        if not room:
            return
        new = np.flatnonzero(slots == UNKNOWN)[-room:]
        slots, contents = self._take(room), self._batch.pool.names.content[blocks[new]]
        names.adopt(slots, contents, keys[new], parents[new], token_ids[new])
        self._copy_out(blocks[new], slots)

    def _keep_beside(self, own: HostBeside, beside: Beside, pages: Ints) -> None:
        """Copy these pages of a further kind of layer to the host. If there is not enough room, copy the last ones."""
        contents = self._batch.pool.names.content[beside.owner[pages]]
        leads = own.leads_of(contents)
        new = np.flatnonzero(leads == UNKNOWN)
        room = self._room_beside(own.slots_of(leads[leads != UNKNOWN]), len(new), own.page_blocks)
        if not room:
            return
        new, slots = new[-room:], self._take(room * own.page_blocks)
        own.put(contents[new], slots)
        self._copy_out(self._batch.pool.inside(pages[new]), slots)

    def _room_beside(self, known: Ints, num_new: int, width: int = 1) -> int:
        """Return how many of the new blocks, with `width` slots each, fit next to these known slots."""
        kept = known[self._ring.holds(known)]
        self.touch(kept)  # these are evicted last
        return min((len(self._ring) - len(kept) + self._num_blank) // width, num_new)

    def _copy_out(self, blocks: Ints, slots: Ints) -> None:
        self._pinned.append(slots)  # a plan copies to a slot once
        self._written.append(slots)
        out = self._batch.carried.out
        out.sources.append(blocks.astype(np.int32))
        out.targets.append(self.in_plan(slots))

    def forget(self) -> None:
        """Forget all blocks, because the cache was emptied or the pool was lost."""
        self.names.forget_all()
        for own in self.beside:
            own.forget_all()
        self._push_blank(self._ring.clear())

    def forget_contents(self, contents: Ints) -> None:
        """Forget the blocks with these content numbers, and those of further kinds that belong to them."""
        contents = contents[contents != UNNAMED]
        slots = np.flatnonzero(np.isin(self.names.content, contents))
        self.names.forget(slots)
        self._release(slots)
        for own in self.beside:
            self._release(own.forget(contents))

    def _release(self, slots: Ints) -> None:
        """Make these slots, which have lost their names, blank: at once, or later if they are being read or written."""
        unread = slots[self._ring.holds(slots)]
        self._ring.discard(unread)
        self._push_blank(unread)

    # --- what requests start with ---------------------------------------------------------------------------------

    def find(self, request: Request, num_hits: int, content: int) -> tuple[Int32s | None, int]:
        """Return the slots of the blocks that follow a waiting request's hits, and the last one's content number.

        None: there are none. num_hits: number of blocks that the KV cache has; the last has this content number. An
        empty array: only blocks of further kinds of layers come from the host.
        """
        if self.beside:
            return self._find_usable(request, num_hits, content)
        slots, last = self._find_named(request, num_hits, content)
        if (kept := self._batch.kept_states) is not None:
            request.known_end = max(request.known_end, (num_hits + len(slots)) * self._batch.block_size)
            slots = slots[: kept.reachable(self.names.content[slots])]
            last = int(self.names.content[slots[-1]]) if len(slots) else content
        return (slots, last) if len(slots) else (None, content)

    def num_before_state(self, request: Request, contents: Ints) -> int | None:
        """Return with how many of the cache's blocks, by their contents, a request should start to reach a state here.

        The state is that after blocks of the host that follow. None: no state here is later than the cache's.

        Usually it starts with all of them. But if another request has computed blocks again that the host also has,
        because it had no state after them, they have other contents than the host's, and the host's follow fewer.
        """
        kept = self._batch.kept_states
        assert kept is not None, "the model has no recurrent layers"
        num_hits, size = len(contents), self._batch.block_size
        slots, _ = self._find_named(request, num_hits, int(contents[-1]) if num_hits else request.root)
        if kept.reachable(self.names.content[slots]):
            return num_hits
        slots, _ = self._find_named(request, 0, request.root)
        own = self.names.content[slots]
        request.known_end = max(request.known_end, len(own) * size)
        same = own[:num_hits] == contents[: len(own)]
        num_same = len(same) if same.all() else int(same.argmin())
        return num_same if kept.reachable(own) > max(num_same, kept.reachable(contents)) else None

    def _find_named(self, request: Request, num_hits: int, content: int) -> tuple[Int32s, int]:
        size = self._batch.block_size
        count = (len(request.token_ids) - 1) // size
        if count <= num_hits or not request.first_key or request.needs_whole_prompt:
            return NO_INT32S, content
        token_ids = request.token_ids[num_hits * size : count * size].reshape(-1, size)
        return self.names.find(content, token_ids, request.block_hashes[num_hits:count])

    def _find_usable(self, request: Request, num_hits: int, content: int) -> tuple[Int32s | None, int]:
        """Return the same as find(), if all window blocks are there too."""
        reach, num_found = self._reach_of(request, *self._batch.prefix_cache.find_all(request))
        count = self._batch.room.num_usable(len(reach.contents), [other.is_there for other in reach.others])
        if count < num_hits or num_hits < min(count, num_found):
            return None, content  # with the cache's blocks it could never end; see PrefixCache.fits()
        slots = reach.slots[: count - num_hits]
        windows, num_tokens = zip(self._batch.others, reach.others, strict=True), count * self._batch.block_size
        if not len(slots) and all(of.found[one.kind.num_passed(num_tokens) : count].all() for one, of in windows):
            return None, content
        return slots, int(reach.contents[count - 1])

    def num_usable(self, request: Request, hits: Int32s, content: int) -> int:
        """Return how many of a waiting request's first blocks it can start with. hits: all that the cache has."""
        reach, _ = self._reach_of(request, hits, content)
        return self._batch.room.num_usable(len(reach.contents), [other.is_there for other in reach.others])

    def _reach_of(self, request: Request, hits: Int32s, content: int) -> tuple[Reach, int]:
        slots, _ = self._find_named(request, len(hits), content)
        return self.reach(hits, slots), len(hits)

    def reach(self, hits: Int32s, slots: Int32s) -> Reach:
        """Return what is there for a prompt that finds these blocks in the cache, and after them these slots."""
        names, others = self._batch.pool.names, list[OtherReach]()
        contents = np.concatenate([names.content[hits], self.names.content[slots]])
        for own, beside in zip(self.beside, names.beside, strict=True):
            found = np.concatenate([beside.found[hits], np.zeros(len(slots), np.int64)])
            leads, missing = np.full(len(contents), UNKNOWN), found == 0
            leads[missing] = own.leads_of(contents[missing])
            others.append(OtherReach(found, leads))
        return Reach(slots, contents, others)

    def other_start(self, start: RequestStart, number: int, num_passed: int) -> OtherStart:
        """Return the blocks of a further kind for a request for which the host has something."""
        assert start.host_slots is not None, "the host has nothing for this start"
        other = self.reach(start.hits, start.host_slots).others[number]
        found, leads = other.found[num_passed:], other.leads[num_passed:]
        return OtherStart(num_passed, found.astype(np.int32), leads[found == 0])

    def pin(self, start: RequestStart) -> None:
        """Pin the slots that a request starts from until the plan is made, because the plan reads them."""
        assert start.host_slots is not None, "the host has nothing for this start"
        self._pin(start.host_slots)
        for own, other in zip(self.beside, start.others, strict=True):
            self._pin(own.slots_of(other.leads))

    def _pin(self, slots: Int32s | Ints) -> None:
        self._ring.discard(slots)
        self._pinned.append(slots.astype(np.int64))

    def copy_back(self, start: RequestStart) -> None:
        """Copy what the host has for a request into its blocks, which are found by their names."""
        assert start.host_slots is not None, "the host has nothing for this start"
        slots, blocks = start.host_slots, start.block_ids[start.num_hits : start.num_hits + start.num_loaded]
        keys, parents, token_ids = self.names.described(slots)
        self._batch.pool.names.adopt(blocks, self.names.content[slots], keys, parents, token_ids)
        self._copy_in(slots, blocks)
        for own, beside, other in zip(self.beside, self._batch.pool.names.beside, start.others, strict=True):
            self._copy_back_beside(own, beside, start, other)

    def _copy_back_beside(self, own: HostBeside, beside: Beside, start: RequestStart, other: OtherStart) -> None:
        if not len(other.leads):
            return
        pool, places = self._batch.pool, other.num_passed + np.flatnonzero(other.hits == 0)
        owners, blocks = start.block_ids[places].astype(np.int64), other.block_ids[places].astype(np.int64)
        self._copy_in(own.slots_of(other.leads), pool.inside(blocks // pool.page_blocks).astype(np.int32))
        right = pool.names.content[owners] == own.content[other.leads]  # otherwise another request's block has the name
        beside.put(owners[right], blocks[right])

    def _copy_in(self, slots: Int32s | Ints, blocks: Int32s) -> None:
        self.num_hits += len(slots)
        back = self._batch.carried.back
        back.sources.append(self.in_plan(slots))
        back.targets.append(blocks)

    def end_plan(self) -> None:
        """Release the slots that the finished plan reads and writes. They become the most recent ones."""
        if self._pinned:
            slots = self._all_pinned()
            named = self._is_named(slots)
            idle = ~self.is_busy[slots]
            self._ring.push(slots[named & idle])
            self._push_blank(slots[~named & idle])  # forgotten since
            self._pinned.clear()
        if self._written:
            slots = np.concatenate(self._written)
            self._written.clear()
            if self.on_written is not None:
                self.on_written(slots[self._is_named(slots)])

    # --- what is beyond the host -----------------------------------------------------------------------------------

    def in_plan(self, slots: Int32s | Ints) -> Int32s:
        """Return the numbers that plans use for these slots."""
        return (slots + self.first).astype(np.int32)

    def reserve(self, count: int) -> Ints:
        """Take up to `count` slots without names, to be written from outside until unlock()."""
        slots = self._take(min(count, len(self._ring) + self._num_blank))
        self.is_busy[slots] = True
        return slots

    def is_idle(self, slots: Ints) -> Bools:
        """Return which of these slots have content that is not being read or written, bool [n]."""
        return self._ring.holds(slots)

    def lock(self, slots: Ints) -> None:
        """Keep these slots from being reused until unlock(), because they are being read. They can still be found."""
        self._ring.discard(slots)
        self.is_busy[slots] = True

    def unlock(self, slots: Ints) -> None:
        """Make these slots available again. Those with a name become the most recent ones."""
        self.is_busy[slots] = False
        slots = slots[~np.isin(slots, self._all_pinned())]
        named = self._is_named(slots)
        self._ring.push(slots[named])
        self._push_blank(slots[~named])

    # --- slots ----------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> Ints:
        """Take slots: blank ones first, then the least recently used ones, which lose their names."""
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
        """Make those of these slots that can be evicted the last to be evicted."""
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
        """Check that no slot is lost or used twice, and no name is wrong. Errors: AssertionError with the numbers."""
        if not self.num_slots:
            assert not len(self.names), "blocks are found on the host, but it has no slots"
            assert not len(self._ring), "a ring of no slots has blocks"
            return  # the rest checks slots
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
        for own in self.beside:
            own.check_integrity(self.names.content)
