"""HostedModel: a model on a device whose steps have their columns in host memory, as a drafter gives them."""

import torch

from core.models.llama import Llama
from core.models.operations.operations import AttentionWork
from core.models.operations.triton_operations import TritonOperations
from core.models.step import ONCE, ModelInputs, StepResult
from ipc.tables.arrays import AnyInts, Ints
from kernels.memory.kv_cache import KVCache


class HostedModel:
    """A Model. Each step sends its columns to the device, and waits for its logits."""

    sampler = None

    def __init__(self, model: Llama, operations: TritonOperations) -> None:
        """operations: the model's."""
        self._model, self._device = model, operations.device
        self.vocab_size, self.max_model_len = model.vocab_size, model.max_model_len
        self.eos_token_ids, self.numerics, self.variant = model.eos_token_ids, model.numerics, model.variant

    def settle_length(self, max_model_len: int) -> None:
        """See Model."""
        self._model.settle_length(max_model_len)

    def wake(self) -> None:
        """Do nothing: the device needs no wake-up."""

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache for one block of block_size tokens, all layers together."""
        return self._model.bytes_per_block(block_size)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache on the device. Errors: MemoryError."""
        return self._model.allocate_cache(num_blocks, block_size)

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
        """Return the attention work of one step; see Model."""
        return self._model.attention_metadata(
            num_tokens, context_lens, block_tables, cache, generation, wholes, window_tables
        )

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step; see Model."""
        sent = inputs._replace(
            token_ids=self._sent(inputs.token_ids),
            positions=self._sent(inputs.positions),
            slots=self._sent(inputs.slots),
        )
        return self._model.forward(sent)

    def _sent(self, column: AnyInts) -> torch.Tensor:
        return torch.from_numpy(column).to(self._device, copy=True)
