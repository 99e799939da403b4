"""BlockStore: carries out the scheduler's orders (core/kv/orders.py) on a folder of blocks and on peers.

A block is looked for in the folder first, then at the peers; it is written to the folder alone. No error reaches a
request: what cannot be read is a miss, and what cannot be written is left out; after an error of the disk nothing is
written for a while.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from core import log
from core.execution.shared_blocks import SharedBlocks
from core.inputs import BlocksArrived, BlocksFound, BlocksStored, StoreNews
from core.kv.block_names import UNNAMED
from core.kv.orders import Fetch, Leave, Look, Order, Store
from core.tiers.block_folder import BlockFolder
from core.tiers.memory_shelf import Contents, MemoryShelf
from core.tiers.peer_server import PeerServer
from core.tiers.peers import Peers
from core.tiers.portable_names import PortableNames
from ipc.tables.arrays import Ints

_PAUSE_S = 30.0  # without writing, after an error of the disk
#: A block that requests use in memory counts as used on the disk so often at most. If its file has gone it is written
#: again.
_RENEW_S = 60.0
#: Contents whose names are remembered, for each block that the caches hold: contents live as long as their blocks.
_NAMES_PER_BLOCK = 4
#: Most blocks in the KV cache that wait to be written; the oldest give way.
MAX_UNSAVED = 1 << 16


class Left(NamedTuple):
    """A block in the KV cache that is to be written."""

    name: bytes
    block: int
    content: int
    evictions: int
    is_beside: bool = False  # it is the block of layers with a window beside the one with the content

    @property
    def key(self) -> int:
        """The content, or minus it: contents that have names are positive."""
        return -self.content if self.is_beside else self.content


class BlocksServed(NamedTuple):
    """What peers get of this engine's blocks: which are where in memory, and who sends them."""

    cache: MemoryShelf
    host: MemoryShelf
    server: PeerServer


class BlockStore:
    """The blocks of a folder and of peers, for one thread at a time.

    folder, peers, served: None = there is none. contents, evictions [blocks of the KV cache]: the scheduler's columns,
    which change meanwhile; see Leave.
    """

    def __init__(
        self,
        folder: BlockFolder | None,
        names: PortableNames,
        blocks: SharedBlocks,
        contents: Contents,
        evictions: Ints,
        peers: Peers | None = None,
        served: BlocksServed | None = None,
    ) -> None:
        self._folder, self._names, self._host, self._cache = folder, names, blocks.host, blocks.cache
        self._peers, self._served = peers, served
        self.settle: Callable[[], None] = lambda: None  # waits until each Leave that was given has been carried out
        self._contents, self._evictions = contents, evictions
        self._unsaved: deque[Left] = deque()
        self._num_saved = 0  # of these, since the last answer
        self._most_names = _NAMES_PER_BLOCK * (len(contents) + len(blocks.host.arrays[0]))
        self._name_of: OrderedDict[int, bytes] = OrderedDict()  # by content, most recently noted last
        #: When a block that is written, or about to be, is due again, by its key, in monotonic seconds; see _RENEW_S.
        self._due_at: dict[int, float] = {}
        self._paused_until = 0.0  # monotonic seconds

    def open(self) -> None:
        """Bring the folder within its bound, as it may be that of a larger one; connect to peers, and answer them."""
        if self._peers is not None:
            self._peers.open()
        if self._served is not None:
            self._served.server.start(lambda: self.settle())
        if self._folder is not None:
            try:
                self._folder.make_room()
            except OSError as error:
                self.pause(error)

    def close(self) -> None:
        """End the connections, and close the folder."""
        if self._peers is not None:
            self._peers.close()
        if self._served is not None:
            self._served.server.close()
        if self._folder is not None:
            self._folder.close()

    def carry_out(self, order: Order) -> StoreNews | None:
        """Carry out one order and return the answer, if it has any."""
        match order:
            case Look():
                return BlocksFound(order.ticket, self._look(order))
            case Fetch():
                return BlocksArrived(order.ticket, self._fetch(order))
            case Store():
                return BlocksStored(order.ticket, self._store(order))
            case Leave():
                self._leave(order)
                return None

    @property
    def has_unsaved(self) -> bool:
        """Return whether blocks in the KV cache wait to be written."""
        return bool(self._unsaved)

    def save_one(self) -> StoreNews | None:
        """Write one of the blocks that requests have left in the KV cache; after the last of them return an answer."""
        left = self._unsaved.popleft()
        due_at = self._due_at.pop(left.key, None)
        if self._is_there(left):
            count = self._write(left.name, self._views(left), lambda: self._is_there(left))
            self._num_saved += count or 0
            if count is not None and due_at is not None and self._is_there(left):
                self._due_at[left.key] = due_at
        if self._unsaved or not self._num_saved:
            return None
        saved, self._num_saved = self._num_saved, 0
        return BlocksStored(0, saved)

    def _views(self, left: Left) -> list[memoryview]:
        return self._cache.views(left.block)

    def _is_there(self, left: Left) -> bool:
        contents, evictions = self._contents, self._evictions
        return bool(contents[left.block] == left.content and evictions[left.block] == left.evictions)

    def _look(self, order: Look) -> int:
        names = list(self._names.chain(order.root, order.token_ids))[order.first :]
        count = self._count_in_folder(names)
        if self._peers is None or count == len(names):
            return count
        return count + self._peers.find(order.ticket, names[count:])

    def _count_in_folder(self, names: list[bytes]) -> int:
        if self._folder is None:
            return 0
        return next((count for count, name in enumerate(names) if not self._folder.has(name)), len(names))

    def _fetch(self, order: Fetch) -> int:
        names = list(self._names.chain(order.root, order.token_ids))[order.first :]
        places = [self._host.views(slot) for slot in order.slots.tolist()]
        return self._read(order.ticket, names, places)

    def _read(self, ticket: int, names: list[bytes], places: list[list[memoryview]]) -> int:
        """Read blocks into these places; return how many have come, from the first on."""
        count = 0
        if self._folder is not None:
            while count < len(names) and self._folder.read(names[count], places[count]):
                count += 1
        if self._peers is None or count == len(names):
            return count
        return count + self._peers.read(ticket, names[count:], places[count:])

    def _leave(self, order: Leave) -> None:
        """Work out the names of contents that are not known yet, and note blocks for save_one()."""
        name, known, size = self._names.root(order.root), self._name_of, len(order.token_ids) // len(order.contents)
        now = time.monotonic()
        columns = order.contents.tolist(), order.blocks.tolist(), order.evictions.tolist()
        for index, (content, block, evictions) in enumerate(zip(*columns, strict=True)):
            found = known.get(content) if content != UNNAMED else None
            if found is None:
                found = self._names.after(name, order.token_ids[index * size : (index + 1) * size])
            if content != UNNAMED:
                self._note(Left(found, block, content, evictions), now)
                self._note_beside(order, index, found, now)
                known[content] = found
                known.move_to_end(content)
            name = found
        while len(known) > self._most_names:
            content, _ = known.popitem(last=False)
            self._due_at.pop(content, None)
            self._due_at.pop(-content, None)
        while len(self._unsaved) > MAX_UNSAVED:
            self._due_at.pop(self._unsaved.popleft().key, None)

    def _note(self, left: Left, now: float) -> None:
        """Note a block that a request has left, to write it where that is due, and for peers."""
        if self._folder is not None and self._due_at.get(left.key, now) <= now:
            self._due_at[left.key] = now + _RENEW_S
            self._unsaved.append(left)
        if self._served is not None:
            self._serve_left(self._served, left)

    def _serve_left(self, served: BlocksServed, left: Left) -> None:
        served.cache.put(left.name, left.block, left.content, left.evictions)

    def _note_beside(self, order: Leave, index: int, name: bytes, now: float) -> None:
        """Note what lies beside the index-th of the blocks, which has this name: here nothing does."""

    def _store(self, order: Store) -> int:
        """Return how many of the blocks have been written."""
        stored = 0
        for slot, content in zip(order.slots.tolist(), order.contents.tolist(), strict=True):
            name = self._name_of.get(content)
            if name is None:
                continue
            stored += self._write(name, self._host.views(slot)) or 0
            if self._served is not None:
                self._served.host.put(name, slot, content)
        return stored

    def pause(self, error: OSError) -> None:
        """Write nothing for a while, after an error of the disk."""
        self._paused_until = time.monotonic() + _PAUSE_S
        log.say(f"engine-core: kv_dir: {error.strerror or error}; no blocks are written for {_PAUSE_S:.0f} s")

    def _write(
        self, name: bytes, parts: Sequence[memoryview], is_still_so: Callable[[], bool] = lambda: True
    ) -> bool | None:
        """Write a block if the disk takes it; return whether it was not there yet. None: the disk does not take it."""
        if self._folder is None or time.monotonic() < self._paused_until:
            return None
        try:
            return self._folder.write(name, parts, is_still_so)
        except OSError as error:
            self.pause(error)
            return None
