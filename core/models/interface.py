"""What the model runner needs of a model."""

from typing import Protocol

import torch

from core.models.operations import AttentionWork
from ipc.arrays import AnyInts
from ipc.config import Numerics
from kernels.cpu.sampling import CpuSampler
from kernels.memory.kv_cache import KVCache


class Model(Protocol):
    vocab_size: int
    max_model_len: int  # tokens the model was made for
    eos_token_ids: tuple[int, ...]
    numerics: Numerics

    @property
    def sampler(self) -> CpuSampler | None:
        """The kernel that draws tokens from its logits; None: torch's operations."""

    @property
    def variant(self) -> str:
        """Names the kernels in use; part of the fingerprint."""

    def settle_length(self, max_model_len: int) -> None:
        """No request will have more than max_model_len tokens. Called before the cache of the steps is allocated; what
        the model chooses by it is part of its variant."""

    def wake(self) -> None:
        """forward() will be called within tens of microseconds."""

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of KV cache one block of block_size tokens takes."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Errors: MemoryError."""

    def attention_metadata(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
    ) -> tuple[AttentionWork, ...]:
        """The attention work of one step, for each kind of layer; see kernels.torch.attention."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: tuple[AttentionWork, ...],
        cache: KVCache,
        logits_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step: hidden_states(), or what stands for them in compute_logits(), and compute_logits() of these rows
        [S], which may be none. Both results are the caller's until the next step."""

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: tuple[AttentionWork, ...],
        cache: KVCache,
    ) -> torch.Tensor:
        """token_ids, positions, slots [T] int64 -> the last layer's output [>= T, hidden]."""

    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden as hidden_states() or the last forward() gave it, before metadata for another step is made; rows [S]
        int64, different indices of its tokens -> logits [S, vocab] float32."""
