"""The Llama family (Llama, Mistral, Qwen 2 and 3, Gemma 3), for batches of tokens packed request after request.

The differences between its members are in the config, and in the operations of the layers (core/models/layer.py).
"""

from collections.abc import Iterable

import numpy as np

from core.models.config import ModelConfig
from core.models.cpu_decoder import cpu_decoder
from core.models.layer import build_layer
from core.models.layer_kinds import windows
from core.models.operations import AttentionWork, Operations, Product, choose_operations
from core.models.step import ONCE, HiddenResult, ModelInputs, StepResult
from core.models.stored_matrix import StoredMatrix, Weight
from core.models.tensor import Tensor
from core.models.weight_form import WeightForm
from core.models.weight_parts import WeightParts
from ipc.arrays import AnyInts, Ints
from ipc.config import Numerics
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.memory.kv_cache import KVCache


class Llama:
    """The weights and the forward pass of one model.

    The residual stream and all intermediate numbers of attention are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        dtype: Dtype,
        numerics: Numerics = "L2",
        library: CpuLibrary | None = None,
        operations: Operations | None = None,
        form: WeightForm = WeightForm.STORED,
    ) -> None:
        """Pack the weights and build the layers.

        weights: (Hugging Face name, weight) pairs, best in the order of expected_shapes: each is packed as soon as its
        parts are read, and not kept. library: the C kernels, with their threads started; None = torch's operations.
        form: of the matrices in memory. operations: replace those that numerics, library and form select.
        Errors: ModelFileError naming tensors that are missing.
        """
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.dtype = dtype
        self.operations = operations = operations or choose_operations(config, dtype, numerics, library, form)
        self.sampler, self.wake = operations.sampler, operations.wake
        self.numerics: Numerics = "L2" if numerics == "L2" and operations.is_exact else "L0"
        # Rounded to dtype, like the embeddings: models with such a factor are trained with the rounded one.
        scale = config.hidden_size**0.5 if config.scale_embeddings else 1.0
        scale = to_floats(rounded(np.array([scale], np.float32), dtype)).item()
        self.windows = windows(config)
        parts = WeightParts(weights)
        table = parts.take_matrix("model.embed_tokens.weight")
        head = self._make_head(table) if config.tie_word_embeddings else None
        self._embedding = operations.embedding(table, scale, head)
        del table  # operations that need it have a copy
        indices = range(config.num_hidden_layers)
        self.layers = [build_layer(operations, parts, config, index, dtype) for index in indices]
        norm = parts.take("model.norm.weight") + np.float32(config.norm_offset)
        self._norm, self._float_norm = (operations.norm(norm, config.rms_norm_eps, to) for to in (dtype, FLOAT32))
        self._head = self._make_head(parts.take_matrix("lm_head.weight")) if head is None else head
        self.classifier: Numbers | None = None  # [labels, hidden] of a classifier of prompts
        if config.num_labels:
            self.classifier = parts.take_matrix("score.weight").dense(dtype).copy()
        self._decoder = cpu_decoder(
            config, operations, self.layers, self._embedding, self._norm, self._float_norm, self._head
        )

    def _make_head(self, weight: StoredMatrix) -> Product:
        return self.operations.linear(weight, out_dtype=FLOAT32)

    @property
    def variant(self) -> str:
        """Name of every kernel and summation order in use.

        Together with config, weights and dtype it fixes the bits of each logit.
        """
        products = {**self.layers[0].products, "head": self._head}
        parts = [f"{name}={product.variant}" for name, product in products.items()]
        return " ".join((*parts, self.operations.variant))

    def settle_length(self, max_model_len: int) -> None:
        """Do nothing: no part of this model depends on the length."""

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache of one block of block_size tokens, all layers together."""
        return self.operations.bytes_per_block(block_size)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        return self.operations.allocate_cache(num_blocks, block_size)

    def attention_metadata(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        generation: int = ONCE,
    ) -> tuple[AttentionWork, ...]:
        """Return the attention work of a step, one for each kind of layer there is; see Model."""
        return tuple(
            self.operations.attention_work(num_tokens, context_lens, block_tables, cache, window, generation)
            for window in self.windows
        )

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step.

        With the C kernels it is one call, which computes the last layer only for the rows with logits. Otherwise it
        runs operation after operation.
        """
        if self._decoder is None:
            return self.result(self.hidden_states(inputs), inputs.logits_rows)
        token_ids, positions, slots, attention, cache, logits_rows, generation = inputs
        assert isinstance(cache, CpuKVCache), type(cache)
        return self._decoder(token_ids, positions, slots, attention, cache, logits_rows, generation)

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Run the layers, operation after operation; return the last layer's output [T, hidden] float32."""
        step = self.operations.step(inputs.positions, inputs.slots, inputs.attention, inputs.cache)
        hidden = self._embedding(inputs.token_ids)
        x = self.layers[0].input_norm(hidden)
        for index, layer in enumerate(self.layers):
            x = layer.attention_out(layer.o(layer.attention(layer.qkv(x), step, index)))
            x = layer.mlp_norm.after(hidden, x)
            x = layer.mlp_out(layer.down(layer.activation(layer.gate_up(x))))
            if index + 1 < len(self.layers):
                x = self.layers[index + 1].input_norm.after(hidden, x)
        self.operations.add(hidden, x)
        return hidden

    def result(self, hidden: Tensor, rows: Ints) -> HiddenResult:
        """Return the result of a step. hidden: of hidden_states(). rows [S] int64: tokens whose logits are needed."""
        operations = self.operations
        return HiddenResult(
            rows,
            self.vocab_size,
            lambda picked: operations.to_host(self.logits(hidden, picked)),
            lambda picked: operations.to_host(self._float_norm(operations.pick(hidden, picked))),
        )

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [n, vocab] float32 of these rows [n] of hidden_states(), where the operations compute."""
        return self._head(self._norm(self.operations.pick(hidden, rows)))
