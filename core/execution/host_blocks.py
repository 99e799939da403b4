"""HostBlocks: the memory of an executor's host pool, for those who fill and read its blocks between the steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

_Array: TypeAlias = NDArray[Any]


class HostBlocks(NamedTuple):
    """Blocks in memory of the engine's process.

    arrays: each [blocks, ...], C-contiguous; block i is the i-th part of all of them. layout: what the bytes of a block
    depend on besides its tokens and the model's fingerprint: the arrangement of its numbers.
    """

    arrays: Sequence[_Array]
    layout: str

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block."""
        return sum(array[0].nbytes for array in self.arrays)

    def views(self, block: int) -> list[memoryview]:
        """Return the parts of a block as bytes that may be written."""
        return [memoryview(array[block].reshape(-1).view(np.uint8)) for array in self.arrays]


@runtime_checkable
class SharesHostBlocks(Protocol):
    """What an Executor has besides, if its host pool can be read and written between two steps."""

    @property
    def host_blocks(self) -> HostBlocks | None:
        """The host pool, from initialize_cache() on; None: it has no blocks."""


def host_blocks_of(executor: Any) -> HostBlocks | None:
    """Return the executor's host pool; None: it has none, or does not share it."""
    return executor.host_blocks if isinstance(executor, SharesHostBlocks) else None
