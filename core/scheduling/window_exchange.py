"""WindowExchange: a BlockExchange of blocks of both kinds, where layers with a window have blocks of their own.

A request can use a prefix whose blocks are all there, in layers that see everything, and of the others those of the
window before its next token. So the store is asked how long such a prefix could be with what it has, and then for what
that one lacks.
"""

from collections import deque

import numpy as np

from core.batch.batch import Batch
from core.batch.host_cache import UNKNOWN
from core.batch.window_batch import WindowBatch
from core.batch.window_host import Reach
from core.kv.block_names import UNNAMED
from core.kv.orders import Fetch, Leave, Look, Store, Windows
from core.scheduling.block_exchange import MAX_STORES, STORED_AT_ONCE, BlockExchange, PendingFetch, has_live
from core.scheduling.waiting_queue import WaitingQueue
from ipc.options.block_stores import asks_store, stores_of
from ipc.options.config import EngineConfig
from ipc.tables.arrays import NO_INTS, BlockIds, Int32s, Ints, Rows


class WindowExchange(BlockExchange):
    """What is asked of the store, and what is done with its answers."""

    _batch: WindowBatch

    def __init__(self, batch: WindowBatch, waiting: WaitingQueue, *, asks: bool = True) -> None:
        super().__init__(batch, waiting, asks=asks)
        self._windows = batch.host_cache
        self._unstored_windows: deque[tuple[int, int]] = deque()  # (first slot, content), oldest first
        #: By first slot: how often it had been given away when its content was queued by a row's end.
        self._queued_at: Ints = np.zeros(batch.host_cache.num_slots, np.int64)

    # --- in ----------------------------------------------------------------------------------------------------------

    def _num_there(self, root: int, token_ids: Int32s, hashes: list[int]) -> int:
        return self._batch.room.num_usable(self._reach(root, token_ids, hashes).has_window)

    def _reach(self, root: int, token_ids: Int32s, hashes: list[int]) -> Reach:
        blocks = token_ids.reshape(-1, self._batch.block_size)
        hits, content = self._batch.pool.names.find(root, blocks, hashes)
        slots, _ = self._windows.names.find(content, blocks[len(hits) :], hashes[len(hits) :])
        return self._windows.reach(hits, slots)

    def _reach_of(self, pending: PendingFetch) -> Reach:
        return self._reach(pending.root, pending.token_ids, pending.hashes)

    def _look(self, pending: PendingFetch) -> Look:
        reach, room = self._reach_of(pending), self._room()
        is_here = np.zeros(len(pending.hashes), np.bool_)
        is_here[: len(reach.contents)] = reach.has_window
        slots = np.maximum(np.arange(len(is_here) + 1) - len(reach.contents), 0)
        slots += self._windows.page_blocks * self._batch.room.num_missing(is_here)
        most = int(np.flatnonzero(slots <= room)[-1])
        windows = Windows(self._batch.room, pending.first, most, is_here)
        return Look(pending.ticket, pending.root, pending.token_ids, len(reach.contents), windows)

    def _reserve(self, pending: PendingFetch, count: int) -> Ints:
        """Return slots for what a prefix of `count` more blocks lacks; none where there is no room for all of it."""
        end = pending.first + count
        if pending.is_stale or not pending.first < end <= len(pending.hashes) or not has_live(pending):
            return NO_INTS
        reach = self._reach_of(pending)
        begin, first = min(end, len(reach.contents)), self._batch.room.num_passed(end * self._batch.block_size)
        is_here = np.zeros(end, np.bool_)
        is_here[:begin] = reach.has_window[:end]
        places = first + np.flatnonzero(~is_here[first:])
        leads = reach.leads[first:begin]
        kept = np.concatenate([reach.slots[:end].astype(np.int64), self._windows.slots_of(leads[leads != UNKNOWN])])
        self._windows.touch(kept)
        wanted = end - begin + self._windows.page_blocks * len(places)
        if wanted > min(self._room(), self._windows.num_slots - len(kept)):
            return NO_INTS
        slots = self._windows.reserve(wanted)
        if len(slots) < wanted:
            self._windows.unlock(slots)
            return NO_INTS
        pending.begin, pending.num_full, pending.places = begin, end - begin, places
        return slots

    def _fetch(self, pending: PendingFetch, slots: Ints) -> Fetch:
        num_full, places, own = pending.num_full, pending.places, self._windows.in_plan(slots)
        end = max(pending.begin + num_full, 1 + int(places.max(initial=-1)))
        what = pending.ticket, pending.root, pending.token_ids[: end * self._batch.block_size], pending.begin
        return Fetch(*what, own[:num_full], places.astype(np.int32), own[num_full:])

    def _name(self, pending: PendingFetch, count: int) -> bool:
        slots, num_full = pending.slots, min(count, pending.num_full)
        assert slots is not None, "nothing was to come"
        self._name_slots(pending, pending.begin, slots[:num_full])
        places = pending.places[: max(0, count - pending.num_full)]
        of_windows = slots[pending.num_full :].astype(np.int64).reshape(-1, self._windows.page_blocks)[: len(places)]
        reach = self._reach_of(pending)
        is_new = places < len(reach.contents)
        is_new[is_new] = ~reach.has_window[places[is_new]]
        self._windows.put_windows(reach.contents[places[is_new]], of_windows[is_new].reshape(-1))
        self.num_fetched += int(np.count_nonzero(is_new))
        return self._batch.room.num_usable(self._reach_of(pending).has_window) > pending.first

    def _end_fetch(self, pending: PendingFetch, count: int, *, has_come: bool) -> None:
        """Look once more, for a shorter prefix, where something could not be read; what is damaged has been removed."""
        is_whole = count >= pending.num_full + len(pending.places)
        if is_whole or pending.is_stale or pending.is_second or not has_live(pending):
            self._end_wait(pending, has_come=has_come)
            return
        pending.ticket, pending.slots, pending.is_second = self._next_ticket(), None, True
        pending.first = self._num_there(pending.root, pending.token_ids, pending.hashes)
        self._fetches[pending.ticket] = pending
        self.orders.append(self._look(pending))

    # --- out ---------------------------------------------------------------------------------------------------------

    def _leave(self, root: int, token_ids: Int32s, blocks: Int32s, contents: Ints) -> Leave:
        beside = self._batch.pool.names.beside[blocks].astype(np.int32)
        beside[contents == UNNAMED] = 0
        left = super()._leave(root, token_ids, blocks, contents)
        leads = self._windows.leads_of(contents[(beside == 0) & (contents != UNNAMED)])
        self._queue_known(leads[leads != UNKNOWN])
        return left._replace(beside=beside, evictions_beside=self.evictions[beside])

    def leave(self, rows: Rows) -> None:
        """Tell the store of the blocks of rows that are about to be released, and store what the host has beside them.

        What was evicted while a row ran had no name that the store knows.
        """
        super().leave(rows)
        self._issue_stores()

    def _queue_known(self, leads: Ints) -> None:
        """Store these blocks of windows on the host, whose names are known from now on, once each.

        What the plan being made copies to the host is stored when that is done.
        """
        windows = self._windows
        new = windows.is_idle(leads) & (self._queued_at[leads] != windows.times_given[leads])
        leads = leads[new]
        self._queued_at[leads] = windows.times_given[leads]
        self._unstored_windows.extend(zip(leads.tolist(), windows.window_of[leads].tolist(), strict=True))

    def queue_stores(self, slots: Ints) -> None:
        """Store blocks of both kinds that the finished plan copies to these slots."""
        contents = self._windows.window_of[slots]
        self._unstored_windows.extend(
            (lead, content)
            for content in dict.fromkeys(contents[contents != UNNAMED].tolist())
            for lead in self._windows.leads_of(np.array([content])).tolist()
        )
        while len(self._unstored_windows) * self._windows.page_blocks > self._windows.num_slots:
            self._unstored_windows.popleft()
        super().queue_stores(slots[contents == UNNAMED])

    def _issue_stores(self) -> None:
        super()._issue_stores()
        windows, width = self._windows, self._windows.page_blocks
        while self._unstored_windows and len(self._stores) < MAX_STORES:
            leads: dict[int, int] = {}  # content by first slot
            while self._unstored_windows and len(leads) * width < STORED_AT_ONCE:
                lead, content = self._unstored_windows.popleft()
                if windows.window_of[lead] == content and not windows.is_busy[lead]:
                    leads[lead] = content
            if leads:
                ticket, places = self._next_ticket(), windows.slots_of(np.array(list(leads), np.int64))
                self._stores[ticket] = places
                windows.lock(places)
                contents = np.array(list(leads.values()), np.int64)
                self.orders.append(Store(ticket, windows.in_plan(places), contents, is_beside=True))

    # --- as a tier of the pool ---------------------------------------------------------------------------------------

    def keep(self, blocks: BlockIds) -> None:
        """Count evictions of all blocks in these pages, and of those that nobody finds without them."""
        names, inside = self._batch.pool.names, self._windows.inside(blocks)
        beside = names.beside[inside]
        orphans = np.unique(beside[beside != 0] // self._windows.page_blocks)
        super().keep(np.concatenate([inside, self._windows.inside(orphans[~np.isin(orphans, blocks)])]))

    def forget(self) -> None:
        """Let nothing in that is on its way: the cache is emptied, or the executor is lost."""
        super().forget()
        self._unstored_windows.clear()


def make_exchange(config: EngineConfig, batch: Batch, waiting: WaitingQueue) -> BlockExchange | None:
    """Return the exchange of an engine with this config; None: it has no store beyond the host."""
    if not stores_of(config) or not batch.host_cache.num_slots:
        return None
    asks = asks_store(config)
    if isinstance(batch, WindowBatch):
        return WindowExchange(batch, waiting, asks=asks)
    return BlockExchange(batch, waiting, asks=asks)
