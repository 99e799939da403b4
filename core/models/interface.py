"""Model: the interface between the model runner and a model."""

from typing import Protocol

from core.models.operations.operations import AttentionWork
from core.models.step import ONCE, ModelInputs, StepResult
from ipc.options.model_options import Numerics
from ipc.tables.arrays import AnyInts, Ints
from kernels.cpu.sampling import CpuSampler
from kernels.memory.kv_cache import KVCache


class Model(Protocol):
    """A model that runs batches of tokens over a KV cache of blocks."""

    vocab_size: int
    max_model_len: int  # tokens of the longest sequence that the model supports
    eos_token_ids: tuple[int, ...]
    numerics: Numerics

    @property
    def sampler(self) -> CpuSampler | None:
        """Return the kernel that draws tokens from the logits; None: core/sampling/sampler.py is used."""

    @property
    def variant(self) -> str:
        """Return the names of the kernels in use; part of the fingerprint."""

    def settle_length(self, max_model_len: int) -> None:
        """Set the maximum number of tokens of a request.

        Called before the cache for the steps is allocated. Choices that depend on it are part of the variant.
        """

    def wake(self) -> None:
        """Prepare for a call of forward() within tens of microseconds."""

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache for one block of block_size tokens, all layers together."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache. Errors: MemoryError."""

    def attention_metadata(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        generation: int = ONCE,
        wholes: Ints | None = None,
        window_tables: AnyInts | None = None,
    ) -> tuple[AttentionWork, ...]:
        """Return the attention work of one step for each kind of layer; see kernels.torch.attention.

        generation: number of the columns, see ModelInputs.generation. wholes [n, 2] int64: runs of tokens that all see
        each other, such as those of an image: index of the first one in the step, ascending, and their number. Only a
        model that reads features has any. window_tables: block tables of the layers with a window; None: the same as
        the others'.
        """

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step: store K and V of its tokens in the cache and compute the logits of inputs.logits_rows."""
