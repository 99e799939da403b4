"""BlockStore: carries out the scheduler's orders (core/kv/orders.py) on KV connectors: a folder, peers, a plug-in's.

A block is looked up in each connector in this order. It is written to those that store blocks. No request ever gets an
error: what cannot be read is a miss, and what cannot be written is left out. After a disk error nothing is written for
a while.

Layers with a window may have their own blocks (core/models/layers/cache_pages.py). The name of such a block is derived
from that of the named block with the same tokens, and it has the bytes of all blocks of its page. The recurrent state
after a named block is such a block too. So a connector handles them like any other block.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from core.batch.kept_states import KeptStates
from core.execution.shared_blocks import ReadableBlocks, SharedBlocks, WritableBlocks
from core.inputs import BlocksArrived, BlocksFound, BlocksStored, StoreNews
from core.kv.block_names import UNNAMED, BlockNames
from core.kv.orders import Fetch, Leave, Look, Order, Retain, Store, Windows
from core.tiers.block_file import BlockToLoad, BlockToStore
from core.tiers.connector import Tier
from core.tiers.memory_shelf import Contents, MemoryShelf
from core.tiers.peer_server import PeerServer
from core.tiers.portable_names import PortableNames
from ipc.tables.arrays import Ints

#: A block that requests use in memory is marked as used on disk at most this often. If its file is gone, it is written
#: again.
_RENEW_S = 60.0
#: Contents whose names are remembered, per block in the caches: contents live as long as their blocks.
_NAMES_PER_BLOCK = 4
#: The most blocks in the KV cache waiting to be written. The oldest are dropped.
MAX_UNSAVED = 1 << 16


#: The most prefixes for which far connectors are asked for window blocks in one lookup: each takes a round trip. States
#: are farther apart.
_MOST_QUESTIONS = 4
_MOST_QUESTIONS_OF_STATES = 64


class Left(NamedTuple):
    """A block in the KV cache that is to be written."""

    name: bytes
    block: int
    content: int
    evictions: int
    is_beside: bool = False  # it is the window block or the state that goes with the content

    @property
    def key(self) -> int:
        """Return the content, or its negative for a block beside: contents with names are positive."""
        return -self.content if self.is_beside else self.content


class BesideBlocks(Protocol):
    """What goes with named blocks: window blocks, or states. Its items are the contents that they go with.

    page_blocks: how many blocks of memory one has. evictions: its own counts; None: those of the KV cache's blocks.
    """

    page_blocks: int
    most_questions: int
    evictions: Ints | None

    def __len__(self) -> int: ...

    def __getitem__(self, block: int, /) -> int: ...

    def memory(self, blocks: SharedBlocks) -> tuple[ReadableBlocks, WritableBlocks]:
        """Return where it is: in the cache, and where it is read to."""


class StateContents:
    """For each slot of a recurrent state: the content that it goes with."""

    page_blocks = 1
    most_questions = _MOST_QUESTIONS_OF_STATES

    def __init__(self, kept: KeptStates) -> None:
        self._content = kept.content
        self.evictions: Ints | None = kept.times_given

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, slot: int, /) -> int:
        return int(self._content[slot])

    def memory(self, blocks: SharedBlocks) -> tuple[ReadableBlocks, WritableBlocks]:
        """Return the memory of states."""
        assert blocks.states is not None, "the executor shares no states"
        return blocks.states, blocks.states


class BesideContents:
    """For each block of the KV cache that is a page of window layers: the content that it goes with."""

    most_questions = _MOST_QUESTIONS
    evictions: Ints | None = None

    def __init__(self, names: BlockNames) -> None:
        self._names, (self._beside,) = names, names.beside
        self.page_blocks = self._beside.page_blocks

    def __len__(self) -> int:
        return len(self._names.content)

    def __getitem__(self, block: int, /) -> int:
        # A page that has since been given to another block was counted as evicted.
        return int(self._names.content[self._beside.owner[block // self.page_blocks]])

    def memory(self, blocks: SharedBlocks) -> tuple[ReadableBlocks, WritableBlocks]:
        """Return the memory of all blocks."""
        return blocks.cache, blocks.host


#: Whether the first slot of a block on the host, numbered as in plans, still has this content; see Store.
OnHost: TypeAlias = Callable[[int, int, bool], bool]


class Shelves(NamedTuple):
    """Where blocks are in memory."""

    cache: MemoryShelf
    host: MemoryShelf


class BlocksServed(NamedTuple):
    """What peers can get of this engine's blocks: where they are in memory, and the server that sends them."""

    named: Shelves
    server: PeerServer
    beside: Shelves | None = None  # of window blocks, or of states

    def shelves(self, *, is_beside: bool) -> Shelves:
        """Return the shelves of window blocks or states, or of named blocks."""
        if not is_beside:
            return self.named
        assert self.beside is not None, "no layers have blocks beside others"
        return self.beside


class BlockStore:
    """The blocks of some connectors, used by one thread at a time.

    tiers: the connectors, in the order in which they are asked. served: None = no peers get blocks. contents, evictions
    [blocks of the KV cache]: the scheduler's columns, which change concurrently; see Leave. beside: for layers with a
    window, or recurrent ones; None = all layers share their blocks. on_host: False once the host pool has been emptied
    or lost, perhaps while one of its blocks is written; blocks are not stored then.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        names: PortableNames,
        blocks: SharedBlocks,
        contents: Contents,
        evictions: Ints,
        *,
        served: BlocksServed | None = None,
        beside: BesideBlocks | None = None,
        on_host: OnHost = lambda slot, content, is_beside: True,
    ) -> None:
        self._on_host = on_host
        self._beside = beside
        self._names, self._host, self._cache = names, blocks.host, blocks.cache
        self._settle_blocks = blocks.settle
        self._tiers, self._served = tiers, served
        self._near = [tier for tier in tiers if tier.loads and tier.is_near]
        self._far = [tier for tier in tiers if tier.loads and not tier.is_near]
        self._stores = any(tier.stores for tier in tiers)
        self.settle: Callable[[], None] = lambda: None  # waits until every Leave given so far has been carried out
        self._contents, self._evictions = contents, evictions
        #: Where window blocks and states are: in the cache, and where they are read to.
        self._of_beside = (self._cache, self._host) if beside is None else beside.memory(blocks)
        self._unsaved: deque[Left] = deque()
        self._num_saved = 0  # of these, since the last answer
        self._most_names = _NAMES_PER_BLOCK * (len(contents) + blocks.host.num_blocks)
        self._name_of: OrderedDict[int, bytes] = OrderedDict()  # by content, most recently recorded last
        #: By key: when a block that is written, or about to be, is due again, in monotonic seconds; see _RENEW_S.
        self._due_at: dict[int, float] = {}

    def open(self) -> None:
        """Open the connectors, and answer peers."""
        for tier in self._tiers:
            tier.open()
        if self._served is not None:
            self._served.server.start(lambda: self.settle())

    def close(self) -> None:
        """Close the connectors, and stop answering peers."""
        if self._served is not None:
            self._served.server.close()
        for tier in self._tiers:
            tier.connector.close()

    def carry_out(self, order: Order) -> StoreNews | None:
        """Carry out one order, and return the answer if it has one."""
        if not isinstance(order, Look):
            self._settle_blocks()
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
            case Retain():
                self._retain(order)
                return None

    @property
    def has_unsaved(self) -> bool:
        """Return whether blocks in the KV cache are waiting to be written."""
        return bool(self._unsaved)

    def save_one(self) -> StoreNews | None:
        """Write one of the blocks that requests have left in the KV cache. After the last one return an answer."""
        left = self._unsaved.popleft()
        due_at = self._due_at.pop(left.key, None)
        if self._is_there(left):
            memory = self._of_beside[0] if left.is_beside else self._cache
            count = self._write(left.name, memory.views(*self._inside(left)), lambda: self._is_there(left))
            self._num_saved += count or 0
            if count is not None and due_at is not None and self._is_there(left):
                self._due_at[left.key] = due_at
        if self._unsaved or not self._num_saved:
            return None
        saved, self._num_saved = self._num_saved, 0
        return BlocksStored(0, saved)

    def _inside(self, left: Left) -> Sequence[int]:
        """Return the numbers of all blocks of the KV cache that this block consists of."""
        width = 1 if self._beside is None or not left.is_beside else self._beside.page_blocks
        return range(left.block, left.block + width)

    def _is_there(self, left: Left) -> bool:
        contents, evictions = self._contents, self._evictions
        if self._beside is not None and left.is_beside:
            contents, evictions = self._beside, evictions if self._beside.evictions is None else self._beside.evictions
        return bool(contents[left.block] == left.content and evictions[left.block] == left.evictions)

    # --- what requests find ------------------------------------------------------------------------------------------

    def _look(self, order: Look) -> int:
        if order.windows is not None:
            return self._look_beside(order, order.windows)
        return self._count(order.ticket, list(self._names.chain(order.root, order.token_ids))[order.first :])

    def _count(self, ticket: int, names: list[bytes]) -> int:
        """Return how many of these blocks, from the first on, the connectors have."""
        return self._count_in(self._far, ticket, names, self._count_in(self._near, ticket, names))

    def _count_in(self, tiers: Sequence[Tier], ticket: int, names: list[bytes], count: int = 0) -> int:
        """Return how many of these blocks, of which `count` are there, these connectors add to them, one by one."""
        for tier in tiers:
            if count < len(names):
                count += tier.connector.find(ticket, names[count:])
        return count

    def _look_beside(self, order: Look, windows: Windows) -> int:
        most_questions = 0 if self._beside is None else self._beside.most_questions
        most = len(order.token_ids) // len(windows.is_here) * windows.most
        names = list(self._names.chain(order.root, order.token_ids[:most]))
        count, has = min(windows.most, order.first + self._count(order.ticket, names[order.first :])), dict[int, bool]()
        for number in range(len(names)):
            if count <= windows.least:
                break
            asked = self._far if number < most_questions else []
            missing, found = self._missing(names, windows, count, has, finds_all=bool(asked)), 0
            if missing:
                found = self._count_in(asked, -order.ticket, [self._names.beside(names[place]) for place in missing])
            if found == len(missing):
                return count - windows.least
            count = missing[found]
        return 0

    def _missing(
        self, names: list[bytes], windows: Windows, count: int, has: dict[int, bool], *, finds_all: bool
    ) -> list[int]:
        """List the window positions after `count` blocks that neither the engine nor a near connector has, last first.

        finds_all: False = the first of them is enough. has: what is known of the near connectors.
        """
        missing: list[int] = []
        for place in range(count - 1, windows.kind.num_passed(count * windows.kind.block_size) - 1, -1):
            if windows.is_here[place]:
                continue
            if place not in has:
                has[place] = self._count_in(self._near, 0, [self._names.beside(names[place])]) == 1
            if not has[place]:
                missing.append(place)
                if not finds_all:
                    break
        return missing

    def _fetch(self, order: Fetch) -> int:
        names = list(self._names.chain(order.root, order.token_ids))
        begin, end = order.first, order.first + len(order.slots)
        count = self._read(order.ticket, names[begin:end], self._host, [(slot,) for slot in order.slots.tolist()])
        if count < len(order.slots) or self._beside is None:
            return count
        beside = [self._names.beside(names[place]) for place in order.places.tolist()]
        slots, memory = order.window_slots.reshape(-1, self._beside.page_blocks).tolist(), self._of_beside[1]
        return count + self._read(-order.ticket, beside, memory, slots)

    def _read(self, ticket: int, names: list[bytes], memory: WritableBlocks, places: Sequence[Sequence[int]]) -> int:
        """Read blocks into these places of a memory, each from any connector.

        Return how many were read, from the first on.
        """
        rooms = [memory.room(*place) for place in places]
        rest = blocks = [BlockToLoad(*one, self._names.key) for one in zip(names, rooms, strict=True)]
        for tier in (*self._near, *self._far):
            if rest:
                tier.connector.load(ticket, rest)
                rest = [block for block in rest if not block.is_loaded]
        for block in rest:
            block.close()
        num_read = next((count for count, block in enumerate(blocks) if not block.is_loaded), len(blocks))
        for parts, place in zip(rooms[:num_read], places, strict=False):
            memory.fill(parts, *place)
        return num_read

    # --- what they leave ---------------------------------------------------------------------------------------------

    def _leave(self, order: Leave) -> None:
        """Compute the names of contents that are not known yet, and record blocks for save_one()."""
        name, known, size = self._names.root(order.root), self._name_of, len(order.token_ids) // len(order.contents)
        now = time.monotonic()
        for index, (content, block, evictions) in enumerate(
            zip(order.contents.tolist(), order.blocks.tolist(), order.evictions.tolist(), strict=True)
        ):
            found = known.get(content) if content != UNNAMED else None
            if found is None:
                found = self._names.after(name, order.token_ids[index * size : (index + 1) * size])
            if content != UNNAMED:
                self._note(Left(found, block, content, evictions), now)
                if len(order.beside) and (block := int(order.beside[index])):
                    given = int(order.evictions_beside[index])
                    self._note(Left(self._names.beside(found), block, content, given, is_beside=True), now)
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
        """Record a block that a request has left, for peers and, if due, for writing."""
        if self._stores and self._due_at.get(left.key, now) <= now:
            self._due_at[left.key] = now + _RENEW_S
            self._unsaved.append(left)
        if self._served is not None:
            shelf, more = self._served.shelves(is_beside=left.is_beside).cache, self._inside(left)[1:]
            shelf.put(left.name, left.block, left.content, left.evictions, more)

    def _store(self, order: Store) -> int:
        """Return how many of the blocks were written."""
        stored, width = 0, self._beside.page_blocks if self._beside is not None and order.is_beside else 1
        for slots, content in zip(order.slots.reshape(-1, width).tolist(), order.contents.tolist(), strict=True):
            name = self._name_of.get(content)
            if name is None:
                continue
            if order.is_beside:
                name = self._names.beside(name)
            is_there = partial(self._on_host, slots[0], content, order.is_beside)
            if not is_there():
                continue
            stored += self._write(name, self._host.views(*slots), is_there) or 0
            if self._served is not None:
                self._served.shelves(is_beside=order.is_beside).host.put(name, slots[0], content, more=slots[1:])
        return stored

    def _retain(self, order: Retain) -> None:
        """Tell the connectors how long to keep blocks. What is not known by name is in no store."""
        found = [self._name_of.get(content) for content in order.contents.tolist()]
        beside = [self._name_of.get(content) for content in order.beside.tolist()]
        names = [name for name in found if name is not None]
        names += [self._names.beside(name) for name in beside if name is not None]
        for tier in self._tiers:
            tier.retain(names, order.ttl_ms)

    def pause(self, error: OSError) -> None:
        """Stop writing for a while, after a disk error."""
        for tier in self._tiers:
            if tier.stores:
                tier.pause(error)

    def _write(
        self, name: bytes, parts: Sequence[memoryview], is_unchanged: Callable[[], bool] = lambda: True
    ) -> bool | None:
        """Give a block to the connectors. Return whether it was new to one; None: none accepts it at present."""
        block = BlockToStore(name, parts, self._names.key, is_unchanged)
        answers = [tier.store(block) for tier in self._tiers]
        return None if all(answer is None for answer in answers) else any(answers)
