"""StoreQueue: blocks on the host waiting to be written to a store beyond the host's memory, or being written."""

from collections import deque
from collections.abc import Callable

import numpy as np

from core.batch.host_beside import UNKNOWN, HostBeside
from core.batch.host_cache import HostCache
from core.kv.block_names import UNNAMED
from core.kv.orders import Store
from ipc.tables.arrays import Ints

STORED_AT_ONCE = 32  # slots of one Store
MAX_STORES = 2  # unanswered ones


class _Unstored:
    """Blocks to be stored of one kind of layer. beside: None means the named blocks."""

    def __init__(self, host: HostCache, beside: HostBeside | None) -> None:
        self.beside = beside
        self.contents = host.names.content if beside is None else beside.content  # [slots] content numbers
        self.width = 1 if beside is None else beside.page_blocks  # slots per block
        self.queue: deque[tuple[int, int]] = deque()  # (first slot, content), oldest first

    def firsts(self, slots: Ints) -> Ints:
        """Return the first slots of this kind's blocks in these slots, each once."""
        contents = self.contents[slots]
        if self.beside is None:
            named: Ints = slots[contents != UNNAMED]
            return named
        contents = np.array(list(dict.fromkeys(contents[contents != UNNAMED].tolist())), np.int64)
        return self.beside.leads_of(contents)

    def slots_of(self, firsts: Ints) -> Ints:
        """Return all slots of the blocks with these first slots."""
        return firsts if self.beside is None else self.beside.slots_of(firsts)


class StoreQueue:
    """What is to be stored from the host cache, named blocks first."""

    def __init__(self, host: HostCache) -> None:
        self._host = host
        self._kinds = [_Unstored(host, beside) for beside in (None, *host.beside)]
        self._stores: dict[int, Ints] = {}  # slots by ticket
        #: By first slot: how often the slot had been given away when the end of a row queued its content.
        self._queued_at: Ints = np.zeros(host.num_slots, np.int64)

    def add_written(self, slots: Ints) -> None:
        """Queue the blocks that the finished plan has copied to these slots."""
        for kind in self._kinds:
            firsts = kind.firsts(slots)
            kind.queue.extend(zip(firsts.tolist(), kind.contents[firsts].tolist(), strict=True))
            while len(kind.queue) * kind.width > self._host.num_slots:
                kind.queue.popleft()

    def add_known(self, contents: Ints) -> None:
        """Queue what the host has next to these contents, once each. The store knows their names from now on.

        What the plan being made copies to the host is queued when the plan is done.
        """
        host = self._host
        for kind in self._kinds:
            if kind.beside is None:
                continue
            firsts = kind.beside.leads_of(contents)
            firsts = firsts[firsts != UNKNOWN]
            firsts = firsts[host.is_idle(firsts) & (self._queued_at[firsts] != host.times_given[firsts])]
            self._queued_at[firsts] = host.times_given[firsts]
            kind.queue.extend(zip(firsts.tolist(), kind.contents[firsts].tolist(), strict=True))

    def take_orders(self, next_ticket: Callable[[], int]) -> list[Store]:
        """Return orders for what may be stored now. The slots are not written to until end()."""
        orders: list[Store] = []
        for kind in self._kinds:
            while kind.queue and len(self._stores) < MAX_STORES:
                contents = self._next_blocks(kind)
                if not contents:
                    continue
                ticket, slots = next_ticket(), kind.slots_of(np.array(list(contents), np.int64))
                self._stores[ticket] = slots
                self._host.lock(slots)
                of_slots, is_beside = np.array(list(contents.values()), np.int64), kind.beside is not None
                orders.append(Store(ticket, self._host.in_plan(slots), of_slots, is_beside))
        return orders

    def _next_blocks(self, kind: _Unstored) -> dict[int, int]:
        """Return the next blocks that are still there and unused, as contents by first slot."""
        contents: dict[int, int] = {}
        while kind.queue and len(contents) * kind.width < STORED_AT_ONCE:
            first, content = kind.queue.popleft()
            if kind.contents[first] == content and not self._host.is_busy[first]:
                contents[first] = content
        return contents

    def end(self, ticket: int) -> bool:
        """Release the slots of a Store, and return whether it was under way."""
        slots = self._stores.pop(ticket, None)
        if slots is None:
            return False
        self._host.unlock(slots)
        return True

    def clear(self) -> None:
        """Drop the queue without storing it."""
        for kind in self._kinds:
            kind.queue.clear()
