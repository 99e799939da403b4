"""The Llama family, functional, for batches of tokens packed request after request."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from core.model_config import ModelConfig
from ipc.config import Numerics
from ipc.errors import ModelFileError
from kernels.attention import attention_variant, paged_attention
from kernels.attention_metadata import AnyInts, AttentionMetadata, attention_metadata
from kernels.attention_reference import sdpa_attention
from kernels.kv_cache import KVCache, bytes_per_block
from kernels.linear import ROW_COUNTS, PackedLinear, padded_rows
from kernels.rms_norm import rms_norm
from kernels.rope import rope_kv_write, rotary_frequencies, rotary_tables
from kernels.silu_mul import silu_mul

Attention = Callable[[torch.Tensor, KVCache, int, AttentionMetadata, float], torch.Tensor]

ATTENTION: dict[Numerics, Attention] = {"L2": paged_attention, "L0": sdpa_attention}

#: Rows the head computes at once: it sees one row per request that samples.
_HEAD_ROWS = 32


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer: packed products in the model's dtype, norms [hidden] float32."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    o: PackedLinear
    post_attention_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Llama:
    """Weights and forward pass of one model. The residual stream and all of attention's inner numbers are float32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        numerics: Numerics = "L2",
    ) -> None:
        """weights: (Hugging Face name, tensor in dtype) pairs in any order; each is packed as soon as its parts are
        there and not kept. Errors: ModelFileError naming tensors that are missing."""
        self.config = config
        self.dtype = dtype
        self._attention = ATTENTION[numerics]
        self._attention_variant = attention_variant(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        is_exact = numerics == "L2" and self._attention_variant.row_invariant
        self.numerics: Numerics = "L2" if is_exact else "L0"
        self._scale = config.head_dim**-0.5
        self._frequencies = rotary_frequencies(config.head_dim, config.rope_theta)
        with torch.inference_mode():
            parts = _WeightParts(weights)
            self._embedding, self._head = _embedding_and_head(parts, config)
            self._layers = [_layer(parts, f"model.layers.{index}.") for index in range(config.num_hidden_layers)]
            self._norm = parts.take("model.norm.weight").float()
        # The fewest rows that some product of the model can run: batches are padded once, not before each product.
        products = [product for layer in self._layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        shared = set(ROW_COUNTS).intersection(*(product.chosen.row_counts for product in products))
        self._row_counts = tuple(sorted(shared)) or (1,)

    @property
    def variant(self) -> str:
        """Names every kernel and summation order in use; with config, weights and dtype it fixes each logit's bits."""
        layer = self._layers[0]
        products = {
            "qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down, "head": self._head,
        }  # fmt: skip
        parts = [f"{name}={product.variant}" for name, product in products.items()]
        attention = self._attention_variant if self._attention is paged_attention else "sdpa"
        return " ".join((*parts, f"attention={attention}", f"cpu={torch.backends.cpu.get_cpu_capability()}"))

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of KV cache one block of block_size tokens takes."""
        config = self.config
        return bytes_per_block(
            block_size, config.num_key_value_heads, config.head_dim, config.num_hidden_layers, self.dtype
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Errors: MemoryError."""
        config = self.config
        return KVCache(
            config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim, self.dtype
        )

    def attention_metadata(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
    ) -> AttentionMetadata:
        """As kernels.attention_metadata, with this model's heads and padding."""
        num_rows = padded_rows(int(num_tokens.sum()), self._row_counts)
        shape = self._attention_variant.shape
        return attention_metadata(num_tokens, context_lens, block_tables, cache, shape, num_rows)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """As hidden_states(); logits_rows [S] int64 indices of the tokens whose logits are wanted -> logits [S, vocab]
        float32."""
        return self.compute_logits(self.hidden_states(token_ids, positions, slots, metadata, cache), logits_rows)

    @torch.inference_mode()
    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
    ) -> torch.Tensor:
        """token_ids, positions [T] int64; slots [T] int64 (block * block_size + offset; -1 = do not store) -> the last
        layer's output [>= T, hidden] float32."""
        num_tokens, num_rows = len(token_ids), metadata.num_rows
        stored = torch.nonzero(slots >= 0).flatten()
        write_rows = cache.slot_rows(slots[stored])
        write_tokens: torch.Tensor | slice = slice(0, num_tokens) if len(stored) == num_tokens else stored
        padding = token_ids.new_zeros(num_rows - num_tokens)
        cos, sin = rotary_tables(torch.cat((positions, padding)), self._frequencies)
        hidden = self._embedding.index_select(0, torch.cat((token_ids, padding))).float()
        eps, dtype = self.config.rms_norm_eps, self.dtype
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(hidden, layer.input_norm, eps, dtype))
            q = rope_kv_write(qkv, cos, sin, cache, index, write_rows, write_tokens)
            hidden += layer.o(self._attention(q, cache, index, metadata, self._scale))
            gate_up = layer.gate_up(rms_norm(hidden, layer.post_attention_norm, eps, dtype))
            hidden += layer.down(silu_mul(gate_up))
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden as hidden_states() gives it; rows [S] int64 indices into it -> logits [S, vocab] float32."""
        normed = rms_norm(hidden.index_select(0, rows), self._norm, self.config.rms_norm_eps, self.dtype)
        return self._head(normed).float()


class _WeightParts:
    """Tensors by name, from an iterator read only as far as is needed."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = iter(weights)
        self._waiting: dict[str, torch.Tensor] = {}

    def take(self, *names: str) -> torch.Tensor:
        """The named tensors, stacked along the first dimension, and forgotten."""
        while not self._waiting.keys() >= set(names):
            try:
                name, tensor = next(self._weights)
            except StopIteration:
                missing = sorted(set(names) - self._waiting.keys())
                raise ModelFileError(f"the model file lacks these tensors: {', '.join(missing)}") from None
            self._waiting[name] = tensor
        tensors = [self._waiting.pop(name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _embedding_and_head(parts: _WeightParts, config: ModelConfig) -> tuple[torch.Tensor, PackedLinear]:
    embedding = parts.take("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else parts.take("lm_head.weight")
    return embedding, PackedLinear(head, max_rows=_HEAD_ROWS)


def _layer(parts: _WeightParts, prefix: str) -> _Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    return _Layer(
        input_norm=parts.take(f"{prefix}input_layernorm.weight").float(),
        qkv=PackedLinear(parts.take(*(f"{attention}{name}_proj.weight" for name in "qkv"))),
        o=PackedLinear(parts.take(f"{attention}o_proj.weight")),
        post_attention_norm=parts.take(f"{prefix}post_attention_layernorm.weight").float(),
        gate_up=PackedLinear(parts.take(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")),
        down=PackedLinear(parts.take(f"{mlp}down_proj.weight")),
    )
