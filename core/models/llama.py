"""The Llama family (Llama, Mistral, Qwen 2 and 3, Gemma 3), functional, for batches of tokens packed request after
request. What tells its members apart is in the config and in the operations that core/models/layer.py put together.
"""

from collections.abc import Iterable

import torch

from core.models.config import ModelConfig
from core.models.cpu_decoder import cpu_decoder
from core.models.layer import build_layer, build_norm
from core.models.layer_kinds import windows
from core.models.operations import AttentionWork, Operations, Product, choose_operations
from core.models.weight_parts import WeightParts
from ipc.arrays import AnyInts
from ipc.config import Numerics
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.memory.kv_cache import KVCache


class Llama:
    """Weights and forward pass of one model. The residual stream and all of attention's inner numbers are float32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        numerics: Numerics = "L2",
        library: CpuLibrary | None = None,
        operations: Operations | None = None,
    ) -> None:
        """weights: (Hugging Face name, tensor) pairs, matrices in dtype, best in expected_shapes' order: each is packed
        as soon as its parts are there and not kept. library: of the C kernels, its threads started; None = torch's.
        operations: instead of those that numerics and library choose; weights are where these run.
        Errors: ModelFileError naming tensors that are missing."""
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.dtype = dtype
        self.operations = operations = operations or choose_operations(config, dtype, numerics, library)
        self.sampler, self.wake = operations.sampler, operations.wake
        self.numerics: Numerics = "L2" if numerics == "L2" and operations.is_exact else "L0"
        # Rounded as the embeddings themselves are: that is what models with such a factor are trained with.
        scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
        scale = torch.tensor(scale, dtype=dtype).item()
        self.windows = windows(config)
        with torch.inference_mode():
            parts = WeightParts(weights)
            table = parts.take("model.embed_tokens.weight").clone()  # no view of a mapped file
            head = self._make_head(table) if config.tie_word_embeddings else None
            self._embedding = operations.embedding(table, scale, head)
            del table  # kept where the operations need it
            indices = range(config.num_hidden_layers)
            self.layers = [build_layer(operations, parts, config, index, dtype) for index in indices]
            self._norm = build_norm(operations, parts, "model.norm.weight", config, dtype)
            self._head = self._make_head(parts.take("lm_head.weight")) if head is None else head
            self._decoder = cpu_decoder(config, operations, self.layers, self._embedding, self._norm, self._head)

    def _make_head(self, weight: torch.Tensor) -> Product:
        return self.operations.linear(weight, out_dtype=torch.float32)

    @property
    def variant(self) -> str:
        """Names every kernel and summation order in use; with config, weights and dtype it fixes each logit's bits."""
        products = {**self.layers[0].products, "head": self._head}
        parts = [f"{name}={product.variant}" for name, product in products.items()]
        return " ".join((*parts, self.operations.variant))

    def settle_length(self, max_model_len: int) -> None:
        """Nothing in a model of our own depends on it."""

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of KV cache one block of block_size tokens takes."""
        return self.operations.bytes_per_block(block_size)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Errors: MemoryError."""
        return self.operations.allocate_cache(num_blocks, block_size)

    def attention_metadata(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
    ) -> tuple[AttentionWork, ...]:
        """Return the attention work of a step, one for each kind of layer there is."""
        return tuple(
            self.operations.attention_work(num_tokens, context_lens, block_tables, cache, window)
            for window in self.windows
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: tuple[AttentionWork, ...],
        cache: KVCache,
        logits_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step: hidden_states() and compute_logits() of them, in one call where the C kernels run, which computes
        the last layer for these rows only. logits_rows [S] -> what compute_logits() takes, and logits [S, vocab], both
        the caller's until the next step."""
        if self._decoder is None:
            hidden = self.hidden_states(token_ids, positions, slots, metadata, cache)
            return hidden, self.compute_logits(hidden, logits_rows) if len(logits_rows) else hidden.new_empty(
                0, self.vocab_size
            )
        assert isinstance(cache, CpuKVCache), type(cache)
        return self._decoder(token_ids, positions, slots, metadata, cache, logits_rows)

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: tuple[AttentionWork, ...],
        cache: KVCache,
    ) -> torch.Tensor:
        """token_ids, positions [T] int64; slots [T] int64 (block * block_size + offset; -1 = do not store) -> the last
        layer's output [T, hidden] float32."""
        step = self.operations.step(positions, slots, metadata, cache)
        hidden = self._embedding(token_ids)
        x = self.layers[0].input_norm(hidden)
        for index, layer in enumerate(self.layers):
            x = layer.attention_out(layer.o(layer.attention(layer.qkv(x), step, index)))
            x = layer.mlp_norm.after(hidden, x)
            x = layer.mlp_out(layer.down(layer.activation(layer.gate_up(x))))
            if index + 1 < len(self.layers):
                x = self.layers[index + 1].input_norm.after(hidden, x)
        return hidden.add_(x)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden as hidden_states() or the last forward() gave it, before metadata for another step is made; rows [S]
        int64, different indices of its tokens -> logits [S, vocab] float32."""
        if self._decoder is not None and self._decoder.is_of_last_step(hidden):
            return self._decoder.logits(rows)
        return self._head(self._norm(hidden.index_select(0, rows.to(hidden.device))))
