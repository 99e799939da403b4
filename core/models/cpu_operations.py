"""CpuOperations: a model's operations as C kernels. Each operation is one call for the whole batch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from core.models.config import Activation, EncoderActivation, ModelConfig
from core.models.layer_kinds import windows
from core.models.rotary import of_each_kind, rotary_embeddings
from core.models.stored_matrix import StoredMatrix
from core.models.tensor import Operation
from core.models.unchanged import unchanged
from core.models.weight_form import WeightForm
from ipc.arrays import AnyInts, Floats, Ints
from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import TILE, AttentionPlan, AttentionPlanner
from kernels.cpu.decoder import exceed_caches
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache, padded_dim
from kernels.cpu.library import ARITHMETIC, CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.cpu.quantized import BlockRows
from kernels.cpu.rope import CpuRope, RotaryTable
from kernels.cpu.sampling import CpuSampler
from kernels.dequantize import PLAIN_TYPES
from kernels.elements import BFLOAT16, Dtype, Numbers, to_floats
from kernels.memory.kv_cache import KVCache, bytes_per_block


class CpuStep(NamedTuple):
    """The inputs that attention needs in one step of T tokens."""

    positions: Ints  # [T]
    slots: Ints  # [T], -1 = do not store
    tables: tuple[RotaryTable, ...]  # one for each kind of layer
    work: tuple[AttentionPlan, ...]  # one for each kind of layer
    cache: CpuKVCache


@dataclass(frozen=True)
class CpuAttend:
    """One layer's attention: normalise and rotate heads, store K and V, attend. kind: see layer_kinds.py."""

    rope: CpuRope
    attention: CpuAttention
    kind: int
    scale: float

    def __call__(self, qkv: Numbers, step: CpuStep, index: int) -> Numbers:
        q = self.rope(qkv, step.tables[self.kind], step.positions, step.cache, index, step.slots)
        return self.attention(q, step.cache, index, step.work[self.kind], self.scale)


class CpuOperations:
    """Operations made of the C kernels, at numerics level L2; the methods are described at Operations."""

    is_exact = True

    def __init__(
        self, config: ModelConfig, dtype: Dtype, library: CpuLibrary, form: WeightForm = WeightForm.STORED
    ) -> None:
        self._config, self._dtype, self.library, self.form = config, dtype, library, form
        self._is_kept = not exceed_caches(config.num_matrix_weights * dtype.itemsize)
        self.tables = _rotary_tables(config)
        self._attention = CpuAttention(library)
        self._plan = AttentionPlanner(
            library, config.num_attention_heads, config.num_key_value_heads, is_causal=config.encoder is None
        )
        #: An encoder's prompt is computed in one step, so each layer may overwrite the K and V of the one before.
        self._num_caches = config.num_hidden_layers if config.encoder is None else 1
        self.sampler = CpuSampler(library)

    @property
    def variant(self) -> str:
        """Name of the kernels and constants that fix the results' bits; part of the fingerprint."""
        return f"c-{self.library.variant} arithmetic={ARITHMETIC} attention={TILE}"

    def wake(self) -> None:
        """Wake the kernels' threads."""
        self.library.wake_threads()

    def embedding(self, table: StoredMatrix, scale: float, head: Operation | None) -> CpuEmbedding:
        """Return the embedding; it reads the packed head where the table is the head's weights."""
        if isinstance(head, PackedMatrix):
            return CpuEmbedding(self.library, head, scale)  # the packed head replaces the table
        part = table.parts[0]
        is_stored = self._dtype == BFLOAT16 and self.form is not WeightForm.DENSE
        if is_stored and part.type_name not in PLAIN_TYPES and len(table.parts) == 1:
            return CpuEmbedding(self.library, BlockRows(part.type_name, part.data.copy()), scale)
        return CpuEmbedding(self.library, table.own(self._dtype), scale)

    def linear(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
        activation: EncoderActivation | None = None,
    ) -> PackedMatrix:
        """Pack the weight and return the product; with an activation, of its result."""
        return self._packed(weight, bias, out_dtype=out_dtype, activation=activation)

    def norm(self, weight: Floats, eps: float, dtype: Dtype) -> CpuNorm:
        """Return the norm with this weight [d] float32."""
        return CpuNorm(self.library, weight, eps, dtype)

    def gate_up(self, weight: StoredMatrix, function: Activation | EncoderActivation) -> tuple[PackedMatrix, Operation]:
        """Return a product that applies the activation itself, and `unchanged`."""
        return self._packed(weight, gate=function), unchanged

    def _packed(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
        gate: str | None = None,
        activation: str | None = None,
    ) -> PackedMatrix:
        """Pack the weight as it is stored if bfloat16 products can read it so, else as numbers of the model's dtype."""
        in_8_bits, stored = self.form is WeightForm.INT8, None
        if in_8_bits or (self._dtype == BFLOAT16 and self.form is WeightForm.STORED):
            stored = weight.quantized(self.library, is_gated=gate is not None, in_8_bits=in_8_bits)
        if stored is not None and stored.has_whole_panels and self._dtype != BFLOAT16:
            stored = None  # such panels are of bfloat16
        numbers = weight.dense(self._dtype) if stored is None else stored
        return PackedMatrix(
            self.library,
            numbers,
            bias,
            dtype=self._dtype,
            out_dtype=out_dtype,
            gate=gate,
            activation=activation,
            is_kept=self._is_kept,
        )

    def attention(self, kind: int, head_norms: Floats | None, eps: float, scale: float) -> CpuAttend:
        """Return the attention of one layer."""
        rope = CpuRope(self.library, self._config.num_attention_heads, head_norms, eps)
        return CpuAttend(rope, self._attention, kind, scale)

    def step(self, positions: Ints, slots: Ints, work: tuple[AttentionPlan, ...], cache: KVCache) -> CpuStep:
        """Return the step's inputs of attention, with rotary tables as long as the longest context."""
        assert isinstance(cache, CpuKVCache), type(cache)
        tables = tuple(table for table in self.tables if table is not None)
        for table in tables:
            table.reach(work[0].longest)
        return CpuStep(np.ascontiguousarray(positions), np.ascontiguousarray(slots), tables, work, cache)

    def add(self, hidden: Floats, x: Numbers) -> None:
        """Add x to hidden, in place."""
        hidden += to_floats(x)

    def pick(self, hidden: Floats, rows: Ints) -> Floats:
        """Return these rows of hidden."""
        return hidden[rows]

    def to_host(self, numbers: Floats) -> Floats:
        """Return the numbers unchanged."""
        return numbers

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
    ) -> AttentionPlan:
        """Return the plan that splits the step's attention among threads."""
        return self._plan(num_tokens, context_lens, block_tables, cache.block_size, window, generation)

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache of one block, all layers together; heads are padded."""
        config = self._config
        width = padded_dim(config.head_dim)
        return bytes_per_block(block_size, config.num_key_value_heads, width, self._num_caches, self._dtype)

    def allocate_cache(self, num_blocks: int, block_size: int) -> CpuKVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        config = self._config
        return CpuKVCache(
            self._num_caches, num_blocks, block_size, config.num_key_value_heads, config.head_dim, self._dtype
        )


def _rotary_tables(config: ModelConfig) -> tuple[RotaryTable | None, ...]:
    """Return the rotary table of each kind of layer; None for a model with a table of positions."""
    if config.encoder is not None and config.encoder.num_positions:
        return (None,) * len(windows(config))
    return of_each_kind(lambda rotary: RotaryTable(*rotary), rotary_embeddings(config))
