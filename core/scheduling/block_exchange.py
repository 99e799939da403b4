"""BlockExchange: KV blocks come from a store beyond the host's memory, and go there, between the steps.

A request that may find blocks there waits aside, without a row and without blocks, until they have been read into slots
of the host pool. Then it starts as one whose blocks the host has. Each answer of the store is an input of the core.
"""

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from core.batch.batch import Batch
from core.batch.request import Request
from core.inputs import BlocksArrived, BlocksFound, BlocksStored
from core.kv.block_names import UNNAMED, block_key, hash_blocks
from core.kv.orders import Fetch, Leave, Look, Order, Store
from core.scheduling.waiting_queue import WaitingQueue
from ipc.tables.arrays import NO_INTS, BlockIds, Int32s, Ints, Rows

#: Fewest missing blocks for which a request waits: the store's answer takes as long as computing some tokens.
MIN_BLOCKS = 4
#: Most looks and fetches that are not answered yet.
MAX_FETCHES = 16
#: Longest time that a request waits for the store; then it computes.
MAX_WAIT_NS = 2_000_000_000
#: Most requests that begin to wait in one step, and most that end it, because thousands may wait for the same blocks.
MAX_AT_ONCE = 64
STORED_AT_ONCE = 32  # blocks of one Store
MAX_STORES = 2  # that are not answered yet


class PendingFetch(msgspec.Struct, eq=False):
    """Blocks that requests wait for: those of the tokens of the first of them, whatever becomes of it."""

    ticket: int
    root: int
    token_ids: Int32s  # of whole blocks, from the prompt's beginning to the last block that is wanted
    hashes: list[int]  # of these blocks
    first: int  # block that is missing
    asked_ns: int
    waiters: list[Request] = msgspec.field(default_factory=list)  # the first one has asked; some may have ended
    slots: Int32s | None = None  # None: it is not known yet how many blocks there are
    is_stale: bool = False  # the cache has been emptied meanwhile
    #: Of layers with a window, where these have blocks of their own: the first of the blocks that are fetched of the
    #: others, how many are, and the places of the blocks that are fetched after them. is_second: after one fell short.
    begin: int = 0
    num_full: int = 0
    places: Ints = NO_INTS
    is_second: bool = False


class BlockExchange:
    """What is asked of the store, and what is done with its answers.

    orders: of the last step, until take_orders() or the next step. asks_left: requests that may yet begin to wait in
    this step. asks: requests may find blocks there; False: blocks only go there.
    """

    def __init__(self, batch: Batch, waiting: WaitingQueue, *, asks: bool = True) -> None:
        self._batch, self._waiting, self._host = batch, waiting, batch.host_cache
        self._asks = asks
        self.orders: list[Order] = []
        self.num_fetched = self.num_stored = 0  # blocks, since the engine started
        self._fetches: dict[int, PendingFetch] = {}  # by ticket
        self._stores: dict[int, Ints] = {}  # slots by ticket
        self._unstored: deque[tuple[int, int]] = deque()  # (slot, content), oldest first
        self._num_tickets = 0
        self._freed: deque[Request] = deque()  # their wait has ended, and they are not in their queue yet
        self.asks_left = self._frees_left = MAX_AT_ONCE  # in this step
        self.evictions: Ints = np.zeros(len(batch.pool.names.content), np.int64)  # of each block, since the start
        batch.before_release.append(self.leave)
        batch.host_cache.on_written = self.queue_stores
        batch.pool.tiers.append(self)

    def begin_step(self, now_ns: int) -> None:
        """Drop orders that nobody has taken, and let requests go that have waited too long."""
        self.orders.clear()
        self.asks_left = self._frees_left = MAX_AT_ONCE
        self._free_some()
        for pending in self._fetches.values():
            if pending.waiters and now_ns - pending.asked_ns > MAX_WAIT_NS:
                self._end_wait(pending, has_come=False)

    @property
    def is_freeing(self) -> bool:
        """Return whether requests that wait no more are let go in the next steps."""
        return bool(self._freed)

    def take_orders(self) -> list[Order]:
        """Return the orders of the last step, for whoever carries them out."""
        taken, self.orders = self.orders, []
        return taken

    # --- in ----------------------------------------------------------------------------------------------------------

    def ask(self, request: Request, now_ns: int) -> bool:
        """Let a request that is in no queue wait for the store; return False if it need not."""
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
        """Fetch the blocks that the store has found, or let the requests go that wait for them."""
        pending = self._fetches.get(message.ticket)
        if pending is None or pending.slots is not None:
            return
        slots = self._reserve(pending, message.count)
        if not len(slots):
            self._end_wait(self._fetches.pop(message.ticket), has_come=False)
            return
        pending.slots = slots.astype(np.int32)
        self.orders.append(self._fetch(pending, slots))

    def arrived(self, message: BlocksArrived) -> None:
        """Name the blocks that have been read, and let the requests go that wait for them."""
        pending = self._fetches.get(message.ticket)
        if pending is None or pending.slots is None:
            return
        del self._fetches[message.ticket]
        count = 0 if pending.is_stale else max(0, message.count)
        has_come = self._name(pending, count)
        self._host.unlock(pending.slots.astype(np.int64))
        self._end_fetch(pending, count, has_come=has_come)

    def _look(self, pending: PendingFetch) -> Look:
        return Look(pending.ticket, pending.root, pending.token_ids, pending.first)

    def _fetch(self, pending: PendingFetch, slots: Ints) -> Fetch:
        token_ids = pending.token_ids[: (pending.first + len(slots)) * self._batch.block_size]
        return Fetch(pending.ticket, pending.root, token_ids, pending.first, self._host.in_plan(slots))

    def _end_fetch(self, pending: PendingFetch, count: int, *, has_come: bool) -> None:
        """Let the requests go that wait for a fetch which has ended. count: of the blocks that were to come."""
        self._end_wait(pending, has_come=has_come)

    def _reserve(self, pending: PendingFetch, count: int) -> Ints:
        """Return slots for those of `count` blocks that are still missing, and for which there is room."""
        end = pending.first + count
        if pending.is_stale or not pending.first < end <= len(pending.hashes) or not has_live(pending):
            return np.zeros(0, np.int64)
        pending.first, _, on_host = self._find(pending.root, pending.token_ids, pending.hashes)
        self._host.touch(on_host)  # so that these do not make room for the blocks behind them
        return self._host.reserve(max(0, min(end - pending.first, self._room() - len(on_host))))

    def _name(self, pending: PendingFetch, count: int) -> bool:
        """Name the slots of the first `count` blocks that were to come; return whether it was worth the wait."""
        assert pending.slots is not None, "nothing was to come"
        return self._name_slots(pending, pending.first, pending.slots[:count])

    def _name_slots(self, pending: PendingFetch, first: int, slots: Int32s) -> bool:
        """Name slots that hold blocks from `first` on, by the tokens that were asked for.

        Return whether the first of them is there now.
        """
        known, content, _ = self._find(pending.root, pending.token_ids, pending.hashes)
        if not first <= known < first + len(slots):
            return known > first  # others have computed all of them, or the blocks before these are gone
        slots = slots[known - first :]
        end, size, names = known + len(slots), self._batch.block_size, self._batch.pool.names
        contents = names.new_contents(len(slots))
        parents = np.concatenate([np.array([content], np.int64), contents[:-1]])
        keys = block_key(parents.view(np.uint64), np.array(pending.hashes[known:end], np.uint64))
        token_ids = pending.token_ids[known * size : end * size].reshape(-1, size)
        self._host.names.adopt(slots.astype(np.int64), contents, keys, parents, token_ids)
        self.num_fetched += len(slots)
        return True

    def _end_wait(self, pending: PendingFetch, *, has_come: bool) -> None:
        """Let the requests queue up, a portion of them in each step.

        The one that has asked does not ask again. If nothing has come, nobody does who has waited for it: the others
        would wait once more for the same first block.
        """
        waiters, pending.waiters = pending.waiters, []
        for request in waiters[:1] if has_come else waiters:
            request.has_asked = True
        self._freed.extend(waiters)
        self._free_some()

    def _free_some(self) -> None:
        while self._freed and self._frees_left:
            request = self._freed.popleft()
            if not request.is_finished:
                self._waiting.await_blocks(request, 0)
                self._frees_left -= 1

    def _num_there(self, root: int, token_ids: Int32s, hashes: list[int]) -> int:
        """Return how many first blocks a request need not ask for."""
        return self._find(root, token_ids, hashes)[0]

    def _find(self, root: int, token_ids: Int32s, hashes: list[int]) -> tuple[int, int, Ints]:
        """Return (number of first blocks that the cache and the host have, content of the last, slots on the host).

        token_ids: of whole blocks; hashes: one of each.
        """
        blocks = token_ids.reshape(-1, self._batch.block_size)
        hits, content = self._batch.pool.names.find(root, blocks, hashes)
        count = len(hits)
        slots, content = self._host.names.find(content, blocks[count:], hashes[count:])
        return count + len(slots), content, slots.astype(np.int64)

    def _same(self, request: Request, first: int) -> PendingFetch | None:
        """Return the fetch whose first block is the request's first missing one, too."""
        size = (first + 1) * self._batch.block_size
        for pending in self._fetches.values():
            if pending.is_stale or pending.first != first or pending.root != request.root or not has_live(pending):
                continue
            if np.array_equal(pending.token_ids[:size], request.token_ids[:size]):
                return pending
        return None

    def _room(self) -> int:
        """Return how many slots may be reserved: half of them are always left to the host cache."""
        taken = sum(len(pending.slots) for pending in self._fetches.values() if pending.slots is not None)
        return self._host.num_slots // 2 - taken

    # --- out ---------------------------------------------------------------------------------------------------------

    def leave(self, rows: Rows) -> None:
        """Tell the store of the blocks of rows that are about to be released."""
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

    def _leave(self, root: int, token_ids: Int32s, blocks: Int32s, contents: Ints) -> Leave:
        return Leave(root, token_ids, blocks, contents, self.evictions[blocks])

    def queue_stores(self, slots: Ints) -> None:
        """Store blocks that the finished plan copies to these slots."""
        self._unstored.extend(zip(slots.tolist(), self._host.names.content[slots].tolist(), strict=True))
        while len(self._unstored) > self._host.num_slots:
            self._unstored.popleft()
        self._issue_stores()

    def stored(self, message: BlocksStored) -> None:
        """Let slots be used again that have been written to the store. Ticket 0: blocks came from the KV cache."""
        if not message.ticket:
            self.num_stored += message.count
        if (slots := self._stores.pop(message.ticket, None)) is not None:
            self.num_stored += message.count
            self._host.unlock(slots)
            self._issue_stores()

    def _issue_stores(self) -> None:
        while self._unstored and len(self._stores) < MAX_STORES:
            slots: dict[int, int] = {}  # content by slot
            while self._unstored and len(slots) < STORED_AT_ONCE:
                slot, content = self._unstored.popleft()
                if content != UNNAMED and self._host.names.content[slot] == content and not self._host.is_busy[slot]:
                    slots[slot] = content
            if slots:
                ticket, places = self._next_ticket(), np.array(list(slots), np.int64)
                self._stores[ticket] = places
                self._host.lock(places)
                contents = np.array(list(slots.values()), np.int64)
                self.orders.append(Store(ticket, self._host.in_plan(places), contents))

    def _next_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    # --- as a tier of the pool ---------------------------------------------------------------------------------------

    def keep(self, blocks: BlockIds) -> None:
        """Count evictions. The host takes the blocks, and they go on from there."""
        self.evictions[blocks] += 1

    def forget(self) -> None:
        """Let nothing in that is on its way: the cache is emptied, or the executor is lost."""
        for pending in self._fetches.values():
            pending.is_stale = True
        self._unstored.clear()

    def forget_contents(self, contents: Ints) -> None:
        """Let nothing in that is on its way: some of it may follow these contents."""
        self.forget()

    # --- redaction ---------------------------------------------------------------------------------------------------

    def rename(self, root: Callable[[int], int], tokens: Callable[[int, Int32s], Int32s]) -> None:
        """Give what is under way other roots and tokens, and drop the orders: a replay carries none out.

        tokens: returns those of a sequence, given (new root, tokens).
        """
        self.orders.clear()
        for pending in self._fetches.values():
            pending.root = root(pending.root)
            pending.token_ids = tokens(pending.root, pending.token_ids)
            pending.hashes = hash_blocks(pending.token_ids.reshape(-1, self._batch.block_size)).tolist()


def _num_portable(token_ids: Int32s, block_size: int) -> int:
    """Return how many whole blocks another engine would name in the same way.

    Ids below 0 stand for features, and another engine has other numbers for these.
    """
    negative = np.flatnonzero(token_ids < 0)
    return (int(negative[0]) if len(negative) else len(token_ids)) // block_size


def has_live(pending: PendingFetch) -> bool:
    """Return whether anybody still waits for a fetch."""
    return any(not request.is_finished for request in pending.waiters)
