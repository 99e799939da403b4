"""KVFeed: the clients that follow the prefix cache, and the messages for them from each step."""

from collections.abc import Iterator

import numpy as np

from core.kv.block_names import BlockNames
from core.kv.event_log import KVEventLog
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksStored, KVEvent
from ipc.wire.scheduling_messages import KVEvents

#: The most blocks in one message of a snapshot.
MAX_SNAPSHOT_BLOCKS = 4096


class KVFeed:
    """The followers of the prefix cache. Events are collected only while a client follows.

    A new follower receives everything that is cached at the end of that step, as if it had just been stored into an
    empty cache. After that, it receives every change.
    """

    def __init__(self, names: BlockNames, epoch: int) -> None:
        self._names = names
        self._epoch = epoch
        self._sequences: dict[int, int] = {}  # by client: sequence number of its next message
        self._beginners: dict[int, None] = {}  # clients that will receive a snapshot; a dict keeps their order

    def follow(self, client: int) -> None:
        """Start to send events to the client, or start again with a new snapshot."""
        self._sequences.setdefault(client, 0)
        self._beginners[client] = None
        if self._names.events is None:
            self._names.events = KVEventLog(self._names.block_size)

    def renew(self, client: int) -> None:
        """Send a new snapshot to a client that has missed messages, if it still follows."""
        if client in self._sequences:
            self.follow(client)

    def unfollow(self, client: int) -> None:
        """Stop sending events to this client. A client that does not follow is ignored."""
        if self._sequences.pop(client, None) is not None:
            self._beginners.pop(client, None)
            if not self._sequences:
                self._names.events = None

    def drain(self, step: int) -> list[tuple[int, KVEvents]]:
        """Return the messages at the end of a step, as (follower, message) pairs."""
        if self._names.events is None:
            return []
        events, messages = self._names.events.drain(), list[tuple[int, KVEvents]]()
        for client in self._sequences:
            if client in self._beginners:
                messages += [(client, self._message(client, step, part)) for part in self._snapshot()]
            elif events:
                messages.append((client, self._message(client, step, events)))
        self._beginners.clear()
        return messages

    def _message(self, client: int, step: int, events: list[KVEvent]) -> KVEvents:
        sequence = self._sequences[client]
        self._sequences[client] = sequence + 1
        return KVEvents(self._epoch, step, sequence, events)

    def _snapshot(self) -> Iterator[list[KVEvent]]:
        """Yield everything that is cached, parents before children. The first part starts with an empty cache."""
        contents, parents, token_ids = self._names.columns()
        columns = (contents.astype("<i8"), parents.astype("<i8"), np.ascontiguousarray(token_ids, "<i4"))
        first: list[KVEvent] = [KVBlocksCleared()]
        for start in range(0, max(1, len(contents)), MAX_SNAPSHOT_BLOCKS):
            ids, before, tokens = (column[start : start + MAX_SNAPSHOT_BLOCKS].tobytes() for column in columns)
            stored = KVBlocksStored(ids, before, tokens, self._names.block_size)
            yield [*first, stored] if stored.contents else first
            first = []
