"""WindowHost: a HostCache that keeps blocks of layers with a window, too, where these layers have blocks of their own.

A block of layers that see everything takes one slot, found by its name as in any HostCache. A block of layers with a
window is a page of the cache (core/models/layers/cache_pages.py) and takes as many slots as a page has blocks. It is
found by the content number of the block beside which it was. Either may go without the other: where a slot of it is
given away, all of it is.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from core.batch.host_cache import UNKNOWN, HostCache
from core.batch.request import Request
from core.batch.table import RequestStart, WindowStart
from core.kv.block_names import UNNAMED
from ipc.tables.arrays import BlockIds, Bools, Int32s, Ints

if TYPE_CHECKING:
    from core.batch.window_batch import WindowBatch


class Reach(NamedTuple):
    """What the KV cache and the host have of a prompt's first n blocks: all of those of layers that see everything."""

    slots: Int32s  # on the host, of the blocks after those in the cache
    contents: Ints  # [n]
    beside: Ints  # [n] the block of layers with a window in the cache; NULL_BLOCK: it is not there
    leads: Ints  # [n] the first slot of that block on the host; UNKNOWN: it is not there, or not looked for

    @property
    def has_window(self) -> Bools:
        """Return which blocks of layers with a window are in the cache or on the host, bool [n]."""
        has: Bools = (self.beside != 0) | (self.leads != UNKNOWN)
        return has


class WindowHost(HostCache):
    """The slots of both kinds of blocks, in one order of use."""

    _batch: "WindowBatch"

    def __init__(self, batch: "WindowBatch", num_slots: int, first: int, page_blocks: int) -> None:
        super().__init__(batch, num_slots, first)
        self.page_blocks = page_blocks
        self.window_of: Ints = np.zeros(
            num_slots, np.int64
        )  # content of the block of windows of which a slot has a part
        self._lead_of: dict[int, int] = {}  # by content: the first slot of its block of windows
        self._slots_of: Ints = np.zeros((num_slots, page_blocks), np.int64)  # by this slot: all of them

    @property
    def num_kept(self) -> int:
        """Return the number of slots with something that is kept."""
        return super().num_kept + self.page_blocks * len(self._lead_of)

    # --- what the KV cache evicts ---------------------------------------------------------------------------------

    def keep(self, blocks: BlockIds) -> None:
        """Copy to the host what is in pages [n] that are being evicted, and what nobody would find without them."""
        names, inside = self._batch.pool.names, self.inside(blocks)
        named = inside[names.content[inside] != UNNAMED]
        if len(named):
            super().keep(named)
        beside = names.beside[named]
        orphans = np.unique(beside[beside != 0] // self.page_blocks)
        # A page that a row holds may be one that is computed only by the step being planned.
        orphans = orphans[self._batch.pool.ref_count[orphans] == 0]
        found = blocks[names.owner[blocks] != 0]
        self._keep_windows(np.concatenate([found, orphans[~np.isin(orphans, found)]]))

    def _keep_windows(self, pages: Ints) -> None:
        """Copy these pages of layers with a window to the host, as far as there is room: the last ones."""
        names = self._batch.pool.names
        contents = names.content[names.owner[pages]]
        leads = self.leads_of(contents)
        known = self._slots_of[leads[leads != UNKNOWN]].reshape(-1)
        known = known[self._ring.holds(known)]
        self.touch(known)
        new = np.flatnonzero(leads == UNKNOWN)
        room = min((len(self._ring) - len(known) + self._num_blank) // self.page_blocks, len(new))
        if not room:
            return
        pages, contents = pages[new[-room:]], contents[new[-room:]]
        slots = self._take(room * self.page_blocks)
        self.put_windows(contents, slots)
        self._pinned.append(slots)
        self._written.append(slots)
        out = self._batch.carried.out
        out.sources.append(self.inside(pages).astype(np.int32))
        out.targets.append(self.in_plan(slots))

    def put_windows(self, contents: Ints, slots: Ints) -> None:
        """Let the blocks of windows beside these contents [n], none of which is here, be found in taken slots."""
        whole = slots.reshape(-1, self.page_blocks)
        self._slots_of[whole[:, 0]] = whole
        self.window_of[slots] = contents.repeat(self.page_blocks)
        self._lead_of.update(zip(contents.tolist(), whole[:, 0].tolist(), strict=True))

    def forget(self) -> None:
        """Forget all blocks: the cache is emptied, or the pool is lost."""
        self._lead_of.clear()
        self.window_of[:] = UNNAMED
        super().forget()

    def forget_contents(self, contents: Ints) -> None:
        """Forget the blocks with these content numbers, and those beside them."""
        super().forget_contents(contents)
        leads = self.leads_of(contents)
        self._release(self._forget_windows(leads[leads != UNKNOWN]))

    def _is_named(self, slots: Ints) -> Bools:
        named: Bools = super()._is_named(slots) | (self.window_of[slots] != UNNAMED)
        return named

    def _forget(self, slots: Ints) -> None:
        """Remove the names of evicted slots. The others of a block of windows become blank."""
        contents = np.unique(self.window_of[slots])
        super()._forget(slots[self.window_of[slots] == UNNAMED])
        rest = self._forget_windows(self.leads_of(contents[contents != UNNAMED]))
        self._release(rest[~np.isin(rest, slots)])

    def _forget_windows(self, leads: Ints) -> Ints:
        """Let the blocks of windows with these first slots not be found any more; return all of their slots."""
        for content in self.window_of[leads].tolist():
            del self._lead_of[content]
        slots: Ints = self._slots_of[leads].reshape(-1)
        self.window_of[slots] = UNNAMED
        return slots

    # --- what requests start with ---------------------------------------------------------------------------------

    def leads_of(self, contents: Ints) -> Ints:
        """Return the first slot of the block of windows beside each content, UNKNOWN where it is not here."""
        return np.array([self._lead_of.get(content, UNKNOWN) for content in contents.tolist()], np.int64)

    def slots_of(self, leads: Ints) -> Ints:
        """Return the slots of blocks of windows, of one after the other."""
        slots: Ints = self._slots_of[leads].reshape(-1)
        return slots

    def inside(self, pages: BlockIds) -> Ints:
        """Return the blocks of these pages."""
        blocks: Ints = (pages[:, None].astype(np.int64) * self.page_blocks + np.arange(self.page_blocks)).reshape(-1)
        return blocks

    def reach(self, hits: Int32s, slots: Int32s) -> Reach:
        """Return what is there of a prompt that finds these blocks in the cache, and then these slots."""
        names = self._batch.pool.names
        contents = np.concatenate([names.content[hits], self.names.content[slots]])
        beside = np.concatenate([names.beside[hits], np.zeros(len(slots), np.int64)])
        leads, missing = np.full(len(contents), UNKNOWN), beside == 0
        leads[missing] = self.leads_of(contents[missing])
        return Reach(slots, contents, beside, leads)

    def num_usable(self, request: Request, hits: Int32s, content: int) -> int:
        """Return how many of a waiting request's first blocks it can start with. hits: all that the cache has."""
        return self._batch.room.num_usable(self._reach(request, hits, content).has_window)

    def find(self, request: Request, num_hits: int, content: int) -> tuple[Int32s | None, int]:
        """Return the slots of the blocks that follow the hits which a waiting request can use; see HostCache.

        No slots, and not None: only blocks of windows come from the host.
        """
        hits, last = self._batch.prefix_cache.find_all(request)
        reach = self._reach(request, hits, last)
        count = self._batch.room.num_usable(reach.has_window)
        if count < num_hits or num_hits < min(count, len(hits)):
            return None, content  # it could not end with the blocks of the cache; see WindowCache.fits()
        slots, first = reach.slots[: count - num_hits], self._batch.room.num_passed(count * self._batch.block_size)
        if not len(slots) and reach.beside[first:count].all():
            return None, content
        return slots, int(reach.contents[count - 1])

    def _reach(self, request: Request, hits: Int32s, content: int) -> Reach:
        slots, _ = super().find(request, len(hits), content)
        return self.reach(hits, np.zeros(0, np.int32) if slots is None else slots)

    def window_start(self, start: RequestStart, num_passed: int) -> WindowStart:
        """Return the blocks of windows of a request of which the host has a part."""
        assert start.host_slots is not None, "the host has nothing for this start"
        reach = self.reach(start.hits, start.host_slots)
        beside, leads = reach.beside[num_passed:], reach.leads[num_passed:]
        return WindowStart(num_passed, beside.astype(np.int32), leads[beside == 0])

    def pin(self, start: RequestStart) -> None:
        """Let no other block take the slots from which a request starts until the plan is made: it reads them."""
        super().pin(start)
        assert start.window is not None, "a start without its windows' blocks"
        self._pin(self.slots_of(start.window.leads))

    def copy_back(self, start: RequestStart) -> None:
        """Copy what the host has for a request into its blocks, which are found by their names, or beside those."""
        super().copy_back(start)
        window, names = start.window, self._batch.pool.names
        assert window is not None, "a start without its windows' blocks"
        if not len(window.leads):
            return
        places = window.num_passed + np.flatnonzero(window.hits == 0)
        owners, blocks = start.block_ids[places].astype(np.int64), window.block_ids[places]
        back = self._batch.carried.back
        back.sources.append(self.in_plan(self.slots_of(window.leads)))
        back.targets.append(self.inside(blocks // self.page_blocks).astype(np.int32))
        self.num_hits += self.page_blocks * len(places)
        right = names.content[owners] == self.window_of[window.leads]  # else another request's block has the name
        names.put_beside(owners[right], blocks[right].astype(np.int64))

    def check_integrity(self) -> None:
        """Raise AssertionError with the numbers when slots are lost or doubled, or a name is wrong."""
        super().check_integrity()
        contents, leads = list(self._lead_of), np.array(list(self._lead_of.values()), np.int64)
        slots = self._slots_of[leads]
        assert (self.window_of[slots] == np.array(contents, np.int64)[:, None]).all(), (
            "a block of windows has lost a slot"
        )
        assert len(np.unique(slots)) == slots.size, "a slot is of two blocks of windows"
        assert np.count_nonzero(self.window_of) == slots.size, "a slot is of a block of windows that is not found"
        both = np.flatnonzero((self.window_of != UNNAMED) & (self.names.content != UNNAMED))
        assert not len(both), f"slots {both[:8]} have two contents"
