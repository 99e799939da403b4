"""StoreThread: carries out the scheduler's orders on a store of blocks, off the step's path.

Reading goes first, and what is in the KV cache is written last.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from core.inputs import StoreNews
from core.kv.orders import Fetch, Leave, Look, Order, Store
from core.tiers.block_store import BlockStore


class StoreThread:
    """One thread with a queue. tell: called from the thread with each answer."""

    def __init__(self, store: BlockStore, tell: Callable[[StoreNews], None]) -> None:
        self._store, self._tell = store, tell
        self._urgent: deque[Look | Fetch] = deque()
        self._later: deque[Leave | Store] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv files", daemon=True)
        self._thread.start()

    def put(self, orders: Sequence[Order]) -> None:
        """Queue the orders of a step; for the engine thread."""
        if not orders:
            return
        with self._wake:
            for order in orders:
                if isinstance(order, Look | Fetch):
                    self._urgent.append(order)
                else:
                    self._later.append(order)
            self._wake.notify()

    def close(self, timeout: float) -> None:
        """Carry out what is queued, for up to `timeout` seconds, and end; what is left over then is lost."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        self._store.open()
        while True:
            order = self._next()
            if order is None and not self._store.has_unsaved:
                break
            answer = self._store.save_one() if order is None else self._store.carry_out(order)
            if answer is not None:
                self._tell(answer)
        self._store.close()

    def _next(self) -> Order | None:
        """Wait for the next order; None: a block may be saved, or else the thread ends."""
        with self._wake:
            while not (self._urgent or self._later):
                if self._is_closing or self._store.has_unsaved:
                    return None
                self._wake.wait()
            return self._urgent.popleft() if self._urgent else self._later.popleft()
