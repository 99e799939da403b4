"""BlockStore: carries out the scheduler's orders (core/kv/orders.py) on a folder of blocks.

No error reaches a request: what cannot be read is a miss, and what cannot be written is left out; after an error of the
disk nothing is written for a while.
"""

import time
from collections import OrderedDict

from core import log
from core.execution.host_blocks import HostBlocks
from core.inputs import BlocksArrived, BlocksFound, BlocksStored, StoreNews
from core.kv.block_names import UNNAMED
from core.kv.orders import Fetch, Look, Note, Order, Store
from core.tiers.block_folder import BlockFolder
from core.tiers.portable_names import PortableNames

_PAUSE_S = 30.0  # without writing, after an error of the disk
#: Contents whose names are remembered, for each block that the caches hold: contents live as long as their blocks.
_NAMES_PER_BLOCK = 4


class BlockStore:
    """The blocks of a folder, for one thread at a time.

    num_blocks: of KV cache and host pool together.
    """

    def __init__(self, folder: BlockFolder, names: PortableNames, host: HostBlocks, num_blocks: int) -> None:
        self._folder, self._names, self._host = folder, names, host
        self._most_names = _NAMES_PER_BLOCK * num_blocks
        self._name_of: OrderedDict[int, bytes] = OrderedDict()  # by content, most recently noted last
        self._paused_until = 0.0  # monotonic seconds

    def open(self) -> None:
        """Bring the folder within its bound: it may be that of a larger one."""
        try:
            self._folder.make_room()
        except OSError as error:
            self._pause(error)

    def close(self) -> None:
        """Close the folder."""
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
            case Note():
                self._note(order)
                return None

    def _look(self, order: Look) -> int:
        count = 0
        for index, name in enumerate(self._names.chain(order.root, order.token_ids)):
            if index >= order.first:
                if not self._folder.has(name):
                    break
                count += 1
        return count

    def _fetch(self, order: Fetch) -> int:
        names = list(self._names.chain(order.root, order.token_ids))[order.first :]
        for count, (name, slot) in enumerate(zip(names, order.slots.tolist(), strict=True)):
            if not self._folder.read(name, self._host.views(slot)):
                return count
        return len(names)

    def _note(self, order: Note) -> None:
        """Work out the names of contents that are not known yet."""
        name, known, size = self._names.root(order.root), self._name_of, len(order.token_ids) // len(order.contents)
        for index, content in enumerate(order.contents.tolist()):
            found = known.get(content) if content != UNNAMED else None
            if found is None:
                found = self._names.after(name, order.token_ids[index * size : (index + 1) * size])
            if content != UNNAMED:
                known[content] = found
                known.move_to_end(content)
            name = found
        while len(known) > self._most_names:
            known.popitem(last=False)

    def _store(self, order: Store) -> int:
        """Return how many of the blocks have been written."""
        stored = 0
        for slot, content in zip(order.slots.tolist(), order.contents.tolist(), strict=True):
            name = self._name_of.get(content)
            if name is None or time.monotonic() < self._paused_until:
                continue
            try:
                stored += self._folder.write(name, self._host.views(slot))
            except OSError as error:
                self._pause(error)
        return stored

    def _pause(self, error: OSError) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S
        log.say(f"engine-core: kv_dir: {error.strerror or error}; no blocks are written for {_PAUSE_S:.0f} s")
