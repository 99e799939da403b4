"""KVEventLog: what the prefix cache has learned and forgotten since the last step, for routers that follow it.

Contents are numbers of this engine's life: a router matches prompts by the tokens of stored blocks and follows each
block from there by its number and its parent's (negative: a root, -1 without a cache salt).
"""

from itertools import groupby

import numpy as np

from ipc.arrays import Ints, TokenIds
from ipc.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored, KVEvent


class KVEventLog:
    """Kept only while a client listens; drained once a step, so it holds what one step can store and evict."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(self, contents: Ints, parents: Ints, token_ids: TokenIds) -> None:
        """contents, parents [n]; token_ids [n, block_size]."""
        if len(contents):
            ids, before = contents.astype("<i8").tobytes(), parents.astype("<i8").tobytes()
            tokens = np.ascontiguousarray(token_ids, "<i4").tobytes()
            self._events.append(KVBlocksStored(ids, before, tokens, self._block_size))

    def removed(self, contents: Ints) -> None:
        """Note that blocks with these contents [n] can no longer be found."""
        if len(contents):
            self._events.append(KVBlocksRemoved(contents.astype("<i8").tobytes()))

    def cleared(self) -> None:
        """Note that no block can be found any more."""
        self._events.append(KVBlocksCleared())

    def drain(self) -> list[KVEvent]:
        """Since the last time; blocks that were stored one after the other are one event."""
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
