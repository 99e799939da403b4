"""HeadPlace: where a draft head computes: with arrays in host memory, or with tensors on a device."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from core.models.config import ModelConfig
from core.models.operations.operations import Operations
from core.models.operations.tensor import Operation, Tensor
from ipc.tables.arrays import AnyInts, Floats
from kernels.memory.kv_cache import KVCache


class HeadPlace(Protocol):
    """What a head does with tensors beyond its layer's operations. All but those of to_host() are there."""

    def unscaled(self, embedding: Operation) -> Operation:
        """Return the embedding without the model's factor."""

    def sent(self, numbers: AnyInts) -> Tensor:
        """Return the int64 numbers of an array in host memory."""

    def zeros(self, *shape: int) -> Tensor:
        """Return float32 zeros."""

    def joined(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Return the parts [T, columns] one after the other, contiguous."""

    def rounded(self, numbers: Tensor) -> Tensor:
        """Return numbers of the model's dtype."""

    def own_floats(self, numbers: Tensor) -> Tensor:
        """Return float32 numbers in memory of their own."""

    def allocate_swap_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a cache for blocks that are swapped out. Errors: MemoryError."""

    def to_host(self, numbers: Tensor) -> Floats:
        """Return float32 numbers in host memory."""


@runtime_checkable
class StoringMix(Protocol):
    """The further method of a layer's attention that can store K and V without attending."""

    def store(self, x: Tensor, step: Any, index: int) -> Tensor:
        """Store K and V of the step's tokens. x: the layer's first product. Return the queries."""


@runtime_checkable
class TappedOperations(Protocol):
    """The further method of operations of models whose hidden states a draft head can read."""

    def of_head(self, config: ModelConfig) -> tuple[Operations, HeadPlace]:
        """Return operations like these for a head whose layer is that of this config, and where it computes."""
