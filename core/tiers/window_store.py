"""WindowStore: a BlockStore of blocks of both kinds, where layers with a window have blocks of their own.

A block of layers with a window has a name of its own, made from that of the block beside it, and the bytes of all
blocks of its page. So a folder or a peer has it, or not, as it has any block.
"""

from collections.abc import Sequence
from typing import NamedTuple

from core.execution.shared_blocks import SharedBlocks
from core.kv.orders import Fetch, Leave, Look, Store, Windows
from core.kv.page_names import PageNames
from core.tiers.block_folder import BlockFolder
from core.tiers.block_store import BlocksServed, BlockStore, Left
from core.tiers.memory_shelf import MemoryShelf
from core.tiers.peers import Peers
from core.tiers.portable_names import PortableNames
from ipc.tables.arrays import Ints

#: Most prefixes for whose blocks of windows peers are asked at one look; each question takes a way there and back.
_MOST_QUESTIONS = 4


class WindowContents:
    """Of each block of the KV cache that is the first of a page of layers with a window: the content beside it."""

    def __init__(self, names: PageNames) -> None:
        self._names = names

    def __len__(self) -> int:
        return len(self._names.content)

    def __getitem__(self, block: int, /) -> int:
        # A page beside another block since then has been counted as evicted.
        return int(self._names.content[self._names.owner[block // self._names.page_blocks]])


class WindowsServed(NamedTuple):
    """Which blocks of windows are where in memory, for peers."""

    cache: MemoryShelf
    host: MemoryShelf


class WindowStore(BlockStore):
    """The blocks of a folder and of peers. pages: the scheduler's names, which change meanwhile."""

    def __init__(
        self,
        folder: BlockFolder | None,
        names: PortableNames,
        blocks: SharedBlocks,
        pages: PageNames,
        evictions: Ints,
        peers: Peers | None = None,
        served: BlocksServed | None = None,
        windows_served: WindowsServed | None = None,
    ) -> None:
        super().__init__(folder, names, blocks, pages.content, evictions, peers, served)
        self._page_blocks, self._beside = pages.page_blocks, WindowContents(pages)
        self._windows_served = windows_served

    # --- what requests find ------------------------------------------------------------------------------------------

    def _look(self, order: Look) -> int:
        windows = order.windows
        assert windows is not None, "a look without its windows"
        most = len(order.token_ids) // len(windows.is_here) * windows.most
        order = order._replace(token_ids=order.token_ids[:most])
        names = list(self._names.chain(order.root, order.token_ids))
        count, has = min(windows.most, order.first + super()._look(order)), dict[int, bool]()
        for number in range(len(names)):
            if count <= windows.least:
                break
            asked = self._peers if number < _MOST_QUESTIONS else None
            missing, found = self._missing(names, windows, count, has, asked), 0
            if missing and asked is not None:
                found = asked.find(-order.ticket, [self._names.beside(names[place]) for place in missing])
            if found == len(missing):
                return count - windows.least
            count = missing[found]
        return 0

    def _missing(
        self, names: list[bytes], windows: Windows, count: int, has: dict[int, bool], peers: Peers | None
    ) -> list[int]:
        """Return which places of the window behind `count` blocks neither the engine nor the folder has, last first.

        peers: None = the first of them is enough. has: what is known of the folder.
        """
        missing: list[int] = []
        for place in range(count - 1, windows.room.num_passed(count * windows.room.block_size) - 1, -1):
            if windows.is_here[place]:
                continue
            if place not in has:
                has[place] = self._count_in_folder([self._names.beside(names[place])]) == 1
            if not has[place]:
                missing.append(place)
                if peers is None:
                    break
        return missing

    def _fetch(self, order: Fetch) -> int:
        names = list(self._names.chain(order.root, order.token_ids))
        begin, end = order.first, order.first + len(order.slots)
        count = self._read(order.ticket, names[begin:end], [self._host.views(slot) for slot in order.slots.tolist()])
        if count < len(order.slots):
            return count
        beside = [self._names.beside(names[place]) for place in order.places.tolist()]
        slots = order.window_slots.reshape(-1, self._page_blocks).tolist()
        return count + self._read_beside(-order.ticket, beside, [self._host.views(*one) for one in slots])

    def _read_beside(self, ticket: int, names: list[bytes], places: list[list[memoryview]]) -> int:
        """Read blocks of windows, each from the folder or from the peer; return how many of the first have come."""
        folder = self._folder
        has_come = [folder is not None and folder.read(*one) for one in zip(names, places, strict=True)]
        rest = [index for index, come in enumerate(has_come) if not come]
        if rest and self._peers is not None:
            count = self._peers.read(ticket, [names[index] for index in rest], [places[index] for index in rest])
            rest = rest[count:]
        return rest[0] if rest else len(names)

    # --- what they leave ---------------------------------------------------------------------------------------------

    def _note_beside(self, order: Leave, index: int, name: bytes, now: float) -> None:
        block, evictions = int(order.beside[index]), int(order.evictions_beside[index])
        if block:
            left = Left(self._names.beside(name), block, int(order.contents[index]), evictions, is_beside=True)
            self._note(left, now)

    def _serve_left(self, served: BlocksServed, left: Left) -> None:
        if left.is_beside and self._windows_served is not None:
            what = left.name, left.block, left.content, left.evictions
            self._windows_served.cache.put(*what, self._inside(left.block)[1:])
        else:
            super()._serve_left(served, left)

    def _views(self, left: Left) -> list[memoryview]:
        return self._cache.views(*self._inside(left.block)) if left.is_beside else super()._views(left)

    def _is_there(self, left: Left) -> bool:
        if not left.is_beside:
            return super()._is_there(left)
        return self._beside[left.block] == left.content and bool(self._evictions[left.block] == left.evictions)

    def _inside(self, block: int) -> Sequence[int]:
        """Return the blocks of the page of this block of layers with a window."""
        return range(block, block + self._page_blocks)

    def _store(self, order: Store) -> int:
        if not order.is_beside:
            return super()._store(order)
        stored, slots = 0, order.slots.reshape(-1, self._page_blocks).tolist()
        for own, content in zip(slots, order.contents.tolist(), strict=True):
            name = self._name_of.get(content)
            if name is None:
                continue
            name = self._names.beside(name)
            stored += self._write(name, self._host.views(*own)) or 0
            if self._windows_served is not None:
                self._windows_served.host.put(name, own[0], content, more=own[1:])
        return stored
