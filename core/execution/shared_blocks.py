"""SharedBlocks: the memory of an executor's KV cache and host pool, for code that accesses blocks between steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

_Array: TypeAlias = NDArray[Any]


class BlocksLostError(Exception):
    """The process that has the blocks is gone: nothing has been read, or not all has been written."""


class ReadableBlocks(Protocol):
    """Blocks that can be read, wherever they are."""

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block."""

    def views(self, *blocks: int) -> list[memoryview]:
        """Return the parts of each block as bytes, block after block. Errors: BlocksLostError."""


class WritableBlocks(ReadableBlocks, Protocol):
    """Blocks that can also be written, wherever they are."""

    def room(self, *blocks: int) -> list[memoryview]:
        """Return writable memory for the parts of each block, block after block. fill() makes it their content."""

    def fill(self, parts: Sequence[memoryview], *blocks: int) -> None:
        """Give these blocks what was written to the parts that room() returned for them. Errors: BlocksLostError."""


class BlockMemory(NamedTuple):
    """Blocks in the engine process's memory. Each array [blocks, ...] has the i-th part of each block, contiguous."""

    arrays: Sequence[_Array]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.arrays[0])

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block."""
        return sum(array[0].nbytes for array in self.arrays)

    def views(self, *blocks: int) -> list[memoryview]:
        """Return the parts of each block as writable bytes, block after block."""
        return [memoryview(array[block].reshape(-1).view(np.uint8)) for block in blocks for array in self.arrays]

    def room(self, *blocks: int) -> list[memoryview]:
        """Return views(): what is written there is the blocks' content."""
        return self.views(*blocks)

    def fill(self, parts: Sequence[memoryview], *blocks: int) -> None:
        """Do nothing: the blocks have been written."""


class SharedBlocks(NamedTuple):
    """Blocks with the same layout in the KV cache and in the host pool.

    layout: describes how the bytes of a block are arranged, which its tokens and the model's fingerprint do not tell.
    states: the recurrent states, each at its number in plans; None: the model has none. settle: waits until a device
    has done what plans want of blocks; called by any thread for an order, before it accesses blocks. Errors of settle:
    BlocksLostError.
    """

    cache: ReadableBlocks
    host: WritableBlocks
    layout: str
    states: WritableBlocks | None = None
    settle: Callable[[], None] = lambda: None


@runtime_checkable
class SharesBlocks(Protocol):
    """Additional methods of an Executor whose blocks can be read, and host pool be filled, outside its steps."""

    @property
    def shared_blocks(self) -> SharedBlocks | None:
        """Return its blocks, valid after initialize_cache(); None: it has no host pool."""


def shared_blocks_of(executor: Any) -> SharedBlocks | None:
    """Return the executor's blocks; None: it has no host pool, or does not share it."""
    return executor.shared_blocks if isinstance(executor, SharesBlocks) else None
