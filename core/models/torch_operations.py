"""TorchOperations: a model's operations made of torch's, for machines without the C kernels; numerics level L0."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from core.models.config import Activation, ModelConfig
from core.models.rotary import of_each_kind, rotary_embeddings
from core.models.stored_matrix import StoredMatrix
from ipc.arrays import AnyInts
from kernels.memory.kv_cache import KVCache, bytes_per_block
from kernels.torch.attention import AttentionMetadata, attention_metadata, paged_attention
from kernels.torch.gated_activation import gelu_tanh_mul, silu_mul
from kernels.torch.linear import Operation, TorchLinear
from kernels.torch.rms_norm import rms_norm
from kernels.torch.rope import rope_kv_write, rotary_tables

GATES: dict[Activation, Operation] = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}


@dataclass(frozen=True)
class TorchNorm:
    """Root mean square normalisation of the last dimension."""

    weight: torch.Tensor  # float32, [d] or [heads, d]
    eps: float
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.weight, self.eps, self.dtype)

    def after(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add x [T, d] to hidden [T, d] float32 in place; return hidden normalised."""
        hidden += x
        return self(hidden)


class TorchStep(NamedTuple):
    """The inputs that attention needs in one step of T tokens."""

    tables: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # cosines and sines of all tokens, for each kind of layer
    work: tuple[AttentionMetadata, ...]  # one for each kind of layer
    cache: KVCache
    write_rows: torch.Tensor  # cache rows of the tokens that are stored
    write_tokens: torch.Tensor | slice  # indices of the tokens that are stored


class TorchOperations:
    """Operations made of torch's; the methods are described at Operations."""

    is_exact = False
    sampler = None

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._rotary = rotary_embeddings(config)

    @property
    def variant(self) -> str:
        """Name of the kernels and constants that fix the results' bits; part of the fingerprint."""
        return f"torch cpu={torch.backends.cpu.get_cpu_capability()}"

    def wake(self) -> None:
        """Do nothing: torch wakes its threads itself."""

    def embedding(self, table: torch.Tensor, scale: float, head: Operation | None) -> Operation:
        """Return the operation from ids [T] int64 to the table's rows times scale [T, d] float32."""
        return lambda ids: table.index_select(0, ids).float().mul_(scale)

    def linear(
        self,
        weight: StoredMatrix,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> TorchLinear:
        """Return the product with this weight [out, in] and bias [out] float32."""
        return TorchLinear(weight.dense(self._dtype), bias, out_dtype=out_dtype)

    def norm(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> TorchNorm:
        """Return the norm with this weight [d] float32; results are of dtype."""
        return TorchNorm(weight, eps, dtype)

    def gate_up(self, weight: StoredMatrix, function: Activation) -> tuple[TorchLinear, Operation]:
        """Return the product of gate and up, and the operation that makes f(gate) * up of its result."""
        return self.linear(weight), GATES[function]

    def attention(
        self, kind: int, head_norms: torch.Tensor | None, eps: float, scale: float
    ) -> Callable[[torch.Tensor, TorchStep, int], torch.Tensor]:
        """Return the attention of one layer; see Operations."""
        heads = torch.Tensor.float if head_norms is None else TorchNorm(head_norms, eps, torch.float32)

        def attend(qkv: torch.Tensor, step: TorchStep, index: int) -> torch.Tensor:
            cos, sin = step.tables[kind]
            q = rope_kv_write(qkv, cos, sin, step.cache, index, step.write_rows, step.write_tokens, heads)
            return paged_attention(q, step.cache, index, step.work[kind], scale)

        return attend

    def step(
        self, positions: torch.Tensor, slots: torch.Tensor, work: tuple[AttentionMetadata, ...], cache: KVCache
    ) -> TorchStep:
        """Return the step's inputs of attention, with the rotary tables of its positions."""
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
        window: int | None,
        generation: int,
    ) -> AttentionMetadata:
        """Return the attention work of a step for one window."""
        return attention_metadata(num_tokens, context_lens, block_tables, cache, window)

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache of one block, all layers together."""
        config = self._config
        return bytes_per_block(
            block_size, config.num_key_value_heads, config.head_dim, config.num_hidden_layers, self._dtype
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        config = self._config
        return KVCache(
            config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim, self._dtype
        )
