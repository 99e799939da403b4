"""BlockExchange: moves KV blocks between the engine and a store beyond the host's memory, between the steps.

A request that may find blocks there waits aside, without a row or blocks, until the blocks have been read into slots of
the host pool. Then it starts like any request whose blocks are on the host. Each answer from the store is an input of
the core.

If layers with a window have their own blocks, or if the model has recurrent layers, a request can use a prefix only if
all of its named blocks are there, and next to them what core/scheduling/exchange_beside.py describes. The store is
asked how long such a prefix could be with what it has, and then for what is missing.
"""

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from core.batch.batch import Batch
from core.batch.host_beside import Reach
from core.batch.request import Request
from core.inputs import BlocksArrived, BlocksFound, BlocksStored
from core.kv.block_names import UNNAMED, block_keys, hash_blocks
from core.kv.orders import Fetch, Leave, Look, Order, Windows
from core.scheduling.exchange_beside import ExchangedBeside, WindowsBeside
from core.scheduling.store_queue import StoreQueue
from core.scheduling.waiting_queue import WaitingQueue
from ipc.options.config import EngineConfig
from ipc.tables.arrays import NO_INTS, Int32s, Ints, Rows
from ipc.wire.block_roots import root_of_weights
from ipc.wire.weights_messages import WeightsMark

#: A request waits only for at least this many missing blocks: the store's answer takes as long as computing some
#: tokens.
MIN_BLOCKS = 4
#: The most unanswered looks and fetches.
MAX_FETCHES = 16
#: The longest time that a request waits for the store, and what each token of blocks that it has adds. After it, the
#: request computes the blocks: on a CPU a token of a prompt takes a small model about that long, and others longer.
MAX_WAIT_NS = 2_000_000_000
WAIT_NS_PER_TOKEN = 1_000_000
#: The most requests that start to wait in one step, and the most that end waiting: thousands may wait for the same
#: blocks.
MAX_AT_ONCE = 64


class PendingFetch(msgspec.Struct, eq=False):
    """Blocks that requests wait for, named by the first request's tokens even if that request ends."""

    ticket: int
    root: int
    token_ids: Int32s  # tokens of whole blocks, from the start of the prompt to the last block that is wanted
    hashes: list[int]  # hashes of these blocks
    first: int  # index of the first missing block
    asked_ns: int
    # requests that wait, the one that asked first; some may have ended
    waiters: list[Request] = msgspec.field(default_factory=list)
    slots: Int32s | None = None  # None: the number of blocks in the store is not known yet
    is_stale: bool = False  # the cache was emptied after the request was sent
    #: The first of the named blocks that are fetched, and how many; then the places of the blocks fetched next to named
    #: ones. is_second: this fetch follows one that fell short.
    begin: int = 0
    num_named: int = 0
    places: Ints = NO_INTS
    own_slots: Ints = NO_INTS  # for what is next to the named blocks, if it takes no slots of the host
    is_second: bool = False


class BlockExchange:
    """What is asked of the store, and what happens with its answers.

    orders: those of the last step, until take_orders() or the next step. asks_left: how many more requests may start to
    wait in this step. asks: whether requests look for blocks there; if False, blocks only go there.
    """

    def __init__(self, batch: Batch, waiting: WaitingQueue, *, asks: bool = True) -> None:
        self._batch, self._waiting, self._host = batch, waiting, batch.host_cache
        self._asks = asks
        self.orders: list[Order] = []
        self.num_fetched = self.num_stored = 0  # number of blocks since the engine started
        self._fetches: dict[int, PendingFetch] = {}  # by ticket
        self.stores = StoreQueue(batch.host_cache)
        #: For layers with a window that have their own blocks, or for recurrent layers, if there are any.
        self.beside: ExchangedBeside | None = WindowsBeside(batch, self.stores) if batch.others else None
        self._num_tickets = 0
        self._weights_root = 0  # what the weights in use change in the roots that the store sees
        self._freed: deque[Request] = deque()  # these wait no longer but are not back in their queue yet
        self.asks_left = self._frees_left = MAX_AT_ONCE  # in this step
        # evictions of each block since the start
        self.evictions: Ints = np.zeros(len(batch.pool.names.content), np.int64)
        batch.before_release.append(self.leave)
        batch.host_cache.on_written = self.queue_stores
        batch.pool.tiers.append(self)

    def begin_step(self, now_ns: int) -> None:
        """Drop orders that were not taken, and release requests that have waited too long."""
        self.orders.clear()
        self.asks_left = self._frees_left = MAX_AT_ONCE
        self._free_some()
        for pending in self._fetches.values():
            num_coming = 0 if pending.slots is None else len(pending.slots) * self._batch.block_size
            if pending.waiters and now_ns - pending.asked_ns > MAX_WAIT_NS + num_coming * WAIT_NS_PER_TOKEN:
                self._end_wait(pending, has_come=False)

    @property
    def is_freeing(self) -> bool:
        """Return whether requests that wait no longer still have to be released in the next steps."""
        return bool(self._freed)

    def take_orders(self) -> list[Order]:
        """Return the orders of the last step, for the caller to carry out."""
        taken, self.orders = self.orders, []
        return taken

    # --- in ----------------------------------------------------------------------------------------------------------

    def ask(self, request: Request, now_ns: int) -> bool:
        """Let a request that is in no queue wait for the store. Return False if it need not wait."""
        if (
            not self._asks
            or request.has_asked
            or request.swapped is not None
            or request.needs_whole_prompt
            or request.choices
        ):
            return False
        size = self._batch.block_size
        wanted = _num_portable(request.token_ids[:-1], size)  # the last token is computed in any case
        if wanted < MIN_BLOCKS:
            return False
        token_ids, hashes = request.token_ids[: wanted * size], request.block_hashes[:wanted]
        first = self._num_there(request.root, token_ids, hashes)
        if wanted - first < MIN_BLOCKS:
            return False
        pending = self._same(request, first)
        if pending is None:
            if len(self._fetches) >= MAX_FETCHES:
                return False
            ticket, token_ids = self._next_ticket(), token_ids.copy()
            pending = PendingFetch(ticket, request.root, token_ids, hashes, first, now_ns)
            self._fetches[ticket] = pending
            self.orders.append(self._look(pending))
        pending.waiters.append(request)
        request.awaits = pending.ticket
        self._waiting.push(request)
        self.asks_left -= 1
        return True

    def found(self, message: BlocksFound) -> None:
        """Fetch the blocks that the store has found, or release the requests that wait for them."""
        pending = self._fetches.get(message.ticket)
        if pending is None or pending.slots is not None:
            return
        slots = self._reserve(pending, message.count)
        if slots is None:
            self._end_wait(self._fetches.pop(message.ticket), has_come=False)
            return
        pending.slots = slots.astype(np.int32)
        self.orders.append(self._fetch(pending, slots))

    def arrived(self, message: BlocksArrived) -> None:
        """Name the blocks that have been read, and release the requests that wait for them."""
        pending = self._fetches.get(message.ticket)
        if pending is None or pending.slots is None:
            return
        del self._fetches[message.ticket]
        count = 0 if pending.is_stale else max(0, message.count)
        has_come = self._name(pending, count)
        self._host.unlock(pending.slots.astype(np.int64))
        if self.beside is not None:
            self.beside.release(pending.own_slots)
        self._end_fetch(pending, count, has_come=has_come)

    def _look(self, pending: PendingFetch) -> Look:
        if (beside := self.beside) is None:
            return Look(pending.ticket, self._root(pending.root), pending.token_ids, pending.first)
        reach, kind = self._reach(pending.root, pending.token_ids, pending.hashes), beside.kind
        is_here = np.zeros(len(pending.hashes), np.bool_)
        is_here[: len(reach.contents)] = beside.is_there(reach)
        slots = np.maximum(np.arange(len(is_here) + 1) - len(reach.contents), 0)
        slots += beside.width * kind.num_missing(is_here)
        most = int(np.flatnonzero(slots <= self._room())[-1])
        windows = Windows(kind, pending.first, most, is_here)
        return Look(pending.ticket, self._root(pending.root), pending.token_ids, len(reach.contents), windows)

    def _fetch(self, pending: PendingFetch, slots: Ints) -> Fetch:
        num_named, places, own = pending.num_named, pending.places, self._host.in_plan(slots)
        end = max(pending.begin + num_named, 1 + int(places.max(initial=-1)))
        token_ids = pending.token_ids[: end * self._batch.block_size]
        fetch = Fetch(pending.ticket, self._root(pending.root), token_ids, pending.begin, own[:num_named])
        if not len(places):
            return fetch
        elsewhere = pending.own_slots.astype(np.int32)
        return fetch._replace(places=places.astype(np.int32), window_slots=np.concatenate([own[num_named:], elsewhere]))

    def _end_fetch(self, pending: PendingFetch, count: int, *, has_come: bool) -> None:
        """Release the requests that wait for a fetch that has ended. count: number of blocks that were to come.

        If part of a prefix with windows could not be read, the store is asked once more, for a shorter one. Damaged
        blocks have already been removed.
        """
        is_whole = self.beside is None or count >= pending.num_named + len(pending.places)
        if is_whole or pending.is_stale or pending.is_second or not has_live(pending):
            self._end_wait(pending, has_come=has_come)
            return
        pending.ticket, pending.slots, pending.is_second = self._next_ticket(), None, True
        pending.own_slots = NO_INTS
        pending.first = self._num_there(pending.root, pending.token_ids, pending.hashes)
        self._fetches[pending.ticket] = pending
        self.orders.append(self._look(pending))

    def _reserve(self, pending: PendingFetch, count: int) -> Ints | None:
        """Return slots for those of `count` more blocks that are still missing; None if there is nothing to fetch.

        Without windows any of the blocks are useful, so there may be fewer slots than blocks.
        """
        end = pending.first + count
        if pending.is_stale or not pending.first < end <= len(pending.hashes) or not has_live(pending):
            return None
        reach = self._reach(pending.root, pending.token_ids, pending.hashes)
        begin = min(end, len(reach.contents))
        pending.begin, pending.num_named = begin, end - begin
        if self.beside is not None:
            return self._reserve_all(self.beside, pending, reach, end)
        pending.first = len(reach.contents)
        self._host.touch(reach.slots.astype(np.int64))  # so that these are not evicted for the blocks that follow them
        slots = self._host.reserve(max(0, min(pending.num_named, self._room() - len(reach.slots))))
        pending.num_named = len(slots)
        return slots if len(slots) else None

    def _reserve_all(self, beside: ExchangedBeside, pending: PendingFetch, reach: Reach, end: int) -> Ints | None:
        """Return slots for all that a prefix of `end` blocks lacks, named blocks first; None if there is no room."""
        first = beside.kind.num_passed(end * self._batch.block_size)
        is_here = np.zeros(end, np.bool_)
        is_here[: pending.begin] = beside.is_there(reach)[:end]
        pending.places = first + np.flatnonzero(~is_here[first:])
        kept = np.concatenate([reach.slots[:end].astype(np.int64), beside.on_host(reach, first, pending.begin)])
        self._host.touch(kept)
        wanted = pending.num_named + beside.width * len(pending.places)
        if wanted > min(self._room(), self._host.num_slots - len(kept)) or not wanted + len(pending.places):
            return None
        slots, own = self._host.reserve(wanted), beside.reserve(len(pending.places))
        if len(slots) < wanted or own is None:
            self._host.unlock(slots)
            beside.release(NO_INTS if own is None else own)
            return None
        pending.own_slots = own
        return slots

    def _name(self, pending: PendingFetch, count: int) -> bool:
        """Name the slots of the first `count` blocks that were to come. Return whether the wait was worth it."""
        slots = pending.slots
        assert slots is not None, "nothing was to come"
        has_come = self._name_slots(pending, pending.begin, slots[: min(count, pending.num_named)])
        if (beside := self.beside) is None:
            return has_come
        places = pending.places[: max(0, count - pending.num_named)]
        of_beside = np.concatenate([slots[pending.num_named :].astype(np.int64), pending.own_slots])
        of_beside = of_beside.reshape(-1, max(1, beside.width))[: len(places)]
        reach = self._reach(pending.root, pending.token_ids, pending.hashes)
        is_new = places < len(reach.contents)
        is_new[is_new] = ~beside.is_there(reach)[places[is_new]]
        beside.put(reach.contents[places[is_new]], of_beside[is_new])
        self.num_fetched += int(np.count_nonzero(is_new))
        return self._num_there(pending.root, pending.token_ids, pending.hashes) > pending.first

    def _name_slots(self, pending: PendingFetch, first: int, slots: Int32s) -> bool:
        """Name slots that hold blocks from `first` on, by the tokens of the request that asked for them.

        Return whether the first of them is now there.
        """
        found = self._reach(pending.root, pending.token_ids, pending.hashes).contents
        known, content = len(found), int(found[-1]) if len(found) else pending.root
        if not first <= known < first + len(slots):
            return known > first  # other requests have computed all of them, or the blocks before them are gone
        slots = slots[known - first :]
        end, size, names = known + len(slots), self._batch.block_size, self._batch.pool.names
        contents = names.new_contents(len(slots))
        parents = np.concatenate([np.array([content], np.int64), contents[:-1]])
        keys = block_keys(parents.view(np.uint64), np.array(pending.hashes[known:end], np.uint64))
        token_ids = pending.token_ids[known * size : end * size].reshape(-1, size)
        self._host.names.adopt(slots.astype(np.int64), contents, keys, parents, token_ids)
        self.num_fetched += len(slots)
        return True

    def _end_wait(self, pending: PendingFetch, *, has_come: bool) -> None:
        """Return the waiting requests to the queue, a limited number in each step.

        The request that asked does not ask again. If nothing came, none of those that waited asks again: they would
        wait once more for the same first block. But what is next to the blocks may be there for longer prompts only.
        """
        waiters, pending.waiters = pending.waiters, []
        most = len(pending.token_ids) + self._batch.block_size
        for number, request in enumerate(waiters):
            is_longer = self.beside is not None and len(request.token_ids) > most
            request.has_asked |= not number or not (has_come or is_longer)
        self._freed.extend(waiters)
        self._free_some()

    def _free_some(self) -> None:
        while self._freed and self._frees_left:
            request = self._freed.popleft()
            if not request.is_finished:
                self._waiting.await_blocks(request, 0)
                self._frees_left -= 1

    def _num_there(self, root: int, token_ids: Int32s, hashes: list[int]) -> int:
        """Return the number of leading blocks that a request need not ask for."""
        reach = self._reach(root, token_ids, hashes)
        if self.beside is None:
            return len(reach.contents)
        return int(np.flatnonzero(self.beside.kind.num_missing(self.beside.is_there(reach)) == 0)[-1])

    def _reach(self, root: int, token_ids: Int32s, hashes: list[int]) -> Reach:
        """Return what the cache and the host have of these whole blocks. hashes: one per block."""
        blocks = token_ids.reshape(-1, self._batch.block_size)
        hits, content = self._batch.pool.names.find(root, blocks, hashes)
        slots, _ = self._host.names.find(content, blocks[len(hits) :], hashes[len(hits) :])
        return self._host.reach(hits, slots)

    def _same(self, request: Request, first: int) -> PendingFetch | None:
        """Return the fetch that has the same first missing block as the request."""
        size = (first + 1) * self._batch.block_size
        for pending in self._fetches.values():
            if pending.is_stale or pending.first != first or pending.root != request.root or not has_live(pending):
                continue
            if np.array_equal(pending.token_ids[:size], request.token_ids[:size]):
                return pending
        return None

    def _room(self) -> int:
        """Return how many slots may be reserved. At least half of them always stay with the host cache."""
        taken = sum(len(pending.slots) for pending in self._fetches.values() if pending.slots is not None)
        return self._host.num_slots // 2 - taken

    # --- out ---------------------------------------------------------------------------------------------------------

    def leave(self, rows: Rows) -> None:
        """Tell the store about the blocks of rows to be released, and store what the host has next to them.

        Blocks evicted while the row ran had no name that the store knew.
        """
        table, names, size = self._batch.table, self._batch.pool.names, self._batch.block_size
        for row in rows.tolist():
            request, named = table.request[row], int(table.num_named_blocks[row])
            if not named or request is None:
                continue
            token_ids = table.tokens.read(row, 0, named * size)
            if (named := _num_portable(token_ids, size)) > 0:
                blocks = table.blocks.read(row, 0, named).copy()
                contents = names.content[blocks]
                contents[: int(table.num_released[row])] = UNNAMED  # others may have these blocks
                self.orders.append(self._leave(request.root, token_ids[: named * size].copy(), blocks, contents))
        self._issue_stores()

    def _leave(self, root: int, token_ids: Int32s, blocks: Int32s, contents: Ints) -> Leave:
        left = Leave(self._root(root), token_ids, blocks, contents, self.evictions[blocks])
        if self.beside is not None:
            found, evictions = self.beside.left(contents, blocks, self.evictions)
            left = left._replace(beside=found, evictions_beside=evictions)
        return left

    def queue_stores(self, slots: Ints) -> None:
        """Store the blocks that the finished plan copies to these slots."""
        self.stores.add_written(slots)
        self._issue_stores()

    def stored(self, message: BlocksStored) -> None:
        """Release slots whose blocks have been written to the store. Ticket 0: the blocks came from the KV cache."""
        if not message.ticket:
            self.num_stored += message.count
        if self.stores.end(message.ticket):
            self.num_stored += message.count
            self._issue_stores()

    def _issue_stores(self) -> None:
        self.orders += self.stores.take_orders(self._next_ticket)

    def use_weights(self, mark: WeightsMark) -> None:
        """Give blocks other names in the store from now on: they were computed with these weights."""
        self._weights_root = root_of_weights(mark.fingerprint)

    def _root(self, root: int) -> int:
        """Return a request's root as the store sees it, where blocks computed with other weights have other names."""
        return root ^ self._weights_root

    def _next_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    # --- as a tier of the pool ---------------------------------------------------------------------------------------

    def keep(self, pages: Ints) -> None:
        """Count evictions of all blocks in these pages, and in pages that cannot be found without them.

        The host takes the blocks, and passes them on to the store.
        """
        pool, evicted = self._batch.pool, [pages]
        for beside in pool.names.beside:
            found = beside.found[pool.inside(pages)]
            orphans = np.unique(found[found != 0] // pool.page_blocks)
            evicted.append(orphans[~np.isin(orphans, pages)])
        self.evictions[pool.inside(np.concatenate(evicted))] += 1

    def forget(self) -> None:
        """Ignore everything that is on its way: the cache was emptied, or the executor was lost."""
        for pending in self._fetches.values():
            pending.is_stale = True
        self.stores.clear()

    def forget_contents(self, contents: Ints) -> None:
        """Ignore everything that is on its way: some of it may follow these contents."""
        self.forget()

    # --- redaction ---------------------------------------------------------------------------------------------------

    def rename(self, root: Callable[[int], int], tokens: Callable[[int, Int32s], Int32s]) -> None:
        """Rename the roots and tokens of what is under way, and drop the orders: a replay carries none out.

        tokens: maps (new root, tokens) of a sequence to its new tokens.
        """
        self.orders.clear()
        for pending in self._fetches.values():
            pending.root = root(pending.root)
            pending.token_ids = tokens(pending.root, pending.token_ids)
            pending.hashes = hash_blocks(pending.token_ids.reshape(-1, self._batch.block_size)).tolist()


def _num_portable(token_ids: Int32s, block_size: int) -> int:
    """Return how many whole blocks would have the same names in another engine.

    Ids below 0 stand for features, which other engines number differently.
    """
    negative = np.flatnonzero(token_ids < 0)
    return (int(negative[0]) if len(negative) else len(token_ids)) // block_size


def has_live(pending: PendingFetch) -> bool:
    """Return whether any live request still waits for a fetch."""
    return any(not request.is_finished for request in pending.waiters)


def make_exchange(config: EngineConfig, batch: Batch, waiting: WaitingQueue) -> BlockExchange | None:
    """Return the exchange for an engine with this config, or None if it has no store beyond the host."""
    if not config.kv_stores or not batch.host_cache.num_slots:
        return None
    return BlockExchange(batch, waiting, asks=config.asks_kv_store)
