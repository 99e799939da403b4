"""Operations: what a model is put together from, beside its products; torch's or the C kernels', chosen once."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from core.models.config import Activation, ModelConfig
from core.models.cpu_operations import CpuOperations
from core.models.stored_matrix import StoredMatrix
from core.models.torch_operations import TorchOperations
from ipc.arrays import AnyInts
from ipc.config import Numerics
from kernels.cpu.library import CpuLibrary
from kernels.cpu.sampling import CpuSampler
from kernels.memory.kv_cache import KVCache
from kernels.torch.linear import Operation

#: A step's attention work for the layers of one window; only the operations that made it know what is in it.
AttentionWork = Any


class Norm(Protocol):
    """Root mean square normalisation of the last dimension; rounds once."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, d] -> [T, d]."""

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """hidden [T, d] float32 += x [T, d]; then hidden normalised."""


class Product(Protocol):
    """y = x @ weight.T + bias."""

    @property
    def variant(self) -> str:
        """Names what fixes the results' bits; part of the fingerprint."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""


class Operations(Protocol):
    @property
    def variant(self) -> str:
        """Names what fixes the results' bits; part of the fingerprint."""

    @property
    def is_exact(self) -> bool:
        """A row's bits do not depend on other rows (numerics level L2)."""

    @property
    def sampler(self) -> CpuSampler | None:
        """The kernel that draws tokens; None: torch's operations (core/sampling/sampler.py)."""

    def wake(self) -> None:
        """The first operation of a step comes within tens of microseconds."""

    def embedding(self, table: torch.Tensor, scale: float, head: Operation | None) -> Operation:
        """Of ids [T] int64 -> table's rows times scale [T, d] float32. head: the product whose weights the table is."""

    def linear(
        self,
        weight: StoredMatrix,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> Product:
        """weight [out, in], bias [out] float32; out_dtype: None = the model's."""

    def norm(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> Norm:
        """weight [d] float32; results are of dtype."""

    def gate_up(self, weight: StoredMatrix, function: Activation) -> tuple[Product, Operation]:
        """weight [2 * I, in]: gate above up -> a product, and what makes f(gate) * up [T, I] of its result."""

    def attention(
        self, kind: int, head_norms: torch.Tensor | None, eps: float, scale: float
    ) -> Callable[[torch.Tensor, Any, int], torch.Tensor]:
        """Of qkv [T, (H + 2 * Hkv) * D], a step and the layer's index -> [T, H * D]: heads normalised by these weights
        [H + Hkv, D] float32, rotated, K and V stored, attended. kind: see layer_kinds.py."""

    def step(
        self, positions: torch.Tensor, slots: torch.Tensor, work: tuple[AttentionWork, ...], cache: KVCache
    ) -> Any:
        """What attention needs of a step. positions: of all rows; slots [T]; work: for each kind."""

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
    ) -> AttentionWork:
        """See kernels.torch.attention.attention_metadata. generation: of the columns, as ModelInputs has it."""

    def bytes_per_block(self, block_size: int) -> int:
        """Of KV cache, all layers together."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Errors: MemoryError."""


def choose_operations(
    config: ModelConfig, dtype: torch.dtype, numerics: Numerics, library: CpuLibrary | None
) -> Operations:
    """Return the C kernels' operations, or torch's where there is no library or level L0 is asked for."""
    if library is None or numerics == "L0":
        return TorchOperations(config, dtype)
    return CpuOperations(config, dtype, library)
