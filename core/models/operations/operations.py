"""Operations: the interface of the operations that a model is built from, and the choice of implementation."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from core.models.config import Activation, LatentParts, ModelConfig
from core.models.operations.cpu_operations import CpuOperations, TakePacked
from core.models.operations.latent_weights import LatentWeights
from core.models.operations.second_forms import SecondForms
from core.models.operations.stored_matrix import StoredMatrix
from core.models.operations.tensor import Operation, Tensor
from core.models.operations.token_adapters import TokenAdapters
from core.models.operations.weight_form import WeightForm
from ipc.options.model_options import Numerics
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.sampling import CpuSampler
from kernels.elements import Dtype
from kernels.low_rank import LowRank, ProductShape
from kernels.memory.kv_cache import KVCache
from kernels.recurrence import RecurrenceParts, RecurrenceSizes, StateRows
from kernels.routing import ExpertColumns, Routing
from kernels.value_form import ValueForm

#: A step's attention work for the layers with one window. Its type depends on the operations that made it.
AttentionWork = Any


class Norm(Protocol):
    """Normalisation of the last dimension, rounded once: RMS norm or layer normalisation."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [T, d] normalised, as [T, d]."""

    def after(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Add x [T, d] times the residual multiplier to hidden [T, d] float32 in place, and return hidden normalised.

        A norm that precedes returns hidden as it was before the addition, normalised.
        """


class Product(Protocol):
    """A matrix product with fixed weights: y = x @ weight.T + bias."""

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the results' bits; part of the fingerprint."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [T, out] of x [T, in]."""


@runtime_checkable
class ExchangingProduct(Protocol):
    """The further method of a product that exchanges its input and its result with other ranks."""

    def around(self, change: Callable[[Product], Product]) -> Product:
        """Return the same with another product between the exchanges."""


@runtime_checkable
class ExchangingEmbedding(Protocol):
    """The further method of an embedding that exchanges its rows with other ranks."""

    def around(self, change: Callable[[Operation], Operation]) -> Operation:
        """Return the same with another embedding before the exchange."""


@runtime_checkable
class SharesNorm(Protocol):
    """The further method of a state space of some heads, whose norm is of the heads of all ranks."""

    def share_norm(self, gather: Callable[[Tensor], Tensor], sizes: RecurrenceSizes) -> None:
        """Give results [T, out_width] of all ranks from now on, before the first step.

        gather: returns the columns of all ranks [T, out_width] from this rank's. sizes: of all ranks.
        """


class Experts(Product, Protocol):
    """A routed MLP, whose router may read something else than the experts."""

    def __call__(self, x: Tensor, router_x: Tensor | None = None) -> Tensor:
        """Return the output [T, d] of x [T, d]. router_x [T, d]: what the router reads; None = x."""


@runtime_checkable
class SharesExperts(Protocol):
    """The further method of a routed MLP with some of the columns of every expert, and of the shared one."""

    def share_columns(self, columns: ExpertColumns) -> None:
        """Give results of all ranks from now on, before the first step."""


class LatentAttention(Protocol):
    """Attention in which K and V of all heads are computed from one vector per token."""

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the bits of the products within; part of the fingerprint."""

    def __call__(self, x: Tensor, step: Any, index: int) -> Tensor:
        """Return the heads' values [T, H * value_dim] for the layer's first product [T, columns]. index: the layer's.

        The columns are the queries or their latent vector, then the latent vector, then the rotated numbers.
        """


class PerLayerInputs(Protocol):
    """The inputs that each layer of a model has for each token; kernels/cpu/c/layers/per_layer.h defines them."""

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""

    def project(self, embedded: Tensor) -> Tensor:
        """Return the projection [T, layers * width] of embeddings [T, hidden] float32."""

    def multiply(self, x: Tensor, ids: Tensor, projected: Tensor, layer: int) -> Tensor:
        """Return x [T, width] times the layer's inputs of the tokens ids [T]; x may be overwritten."""


class Operations(Protocol):
    """A model's operations on one kind of device."""

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the results' bits; part of the fingerprint."""

    @property
    def is_exact(self) -> bool:
        """Return whether a row's bits are independent of other rows (numerics level L2)."""

    @property
    def sampler(self) -> CpuSampler | None:
        """Return the kernel that draws tokens; None: core/sampling/sampler.py is used."""

    def wake(self) -> None:
        """Prepare for a step's first operation within tens of microseconds."""

    def embedding(
        self,
        table: StoredMatrix,
        scale: float,
        head: Operation | None,
        places: Floats | None = None,
        kinds: Floats | None = None,
    ) -> Callable[..., Tensor]:
        """Return the operation from ids [T] int64 to the table's rows times scale [T, d] float32.

        head: the product whose weights are the table, if there is one. kinds [k, d]: rows that are added by kind of
        token; ids of kind k are offset by k times the table's rows. places [positions, d]: rows that are then added by
        position; the operation takes the positions [T] int64 too.
        """

    def linear(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
    ) -> Product:
        """Return the product with weight [out, in] and bias [out] float32. out_dtype: None = the model's dtype."""

    def head(self, weight: StoredMatrix, bias: Floats | None = None) -> Product:
        """Return the product, like linear(), whose results are logits [T, out] float32."""

    def norm(
        self,
        weight: Floats | None,
        eps: float,
        dtype: Dtype,
        *,
        bias: Floats | None = None,
        is_centred: bool = False,
        precedes: bool = False,
        replaces: bool = False,
    ) -> Norm:
        """Return the norm with weight [d] float32. Its results are of dtype. weight None: it only rounds to dtype.

        is_centred: whether it is a layer normalisation, which may have a bias [d] float32. precedes: see Norm.after().
        replaces: the hidden states become its result, before that is rounded.
        """

    def activated(
        self,
        weight: StoredMatrix,
        function: Activation,
        bias: Floats | None = None,
        constants: Floats | None = None,
    ) -> tuple[Product, Operation]:
        """Return the product with weight [I, in] and bias [I], and the operation f(result [T, I]).

        constants: of a function that has any (kernels/cpu/c/layers/gate.h).
        """

    def gate_up(
        self, weight: StoredMatrix, function: Activation, bias: Floats | None = None
    ) -> tuple[Product, Operation]:
        """Return a product, and the operation that computes f(gate) * up [T, I] from its result.

        weight [2 * I, in], bias [2 * I]: the rows of gate, then those of up.
        """

    def router(self, weight: StoredMatrix, bias: Floats | None = None) -> Product:
        """Return the product of a routed MLP's router, to float32. Its weights keep the model's dtype in every form."""

    def experts(self, router: Any, experts: Sequence[Any], routing: Routing, shared: Any = None) -> Experts:
        """Return the routed MLP whose router gives float32, one number for each expert, and one for a shared gate.

        experts: for each one, gate_up and activation, from gate_up(), and down, from linear(). shared: the same for the
        shared expert, whose size may differ. Its weight is 1 or, with a shared gate, the sigmoid of the gate's number.
        None = there is none.
        """

    def attention(
        self, kind: int, norms: Floats | None, sinks: Floats | None = None, values: ValueForm = "own"
    ) -> Callable[[Tensor, Any, int], Tensor]:
        """Return the function (qkv [T, (H + 2 * Hkv) * D], step, index of the layer) -> [T, H * D].

        It normalises the heads of Q and K with norms [H + Hkv, D] float32 (None: not at all), each by itself or, with
        qk_norm_of_rows, Q's together and K's together; rotates them (with qk_norm_after, before that), stores K and V
        and attends. kind: see layer_kinds.py. sinks [H] float32: the heads' scores that have no value but take part in
        the softmax. values: what V is, and which columns of K and V there are (kernels/value_form.py); where V is
        normalised, norms has Hkv more rows.
        """

    def latent_attention(self, kind: int, latent: LatentParts, weights: LatentWeights) -> LatentAttention:
        """Return latent attention with these weights. kind: see layer_kinds.py."""

    def settle_length(self, length: int) -> None:
        """Set the rotary embeddings that depend on the longest context's length in tokens.

        Call this before any step.
        """

    def recurrence(self, parts: RecurrenceParts, place: int) -> Callable[[Tensor, Any, int], Tensor]:
        """Return the function (rows [T, sum(parts.sizes.parts)], step, place) -> [T, out_width].

        It updates the states of the step's requests. place: index of the layer's state in a request's states.
        """

    def open_gates(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """Return attention's output `mixed` [T, H * D] times the sigmoid of gates [T, H * D].

        `mixed` may be overwritten.
        """

    def step(
        self,
        positions: Tensor,
        slots: Tensor,
        work: tuple[AttentionWork, ...],
        cache: KVCache,
        requests: StateRows | None = None,
        turned: Tensor | None = None,
    ) -> Any:
        """Return the inputs for attention and recurrent states in a step.

        positions [T] and slots [T]: of the step's tokens. work: one per kind of layer. requests: where the states are;
        None = there are none. turned: see ModelInputs; only GivingOperations support any.
        """

    def add(self, hidden: Tensor, x: Tensor) -> None:
        """Add x [T, d], times the model's residual multiplier, to hidden [T, d] float32, in place."""

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(logits / cap) for logits [n, vocab] float32, which may be overwritten."""

    def pick(self, hidden: Tensor, rows: Ints) -> Tensor:
        """Return these rows [n] of hidden [T, d], as [n, d]. rows may be a tensor on the operations' device."""

    def to_host(self, numbers: Tensor) -> Floats:
        """Return float32 numbers as an array in host memory."""

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
        wholes: Ints | None = None,
    ) -> AttentionWork:
        """Return the attention work of a step for one window and size of heads, those of the cache.

        See kernels.torch.attention.attention_metadata.

        generation: number of the columns, see ModelInputs.generation. wholes: see Model.attention_metadata(); torch's
        operations support none.
        """

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache for one block, all layers together."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache. Errors: MemoryError."""


@runtime_checkable
class AdaptingOperations(Protocol):
    """Additional methods of operations that support adapters (LoRA)."""

    def pack_adapter(self, shapes: Sequence[ProductShape], products: Sequence[Sequence[LowRank | None]]) -> Any:
        """Return an adapter in the form for multiply_adapted(): what it adds to each product, part by part.

        The result has num_bytes. None = the part is not changed.
        """

    def multiply_adapted(self, product: Product, x: Tensor, adapters: TokenAdapters, number: int) -> Tensor:
        """Return the product [T, out] of x [T, in], plus what the tokens' adapters add. number: of the product."""


@runtime_checkable
class LayerwiseOperations(Protocol):
    """The further operations of those that run layers with inputs, or with a scale, of their own."""

    def per_layer_inputs(
        self, table: StoredMatrix | None, projection: StoredMatrix, norm: Floats, *, scale: float, eps: float
    ) -> PerLayerInputs:
        """Return the inputs of all layers: norm(projection) + table * scale.

        table [vocab, layers * width]; None = there is none; projection [layers * width, hidden]; norm [width] float32.
        """

    def scaled(self, hidden: Tensor, scale: float) -> None:
        """Multiply hidden [T, d] float32 by the scale, in place."""


@runtime_checkable
class GivingOperations(Protocol):
    """Additional methods of operations that run layers one by one and whose models read features."""

    def put(self, target: Tensor, places: Tensor, rows: Tensor) -> None:
        """Write rows [n, d] to these distinct places [n] int64 of target [T, d], in place. -1 = padding."""


def choose_operations(
    config: ModelConfig,
    dtype: Dtype,
    numerics: Numerics,
    library: CpuLibrary | None,
    form: WeightForm = WeightForm.STORED,
    cache_type: type[CpuKVCache] = CpuKVCache,
    *,
    shares_blocks: bool = True,
    take_packed: TakePacked | None = None,
    second_forms: SecondForms | None = None,
) -> Operations:
    """Return the C kernels' operations. Without a library, or at numerics level L0, return torch's, which dequantize.

    cache_type: of the C kernels' KV cache. shares_blocks, take_packed, second_forms: see CpuOperations.
    """
    if library is None or numerics == "L0":
        # Imported here: only this path needs torch.
        from core.models.operations.torch_operations import TorchOperations

        return TorchOperations(config, dtype)
    return CpuOperations(
        config,
        dtype,
        library,
        form,
        cache_type=cache_type,
        shares_blocks=shares_blocks,
        take_packed=take_packed,
        second_forms=second_forms,
    )
