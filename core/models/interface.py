"""What the model runner needs of a model."""

from typing import Protocol

from core.models.operations import AttentionWork
from core.models.step import ONCE, ModelInputs, StepResult
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
        generation: int = ONCE,
    ) -> tuple[AttentionWork, ...]:
        """Return the attention work of one step, for each kind of layer; see kernels.torch.attention. generation: of
        the columns, as ModelInputs has it."""

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step: K and V of its tokens go into the cache, and the result has the logits asked for."""
