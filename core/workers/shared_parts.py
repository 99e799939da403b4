"""The engine's view of its workers' KV blocks, host pools and states: a block's parts are in several workers' files."""

import os
import time
from collections.abc import Callable, Sequence

from core.execution.shared_blocks import BlockMemory, SharedBlocks
from core.workers.messages import SharedPlaces
from core.workers.wires import Wires, above
from ipc.tables.arrays import Ints
from kernels.memory.shared_file import arrays_of, count_in, make_file

_POLL_S = 0.0002


class PartFiles:
    """The files of one crew's blocks, in the engine. wires: the workers', each of which gets its file."""

    def __init__(self, wires: Sequence[Wires]) -> None:
        self._fds: list[int] = []
        self._counts: list[Ints] = []  # plans that each worker has run
        for own in wires:
            own.blocks = above(fd := make_file())
            self._fds.append(fd)
            self._counts.append(count_in(fd))

    def wait(self, num_plans: int, is_lost: Callable[[], bool]) -> None:
        """Wait until each worker has run so many plans, or until they are lost."""
        while any(int(count[0]) < num_plans for count in self._counts) and not is_lost():
            time.sleep(_POLL_S)

    def join(self, places: Sequence[SharedPlaces]) -> SharedBlocks:
        """Return the blocks of all workers. A block's parts follow one another in the order of the workers."""

        def memory(name: str) -> BlockMemory:
            parts = zip(self._fds, places, strict=True)
            return BlockMemory([array for fd, each in parts for array in arrays_of(fd, getattr(each, name))])

        layout = f"{len(places)} parts: {'; '.join(each.layout for each in places)}"
        states = memory("states")
        return SharedBlocks(memory("cache"), memory("host"), layout, states if states.arrays else None)

    def close(self) -> None:
        """Close the files. What has been joined stays valid."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def replace_parts(blocks: SharedBlocks, by: SharedBlocks) -> None:
    """Let what reads `blocks` read those of other workers, which have the same layout, from now on."""
    assert blocks.layout == by.layout, f"the workers' blocks have changed: {blocks.layout}, now {by.layout}"
    for memory, other in zip((blocks.cache, blocks.host, blocks.states), (by.cache, by.host, by.states), strict=True):
        if isinstance(memory, BlockMemory) and isinstance(other, BlockMemory):
            assert isinstance(memory.arrays, list), type(memory.arrays)
            memory.arrays[:] = other.arrays
