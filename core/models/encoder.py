"""Encoder: models whose tokens see the whole prompt (BERT, RoBERTa, ModernBERT), on the C kernels.

A prompt is computed in one step, so no K or V is kept after it, and all layers share the cache memory of one. The step
is the decoder's C call (kernels/cpu/c/layers/decoder.h) without a head.
"""

from collections.abc import Iterable

from core.models.config import ModelConfig
from core.models.layers.layer_kinds import kind_of, windows
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.stored_matrix import Weight
from core.models.operations.weight_form import WeightForm
from core.models.parts.weight_parts import WeightParts
from core.models.step import ONCE, ModelInputs, StepResult
from ipc.options.model_options import Numerics
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.cpu.attention_plan import AttentionPlan
from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.decoder_parts import AttentionParts, DenseParts, LayerParts
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.elements import FLOAT32, Dtype, to_floats
from kernels.memory.kv_cache import KVCache


class Encoder:
    """The weights and the forward pass of one encoder; a Model (core/models/interface.py) at numerics level L2."""

    numerics: Numerics = "L2"

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        dtype: Dtype,
        library: CpuLibrary,
        *,
        form: WeightForm = WeightForm.STORED,
    ) -> None:
        """Pack the weights and build the layers.

        weights: (name, weight) pairs with the names of core/model_files/tensors/encoder_weights.py, preferably in their
        order. form: of the matrices in memory.
        Errors: ModelFileError naming missing tensors.
        """
        assert config.encoder is not None, config.architecture
        self.config, self.dtype, self._parts = config, dtype, config.encoder
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.operations = CpuOperations(config, dtype, library, form)
        self.sampler, self.wake = self.operations.sampler, self.operations.wake
        self.windows = windows(config)
        files = WeightParts(weights)
        embedding = self._embedding(files)
        before = self._norm(files, "embeddings.norm", replaces=True)
        layers: list[LayerParts] = []
        for index in range(config.num_hidden_layers):
            # The norm after a layer is applied before the next one. The first layer reads the embeddings' norm.
            if index and not self._parts.norms_follow:
                before = self._norm(files, f"layers.{index}.attention_norm")
            layers.append(self._layer(files, index, before))
            if self._parts.norms_follow:
                before = self._norm(files, f"layers.{index}.mlp_norm", replaces=True)
        last = before if self._parts.norms_follow else self._norm(files, "final_norm")
        to_floats_norm = CpuNorm(library, last.weight, config.rms_norm_eps, FLOAT32, bias=last.bias, is_centred=True)
        self._decoder = CpuDecoder(
            library,
            layers,
            embedding,
            last,
            float_norm=to_floats_norm,
            head=None,
            tables=self.operations.tables,
            num_heads=config.num_attention_heads,
        )
        self._products = layers[0]
        #: The layers after the pooling, by name; empty for a model that does not classify. Vectors are [d], float32.
        self.head = {name: self._head_weight(files, name) for name in head_shapes(config)}

    def _embedding(self, files: WeightParts) -> CpuEmbedding:
        """Build the embedding of words, positions and kinds of tokens."""
        parts, library = self._parts, self.operations.library
        words = files.take_matrix("embeddings.words.weight").own(self.dtype)
        places = kinds = None
        if parts.num_positions:
            places = to_floats(files.take_matrix("embeddings.positions.weight").dense(self.dtype))
            places = places[parts.first_position :].copy()
        if parts.num_kinds:
            kinds = to_floats(files.take_matrix("embeddings.kinds.weight").dense(self.dtype)).copy()
        return CpuEmbedding(library, words, kinds=kinds, places=places)

    def _norm(self, files: WeightParts, name: str, *, replaces: bool = False) -> CpuNorm:
        weight = files.take(f"{name}.weight")
        bias = files.take(f"{name}.bias") if self._parts.has_biases else None
        return CpuNorm(
            self.operations.library,
            weight,
            self.config.rms_norm_eps,
            self.dtype,
            bias=bias,
            is_centred=True,
            replaces=replaces,
        )

    def _layer(self, files: WeightParts, index: int, before: CpuNorm) -> LayerParts:
        """Build a layer. before: the norm of its input."""
        config, parts, operations, name = self.config, self._parts, self.operations, f"layers.{index}."

        def product(*stems: str, activates: bool = False) -> PackedMatrix:
            weight = files.take_matrix(*(f"{name}{stem}.weight" for stem in stems))
            has_biases = parts.has_biases and parts.products_have_biases
            bias = files.take(*(f"{name}{stem}.bias" for stem in stems)) if has_biases else None
            return operations.linear(weight, bias, activation=parts.activation if activates else None)

        qkv = product("qkv") if parts.has_fused_qkv else product("q", "k", "v")
        o = product("o")
        stem = "attention_out_norm" if parts.norms_follow else "mlp_norm"
        mlp_norm = self._norm(files, f"{name}{stem}", replaces=parts.norms_follow)
        if parts.is_gated:
            halves = ("up",) if parts.has_fused_gate else ("gate", "up")
            weight = files.take_matrix(*(f"{name}{half}.weight" for half in halves))
            up, _ = operations.gate_up(weight, parts.activation)
        else:
            up = product("up", activates=True)
        return LayerParts(
            input_norm=before,
            qkv=qkv,
            mix=AttentionParts(None, config.head_dim**-0.5),
            o=o,
            attention_out_norm=None,
            mlp_norm=mlp_norm,
            mlp=DenseParts(up, product("down")),
            mlp_out_norm=None,
            kind=kind_of(config, index),
        )

    def _head_weight(self, files: WeightParts, name: str) -> Floats:
        if len(head_shapes(self.config)[name]) == 1:
            return files.take(name)
        return to_floats(files.take_matrix(name).dense(self.dtype)).copy()

    @property
    def variant(self) -> str:
        """Return the names of all kernels and summation orders in use; part of the fingerprint."""
        parts, mlp = self._products, self._products.mlp
        assert isinstance(mlp, DenseParts), mlp
        products = {"qkv": parts.qkv, "o": parts.o, "up": mlp.gate_up, "down": mlp.down}
        named = [f"{name}={product.variant}" for name, product in products.items()]
        return " ".join((*named, self.operations.variant))

    def settle_length(self, max_model_len: int) -> None:
        """Do nothing: no part of this model depends on the length."""

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache for one block of block_size tokens, which all layers share."""
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
        wholes: Ints | None = None,
        window_tables: AnyInts | None = None,
    ) -> tuple[AttentionPlan, ...]:
        """Return the attention work of a step, one per kind of layer. Its requests have their whole prompts."""
        assert (num_tokens == context_lens).all(), "an encoder's prompt is computed in one step"
        assert wholes is None, "an encoder's tokens see each other anyway"
        assert window_tables is None, "an encoder's cache has no pages"
        return tuple(
            self.operations.attention_work(num_tokens, context_lens, block_tables, cache, window, generation)
            for window in self.windows
        )

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step in one C call. The last layer is only finished for the tokens whose hidden states are needed."""
        token_ids, positions, slots, attention, cache, logits_rows, generation, *_ = inputs
        assert isinstance(cache, CpuKVCache), type(cache)
        return self._decoder(token_ids, positions, slots, attention, cache, logits_rows, generation)


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a classifying encoder's layers after the pooling, by name."""
    parts, hidden = config.encoder, config.hidden_size
    if parts is None or parts.head == "none":
        return {}
    shapes: dict[str, tuple[int, ...]] = {"head.dense.weight": (hidden, hidden)}
    if parts.head_has_biases:
        shapes["head.dense.bias"] = (hidden,)
    if parts.head == "gelu and norm":
        shapes["head.norm.weight"] = (hidden,)
    return shapes | {"head.out.weight": (config.num_labels, hidden), "head.out.bias": (config.num_labels,)}
