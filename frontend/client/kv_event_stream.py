"""KVEventStream: the content of an engine's prefix cache and its changes; for routers."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ipc.errors import EngineCoreError
from ipc.wire.kv_events import KVBlocksCleared
from ipc.wire.scheduling_messages import KVEvents

#: Most messages that wait to be read. Further ones are dropped, and the engine sends a new snapshot.
MAX_UNREAD = 4096


class Follower(Protocol):
    """The client that the stream belongs to."""

    @property
    def error(self) -> EngineCoreError | None:
        """Return the error that ended the session; None while it is open."""

    def raise_if_ended(self) -> None:
        """Raise the error that ended the session, if any."""

    def begin_kv_events(self, timeout: float | None = None) -> None:
        """Ask the engine for a snapshot and all changes after it; wait at most `timeout` seconds for the answer."""

    def end_kv_events(self, timeout: float | None = None) -> None:
        """Ask the engine to send no more events; wait at most `timeout` seconds for the answer."""


class KVEventStream:
    """An iterator over KVEvents messages.

    Apply their events in order to a copy of the cache that starts empty. KVBlocksCleared empties the copy. It begins
    each snapshot: the first one, and the one after a gap. A gap is in the engine's messages (`gap`, or a missing
    sequence number), or follows a cut connection or a slow reader.

    The stream ends (StopIteration, None from get()) with close(). It raises the client's error once the session has
    ended.
    """

    def __init__(self, client: Follower) -> None:
        self._client = client
        self._messages: deque[KVEvents] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._is_broken = False  # messages were dropped here: drop what arrives before the next snapshot
        self._listener: Callable[[], None] | None = None

    def get(self, timeout: float | None = None) -> KVEvents | None:
        """Return the next message. Wait at most `timeout` seconds (None = forever), then return None."""
        if self.is_broken:  # without the lock, because the thread that calls put() delivers the answer
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
        """Stop following. No error if the engine is gone; further calls do nothing."""
        with self._changed:
            if not self._is_open:
                return
            self._is_open = False
            self._messages.clear()
            self._changed.notify_all()
        with contextlib.suppress(EngineCoreError):
            self._client.end_kv_events()

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call the listener, from the transport's thread, when there is news."""
        self._listener = listener

    @property
    def is_broken(self) -> bool:
        """Return whether messages were dropped unread. get() then asks for a new snapshot and waits for it."""
        return self._is_broken and self._is_open and not self._messages

    @property
    def is_open(self) -> bool:
        """Return whether close() has not been called."""
        return self._is_open

    def put(self, message: KVEvents) -> None:
        """Add a message, from the transport's thread."""
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
        """Wake the readers: there is news, or the session has ended."""
        with self._changed:
            self._changed.notify_all()
        if self._listener is not None:
            self._listener()

    def _has_news(self) -> bool:
        return bool(self._messages) or not self._is_open or self._client.error is not None
