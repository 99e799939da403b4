"""KVEventStream: what an engine's prefix cache holds, as it changes; for routers."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ipc.errors import EngineCoreError
from ipc.kv_events import KVBlocksCleared
from ipc.scheduling_messages import KVEvents

#: Messages that wait for whoever reads the stream; beyond it they are dropped, and told anew from the beginning.
MAX_UNREAD = 4096


class Follower(Protocol):
    """The client that the stream belongs to."""

    @property
    def error(self) -> EngineCoreError | None: ...

    def raise_if_ended(self) -> None: ...

    def begin_kv_events(self, timeout: float | None = None) -> None: ...

    def end_kv_events(self, timeout: float | None = None) -> None: ...


class KVEventStream:
    """An iterator over KVEvents messages. Apply their events in order to a picture that begins empty. KVBlocksCleared
    empties it: that is how a beginning is told, and how the stream goes on after a gap - one in the engine's messages
    (`gap`, or a sequence number that is missing), a connection that was cut, or a reader that was too slow.

    Ends (StopIteration, None of get()) with close(); raises the client's error once the session has ended.
    """

    def __init__(self, client: Follower) -> None:
        self._client = client
        self._messages: deque[KVEvents] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._is_broken = False  # some were dropped here: what arrives is worth nothing before the next beginning
        self._listener: Callable[[], None] | None = None

    def get(self, timeout: float | None = None) -> KVEvents | None:
        """The next message; waits at most `timeout` seconds (None = for ever), then None."""
        if self.is_broken:  # without the lock: the answer comes through put()'s thread
            self._client.begin_kv_events()
        with self._changed:
            self._changed.wait_for(self._has_news, timeout)
            if self._messages:
                return self._messages.popleft()
            if self._is_open:
                self._client.raise_if_ended()
            return None

    def __iter__(self) -> "KVEventStream":
        return self

    def __next__(self) -> KVEvents:
        message = self.get()
        if message is None:
            raise StopIteration
        return message

    def close(self) -> None:
        """Stop following. Never raises for an engine that is gone; does nothing the second time."""
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            self._messages.clear()
            self._changed.notify_all()
        with contextlib.suppress(EngineCoreError):
            self._client.end_kv_events()

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call it, from the transport's thread, when there is news."""
        self._listener = listener

    @property
    def is_broken(self) -> bool:
        """Nobody read in time: get() has the engine begin again, and waits for its answer."""
        return self._is_broken and self._is_open and not self._messages

    @property
    def is_open(self) -> bool:
        return self._is_open

    def put(self, message: KVEvents) -> None:
        """From the transport's thread."""
        with self._changed:
            if not self._is_open:
                return
            if message.events and isinstance(message.events[0], KVBlocksCleared) and not message.gap:
                self._is_broken = False
            if self._is_broken:
                return
            if len(self._messages) >= MAX_UNREAD:
                self._messages.clear()
                self._is_broken = True
            else:
                self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """There is news, or the session has ended."""
        with self._changed:
            self._changed.notify_all()
        if self._listener is not None:
            self._listener()

    def _has_news(self) -> bool:
        return bool(self._messages) or not self._is_open or self._client.error is not None
