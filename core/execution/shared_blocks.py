"""SharedBlocks: the memory of an executor's KV cache and host pool, for those who read and fill blocks beside it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

_Array: TypeAlias = NDArray[Any]


class BlockMemory(NamedTuple):
    """Blocks in memory of the engine's process: each array [blocks, ...] has the i-th part of block i, contiguous."""

    arrays: Sequence[_Array]

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block."""
        return sum(array[0].nbytes for array in self.arrays)

    def views(self, *blocks: int) -> list[memoryview]:
        """Return the parts of blocks, one block after the other, as bytes that may be written."""
        return [memoryview(array[block].reshape(-1).view(np.uint8)) for block in blocks for array in self.arrays]


class SharedBlocks(NamedTuple):
    """Blocks of the same form in the KV cache and in the host pool.

    layout: what the bytes of a block depend on besides its tokens and the model's fingerprint: how they are arranged.
    """

    cache: BlockMemory
    host: BlockMemory
    layout: str


@runtime_checkable
class SharesBlocks(Protocol):
    """What an Executor has besides, if its blocks can be read, and those of its host pool filled, beside its steps."""

    @property
    def shared_blocks(self) -> SharedBlocks | None:
        """Its blocks, from initialize_cache() on; None: it has no host pool."""


def shared_blocks_of(executor: Any) -> SharedBlocks | None:
    """Return the executor's blocks; None: it has no host pool, or does not share it."""
    return executor.shared_blocks if isinstance(executor, SharesBlocks) else None
