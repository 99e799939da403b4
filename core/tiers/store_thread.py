"""StoreThread: carries out the scheduler's orders on a store of blocks, off the step's path.

Reading has priority, and blocks in the KV cache are written last. Whatever happens to the disk or the thread, each
order that has an answer gets one, so no request waits forever.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from core import log
from core.execution.shared_blocks import BlocksLostError
from core.inputs import BlocksArrived, BlocksFound, BlocksStored, StoreNews
from core.kv.orders import Fetch, Leave, Look, Order, Retain, Store
from core.tiers.block_store import BlockStore

#: The most waiting Leaves, and bytes in them, because a disk may hang. Beyond that the oldest are dropped, and their
#: blocks are not written.
MAX_LEAVES = 4096
MAX_LEAVE_BYTES = 64 << 20
_SETTLE_S = 0.05


class StoreThread:
    """One thread with a queue. tell: called with each answer, from the thread or, after its death, from put()."""

    def __init__(self, store: BlockStore, tell: Callable[[StoreNews], None]) -> None:
        self._store, self._tell = store, tell
        self._reads: deque[Look | Fetch] = deque()
        self._leaves: deque[Leave] = deque()
        self._leave_bytes = 0
        self._writes: deque[Store | Retain] = deque()  # the scheduler limits them
        self._at_work: Order | None = None
        self._wake = threading.Condition()
        self._is_closing = self._gives_up = self._has_died = False
        store.settle = self.settle
        self._thread = threading.Thread(target=self._run, name="kv files", daemon=True)
        self._thread.start()

    def put(self, orders: Sequence[Order]) -> None:
        """Queue the orders of a step. For the engine thread."""
        if not orders:
            return
        with self._wake:
            for order in orders:
                match order:
                    case Look() | Fetch():
                        self._reads.append(order)
                    case Store() | Retain():
                        self._writes.append(order)
                    case Leave():
                        self._add_leave(order)
            left = self._take_all() if self._has_died else []
            self._wake.notify_all()
        self._refuse(left)

    def settle(self) -> None:
        """Wait a moment until everything that requests have left is known. For another thread."""
        with self._wake:
            self._wake.wait_for(lambda: not self._leaves and not isinstance(self._at_work, Leave), _SETTLE_S)

    def close(self, timeout: float) -> None:
        """Carry out what is queued for up to `timeout` seconds, then stop; the rest is lost.

        With 0 the thread stops after the current order.
        """
        with self._wake:
            self._is_closing = True
            if not timeout:
                self._gives_up = True
                self._take_all()
            self._wake.notify_all()
        self._thread.join(timeout)

    def _add_leave(self, order: Leave) -> None:
        self._leaves.append(order)
        self._leave_bytes += _bytes_of(order)
        while len(self._leaves) > MAX_LEAVES or self._leave_bytes > MAX_LEAVE_BYTES:
            self._leave_bytes -= _bytes_of(self._leaves.popleft())

    def _take_all(self) -> list[Order]:
        """Remove and return all queued orders. Call this with the lock held."""
        taken: list[Order] = [*self._reads, *self._leaves, *self._writes]
        self._reads.clear()
        self._leaves.clear()
        self._writes.clear()
        self._leave_bytes = 0
        return taken

    def _refuse(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if (answer := _answer_of_none(order)) is not None:
                self._tell(answer)

    def _run(self) -> None:
        """Serve until closed. An error that is not from the disk goes to threading.excepthook, and ends the thread."""
        has_ended = False
        try:
            self._store.open()
            self._serve()
            self._store.close()
            has_ended = True
        finally:
            if not has_ended:
                log.say("engine-core: the thread of KV blocks has died; no more of them are read or written")
                with self._wake:
                    self._has_died = True
                    left = self._take_all()
                    if self._at_work is not None:
                        left.append(self._at_work)
                self._refuse(left)

    def _serve(self) -> None:
        while True:
            order = self._at_work = self._next()
            if order is None and (self._gives_up or not self._store.has_unsaved):
                return
            try:
                answer = self._store.save_one() if order is None else self._store.carry_out(order)
            except OSError as error:
                self._store.pause(error)
                answer = None if order is None else _answer_of_none(order)
            except BlocksLostError:
                answer = None if order is None else _answer_of_none(order)
            if answer is not None:
                self._tell(answer)
            if isinstance(order, Leave):
                self._end_leave()

    def _end_leave(self) -> None:
        with self._wake:
            self._at_work = None
            if not self._leaves:
                self._wake.notify_all()  # for settle()

    def _next(self) -> Order | None:
        """Wait for the next order; None: save a block if there is one, otherwise stop."""
        with self._wake:
            while not (self._reads or self._leaves or self._writes):
                if self._is_closing or self._store.has_unsaved:
                    return None
                self._wake.wait()
            if self._reads:
                return self._reads.popleft()
            if not self._leaves:
                return self._writes.popleft()
            leave = self._at_work = self._leaves.popleft()  # before the writes, which need the names that it provides
            self._leave_bytes -= _bytes_of(leave)
            return leave


def _bytes_of(leave: Leave) -> int:
    return sum(column.nbytes for column in leave if isinstance(column, np.ndarray))


def _answer_of_none(order: Order) -> StoreNews | None:
    """Return the answer to an order of which nothing was carried out, or None if it has no answer."""
    match order:
        case Look():
            return BlocksFound(order.ticket, 0)
        case Fetch():
            return BlocksArrived(order.ticket, 0)
        case Store():
            return BlocksStored(order.ticket, 0)
        case Leave() | Retain():
            return None
