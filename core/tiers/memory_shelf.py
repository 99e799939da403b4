"""MemoryShelf: which named KV blocks are in this engine's memory, for a thread that sends them to peers.

A block is unchanged if its content is the same and its place has not been given away since. Both are compared before
and after it is copied. So no block is held for a peer: a block overwritten during the copy is not sent.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from core.execution.shared_blocks import BlocksLostError, ReadableBlocks
from core.tiers.block_file import pack_block
from ipc.tables.arrays import Ints

#: Names remembered per block of memory: several may have been there, one after the other.
_NAMES_PER_BLOCK = 2


class _Place(NamedTuple):
    at: int  # index in the memory
    content: int
    times_given: int
    more: tuple[int, ...]


class Contents(Protocol):
    """A column of content numbers."""

    def __len__(self) -> int:
        """Return the number of places."""

    def __getitem__(self, place: int, /) -> Any:
        """Return the content at a place."""


class MemoryShelf:
    """The blocks in one memory. One thread calls put(), another has() and pack().

    contents, times_given: the scheduler's columns, which change concurrently: the content at each place, and how often
    the place has been given away. key: for the blocks' names. first: the place in memory where the columns start.
    """

    def __init__(
        self, memory: ReadableBlocks, contents: Contents, times_given: Ints, key: bytes, *, first: int = 0
    ) -> None:
        self._key = key
        self._memory, self._contents, self._times_given, self._first = memory, contents, times_given, first
        self._most = _NAMES_PER_BLOCK * len(contents)
        self._places: OrderedDict[bytes, _Place] = OrderedDict()

    def put(
        self, name: bytes, index: int, content: int, times_given: int | None = None, more: Sequence[int] = ()
    ) -> None:
        """Record where a block is.

        times_given: of its place when it arrived there; None: now, because it cannot be given away in the meantime.
        more: further places in the memory, which have its other parts as long as the first one has the content.
        """
        index -= self._first
        given = int(self._times_given[index]) if times_given is None else times_given
        self._places[name] = _Place(index, content, given, tuple(more))
        self._places.move_to_end(name)
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def has(self, name: bytes) -> bool:
        """Return whether a block is here now."""
        place = self._places.get(name)
        return place is not None and self._is_there(place)

    def pack(self, name: bytes) -> bytearray | None:
        """Return a copy of a block in its file format, or None if it is not here or was overwritten in the meantime."""
        place = self._places.get(name)
        if place is None or not self._is_there(place):
            return None
        try:
            parts = self._memory.views(self._first + place.at, *place.more)
        except BlocksLostError:
            return None
        data = pack_block(name, parts, self._key)
        return data if self._is_there(place) else None

    def _is_there(self, place: _Place) -> bool:
        content, given = self._contents[place.at], self._times_given[place.at]
        return bool(content == place.content and given == place.times_given)
