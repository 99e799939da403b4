"""Operations: the interface of the operations that a model is built from, and the choice of an implementation."""

from collections.abc import Callable
from typing import Any, Protocol

from core.models.config import Activation, ModelConfig
from core.models.cpu_operations import CpuOperations
from core.models.stored_matrix import StoredMatrix
from core.models.tensor import Operation, Tensor
from core.models.weight_form import WeightForm
from ipc.arrays import AnyInts, Floats, Ints
from ipc.config import Numerics
from kernels.cpu.library import CpuLibrary
from kernels.cpu.sampling import CpuSampler
from kernels.elements import Dtype
from kernels.memory.kv_cache import KVCache

#: A step's attention work for the layers of one window. Its type depends on the operations that made it.
AttentionWork = Any


class Norm(Protocol):
    """Root mean square normalisation of the last dimension, rounded once."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, d] normalised [T, d]."""

    def after(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Add x [T, d] to hidden [T, d] float32 in place; return hidden normalised [T, d]."""


class Product(Protocol):
    """A matrix product with fixed weights: y = x @ weight.T + bias."""

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [T, out] of x [T, in]."""


class Operations(Protocol):
    """The operations of a model on one kind of device."""

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""

    @property
    def is_exact(self) -> bool:
        """Whether a row's bits are independent of other rows (numerics level L2)."""

    @property
    def sampler(self) -> CpuSampler | None:
        """The kernel that draws tokens; None: core/sampling/sampler.py."""

    def wake(self) -> None:
        """Prepare for a step's first operation within tens of microseconds."""

    def embedding(self, table: StoredMatrix, scale: float, head: Operation | None) -> Operation:
        """Return the operation from ids [T] int64 to the table's rows times scale [T, d] float32.

        head: the product whose weights are the table, if there is one.
        """

    def linear(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
    ) -> Product:
        """Return the product with weight [out, in] and bias [out] float32. out_dtype: None = the model's dtype."""

    def norm(self, weight: Floats, eps: float, dtype: Dtype) -> Norm:
        """Return the norm with weight [d] float32; results are of dtype."""

    def gate_up(self, weight: StoredMatrix, function: Activation) -> tuple[Product, Operation]:
        """Return a product, and the operation that makes f(gate) * up [T, I] of its result.

        weight [2 * I, in]: the rows of gate, then those of up.
        """

    def attention(
        self, kind: int, head_norms: Floats | None, eps: float, scale: float
    ) -> Callable[[Tensor, Any, int], Tensor]:
        """Return the function (qkv [T, (H + 2 * Hkv) * D], step, index of the layer) -> [T, H * D].

        It normalises the heads of Q and K with head_norms [H + Hkv, D] float32 (None: not at all), rotates them, stores
        K and V and attends. kind: see layer_kinds.py.
        """

    def step(self, positions: Tensor, slots: Tensor, work: tuple[AttentionWork, ...], cache: KVCache) -> Any:
        """Return the inputs that attention needs in a step.

        positions [T] and slots [T]: of the step's tokens. work: one for each kind of layer.
        """

    def add(self, hidden: Tensor, x: Tensor) -> None:
        """Add x [T, d] to hidden [T, d] float32, in place."""

    def pick(self, hidden: Tensor, rows: Ints) -> Tensor:
        """Return these rows [n] of hidden [T, d], as [n, d]; rows may be a tensor on the operations' device."""

    def to_host(self, numbers: Tensor) -> Floats:
        """Return float32 numbers as an array in the host's memory."""

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
    ) -> AttentionWork:
        """Return the attention work of a step for one window; see kernels.torch.attention.attention_metadata.

        generation: number of the columns, see ModelInputs.generation.
        """

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache of one block, all layers together."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache. Errors: MemoryError."""


def choose_operations(
    config: ModelConfig,
    dtype: Dtype,
    numerics: Numerics,
    library: CpuLibrary | None,
    form: WeightForm = WeightForm.STORED,
) -> Operations:
    """Return the C kernels' operations; torch's, which dequantize, if there is no library or numerics is L0."""
    if library is None or numerics == "L0":
        # Imported here: only this path needs torch.
        from core.models.torch_operations import TorchOperations

        return TorchOperations(config, dtype)
    return CpuOperations(config, dtype, library, form)
