"""CpuOperations: a model's operations from the C kernels. Each is one call for the whole batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from core.models.config import Activation, ModelConfig
from kernels.attention_metadata import AnyInts
from kernels.cpu_attention import CpuAttention
from kernels.cpu_attention_plan import SPLIT, TILE, AttentionPlan, attention_plan
from kernels.cpu_embedding import CpuEmbedding
from kernels.cpu_gated_activation import CpuGatedActivation
from kernels.cpu_kv_cache import CpuKVCache, padded_dim
from kernels.cpu_library import CpuLibrary
from kernels.cpu_rms_norm import CpuNorm
from kernels.cpu_rope import CpuRope
from kernels.cpu_sampling import CpuSampler
from kernels.kv_cache import KVCache, bytes_per_block


class CpuStep(NamedTuple):
    slots: torch.Tensor  # [T] int64, -1 = do not store
    tables: list[tuple[torch.Tensor, torch.Tensor]]
    work: tuple[AttentionPlan, ...]
    cache: CpuKVCache


class CpuOperations:
    is_exact = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, library: CpuLibrary) -> None:
        self._config, self._dtype, self._library = config, dtype, library
        self._attention = CpuAttention(library)
        self.sampler = CpuSampler(library)

    @property
    def variant(self) -> str:
        return f"c-{self._library.variant} attention={TILE}/{SPLIT}"

    def embedding(self, table: torch.Tensor, scale: float) -> CpuEmbedding:
        return CpuEmbedding(self._library, table, scale)

    def norm(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> CpuNorm:
        return CpuNorm(self._library, weight, eps, dtype)

    def gated_activation(self, function: Activation) -> CpuGatedActivation:
        return CpuGatedActivation(self._library, function)

    def attention(
        self, kind: int, head_norms: torch.Tensor | None, eps: float, scale: float
    ) -> Callable[[torch.Tensor, CpuStep, int], torch.Tensor]:
        rope = CpuRope(self._library, self._config.num_attention_heads, head_norms, eps)
        attention = self._attention

        def attend(qkv: torch.Tensor, step: CpuStep, index: int) -> torch.Tensor:
            cos, sin = step.tables[kind]
            q = rope(qkv, cos, sin, step.cache, index, step.slots)
            return attention(q, step.cache, index, step.work[kind], scale)

        return attend

    def step(
        self,
        slots: torch.Tensor,
        tables: list[tuple[torch.Tensor, torch.Tensor]],
        work: tuple[AttentionPlan, ...],
        cache: KVCache,
    ) -> CpuStep:
        assert isinstance(cache, CpuKVCache), type(cache)
        return CpuStep(slots.contiguous(), tables, work, cache)

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        num_rows: int,
        window: int | None,
    ) -> AttentionPlan:
        config = self._config
        return attention_plan(
            num_tokens, context_lens, block_tables, config.num_attention_heads, config.num_key_value_heads, window
        )

    def bytes_per_block(self, block_size: int) -> int:
        config = self._config
        width = padded_dim(config.head_dim)
        return bytes_per_block(block_size, config.num_key_value_heads, width, config.num_hidden_layers, self._dtype)

    def allocate_cache(self, num_blocks: int, block_size: int) -> CpuKVCache:
        config = self._config
        return CpuKVCache(
            config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim, self._dtype
        )
