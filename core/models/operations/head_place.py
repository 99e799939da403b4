"""HeadPlace: where a draft head computes: with arrays in host memory, or with tensors on a device."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from core.models.config import ModelConfig
from core.models.operations.operations import Operations
from core.models.operations.tensor import Operation, Tensor
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.memory.kv_cache import KVCache


class HeadPlace(Protocol):
    """A head's operations, and what else it does with tensors. All tensors but those of to_host() are there."""

    @property
    def operations(self) -> Operations:
        """Return the operations of the head's layer, whose kinds of layers are one."""

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

    def step(self, positions: Ints, slots: Ints, cache: KVCache, work: tuple[Any, ...] = ()) -> Any:
        """Return the inputs of attention for tokens [T]. work: of operations.attention_work()."""

    def store(self, mix: Callable[[Tensor, Any, int], Tensor], x: Tensor, step: Any) -> None:
        """Store K and V of the step's tokens. mix: a layer's attention. x: its first product."""

    def allocate_swap_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a cache for blocks that are swapped out. Errors: MemoryError."""

    def to_host(self, numbers: Tensor) -> Floats:
        """Return float32 numbers in host memory."""


@runtime_checkable
class TappedOperations(Protocol):
    """The further method of operations of models whose hidden states a draft head can read."""

    def head_place(self, config: ModelConfig) -> HeadPlace:
        """Return where a head computes whose layer is that of this config, with operations like these."""
