"""TorchOperations: a model's operations from torch's, for machines without the C kernels and for numerics level L0."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from core.models.config import Activation, ModelConfig
from core.models.rotary import of_each_kind, rotary_embeddings
from ipc.arrays import AnyInts
from ipc.config import Numerics
from kernels.attention import attention_variant, paged_attention
from kernels.attention_metadata import AttentionMetadata, attention_metadata
from kernels.attention_reference import sdpa_attention
from kernels.gated_activation import SIGMOID_, SILU_, gelu_tanh_mul, silu_mul
from kernels.kv_cache import KVCache, bytes_per_block
from kernels.linear import ROW_COUNTS, Operation, PackedLinear
from kernels.rms_norm import rms_norm
from kernels.rope import rope_kv_write, rotary_tables
from kernels.whole_vectors import ElementwiseInPlace, is_position_independent

Attention = Callable[[torch.Tensor, KVCache, int, AttentionMetadata, float], torch.Tensor]

ATTENTION: dict[Numerics, Attention] = {"L2": paged_attention, "L0": sdpa_attention}


class Gate(NamedTuple):
    """A gated activation, and the elementwise function it rests on, which is probed."""

    operation: Operation
    function_: ElementwiseInPlace


GATES: dict[Activation, Gate] = {
    "silu": Gate(silu_mul, SILU_),
    "gelu_pytorch_tanh": Gate(gelu_tanh_mul, SIGMOID_),
}


@dataclass(frozen=True)
class TorchNorm:
    weight: torch.Tensor  # float32, [d] or [heads, d]
    eps: float
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.weight, self.eps, self.dtype)

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        hidden += x
        return self(hidden)


class TorchStep(NamedTuple):
    tables: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    work: tuple[AttentionMetadata, ...]
    cache: KVCache
    write_rows: torch.Tensor
    write_tokens: torch.Tensor | slice


class TorchOperations:
    sampler = None

    def __init__(self, config: ModelConfig, dtype: torch.dtype, numerics: Numerics) -> None:
        self._config, self._dtype = config, dtype
        self._rotary = rotary_embeddings(config)
        self._attention = ATTENTION[numerics]
        self._attention_variant = attention_variant(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        probed = is_position_independent(GATES[config.hidden_act].function_)
        self.is_exact = numerics == "L2" and self._attention_variant.row_invariant and probed

    @property
    def variant(self) -> str:
        attention = self._attention_variant if self._attention is paged_attention else "sdpa"
        return f"attention={attention} cpu={torch.backends.cpu.get_cpu_capability()}"

    def wake(self) -> None:
        """torch wakes its threads itself."""

    def embedding(self, table: torch.Tensor, scale: float, head: Operation | None) -> Operation:
        return lambda ids: table.index_select(0, ids).float().mul_(scale)

    def linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        max_rows: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> PackedLinear:
        return PackedLinear(weight, bias, None, max_rows=max_rows or ROW_COUNTS[-1], out_dtype=out_dtype)

    def norm(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> TorchNorm:
        return TorchNorm(weight, eps, dtype)

    def gate_up(self, weight: torch.Tensor, function: Activation) -> tuple[PackedLinear, Operation]:
        return self.linear(weight), GATES[function].operation

    def attention(
        self, kind: int, head_norms: torch.Tensor | None, eps: float, scale: float
    ) -> Callable[[torch.Tensor, TorchStep, int], torch.Tensor]:
        heads = torch.Tensor.float if head_norms is None else TorchNorm(head_norms, eps, torch.float32)
        attention = self._attention

        def attend(qkv: torch.Tensor, step: TorchStep, index: int) -> torch.Tensor:
            cos, sin = step.tables[kind]
            q = rope_kv_write(qkv, cos, sin, step.cache, index, step.write_rows, step.write_tokens, heads)
            return attention(q, step.cache, index, step.work[kind], scale)

        return attend

    def step(
        self, positions: torch.Tensor, slots: torch.Tensor, work: tuple[AttentionMetadata, ...], cache: KVCache
    ) -> TorchStep:
        tables = of_each_kind(lambda rotary: rotary_tables(positions, *rotary), self._rotary)
        stored = torch.nonzero(slots >= 0).flatten()
        write_tokens: torch.Tensor | slice = slice(0, len(slots)) if len(stored) == len(slots) else stored
        return TorchStep(tables, work, cache, cache.slot_rows(slots[stored]), write_tokens)

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        num_rows: int | None,
        window: int | None,
    ) -> AttentionMetadata:
        shape = self._attention_variant.shape
        return attention_metadata(num_tokens, context_lens, block_tables, cache, shape, num_rows, window)

    def bytes_per_block(self, block_size: int) -> int:
        config = self._config
        return bytes_per_block(
            block_size, config.num_key_value_heads, config.head_dim, config.num_hidden_layers, self._dtype
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        config = self._config
        return KVCache(
            config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim, self._dtype
        )
