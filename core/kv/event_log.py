"""KVEventLog: what the prefix cache has stored and removed since the last step, for routers that follow it.

Content numbers are valid as long as this engine lives. A router matches prompts against the tokens of stored blocks,
and identifies each block by its number and its parent's number (negative: a root, -1 without a cache salt).
"""

from itertools import groupby

import numpy as np

from ipc.tables.arrays import Ints, TokenIds
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored, KVEvent


class KVEventLog:
    """The events of one step. The log exists only while a client follows.

    It is drained once per step, so it holds at most what one step stores and evicts.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(self, contents: Ints, parents: Ints, token_ids: TokenIds) -> None:
        """Record that blocks were stored: contents [n], parents [n], token_ids [n, block_size]."""
        if len(contents):
            ids, before = contents.astype("<i8").tobytes(), parents.astype("<i8").tobytes()
            tokens = np.ascontiguousarray(token_ids, "<i4").tobytes()
            self._events.append(KVBlocksStored(ids, before, tokens, self._block_size))

    def removed(self, contents: Ints) -> None:
        """Record that the blocks of these contents [n] were removed."""
        if len(contents):
            self._events.append(KVBlocksRemoved(contents.astype("<i8").tobytes()))

    def cleared(self) -> None:
        """Record that the prefix cache was emptied."""
        self._events.append(KVBlocksCleared())

    def drain(self) -> list[KVEvent]:
        """Return the events since the last drain. Blocks stored one after the other form one event."""
        events: list[KVEvent] = []
        for kind, run in groupby(self._events, type):
            same = list(run)
            events += [_join(same)] if kind is KVBlocksStored else same
        self._events = []
        return events


def _join(run: list[KVEvent]) -> KVBlocksStored:
    stored = [event for event in run if isinstance(event, KVBlocksStored)]
    contents, parents = b"".join(one.contents for one in stored), b"".join(one.parents for one in stored)
    return KVBlocksStored(contents, parents, b"".join(one.token_ids for one in stored), stored[0].block_size)
