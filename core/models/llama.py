"""The Llama family (the rows of architectures.py), for batches of tokens packed request after request.

The differences between models are in the config and in the operations of the layers (core/models/layers/layer.py).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from core.models.config import ModelConfig
from core.models.cpu_decoder import cpu_decoder
from core.models.layers.adapted import adapted_layer
from core.models.layers.layer import Layer, NormNumbers, build_layer, take_norm
from core.models.layers.layer_kinds import places, windows
from core.models.layers.rope_scaling import LongropeScaling
from core.models.layers.stream_layers import run_layers
from core.models.layers.streams import ModelStreams, build_streams
from core.models.operations.cpu_operations import CpuOperations, TakePacked, lora_rows
from core.models.operations.operations import (
    AdaptingOperations,
    AttentionWork,
    GivingOperations,
    LayerwiseOperations,
    Norm,
    Operations,
    PerLayerInputs,
    Product,
    choose_operations,
)
from core.models.operations.second_forms import SecondForms
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.operations.tensor import Tensor
from core.models.operations.token_adapters import TokenAdapters
from core.models.operations.weight_form import WeightForm
from core.models.parts.gathered import GatheredParts
from core.models.parts.rank import Rank
from core.models.parts.weight_parts import WeightParts
from core.models.step import ONCE, GivenRows, HiddenResult, ModelInputs, StepResult
from ipc.options.model_options import Numerics
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.group import HostGroup, SeparateMemory, SharedMemory
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.memory.kv_cache import KVCache, MixedKVCache
from kernels.memory.states import allocate_states


def embedding_scale(config: ModelConfig, dtype: Dtype) -> float:
    """Return the factor of embeddings. One derived from the width is rounded to dtype, as in training."""
    if not config.scale_embeddings:
        return config.embedding_multiplier
    return _rounded_root(config.hidden_size, dtype)


def blocks_per_page(operations: Operations, whole: ModelConfig) -> int:
    """Return how many blocks a page has; 0: layers have blocks in common. whole: the model, of which a part may run."""
    return operations.blocks_per_page(whole) if isinstance(operations, CpuOperations) and whole.streams is None else 0


def _rounded_root(width: int, dtype: Dtype) -> float:
    return float(to_floats(rounded(np.array([width**0.5], np.float32), dtype)).item())


def per_layer_inputs(
    operations: Operations, parts: WeightParts, config: ModelConfig, dtype: Dtype
) -> PerLayerInputs | None:
    """Build the inputs of single layers; None for a model without any.

    The projection is divided by the square root of hidden_size before its norm: that is, the norm's eps is multiplied
    by hidden_size. If there is a table, the sum of both parts is divided by the square root of 2.
    """
    if (own := config.per_layer) is None:
        return None
    table = parts.take_matrix("model.embed_tokens_per_layer.weight") if own.vocab_size else None
    projection = parts.take_matrix("model.per_layer_model_projection.weight")
    if own.row_layers:
        first = own.first_layer * own.width
        projection = projection.rows(first, first + config.num_hidden_layers * own.width)
    norm, half = parts.take("model.per_layer_projection_norm.weight"), 1.0 if table is None else 0.5**0.5
    scale = _rounded_root(own.width, dtype) * half
    eps = config.rms_norm_eps * config.hidden_size
    assert isinstance(operations, LayerwiseOperations), type(operations)
    return operations.per_layer_inputs(table, projection, norm * np.float32(half), scale=scale, eps=eps)


class Llama:
    """The weights and the forward pass of one model.

    The residual stream and all intermediate numbers of attention are float32.
    """

    taps: tuple[int, ...] = ()  # of tap()
    has_gathered_ends = False  # whether its embeddings and its head are those of all ranks
    state_size_of_model: int  # numbers in a request's recurrent states, in the layers of the whole model
    _cache: KVCache | None = None  # that of the last step
    #: Of each kind of layer: the key of its work. Kinds that see the same tokens of the same part share it.
    _kinds: list[tuple[int | None, int]]
    _parts: dict[tuple[int | None, int], tuple[int | None, KVCache]]

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        dtype: Dtype,
        numerics: Numerics = "L2",
        *,
        library: CpuLibrary | None = None,
        operations: Operations | None = None,
        form: WeightForm = WeightForm.STORED,
        rank: Rank | None = None,
        cache_type: type[CpuKVCache] = CpuKVCache,
        shares_blocks: bool = True,
        take_packed: TakePacked | None = None,
        second_forms: SecondForms | None = None,
    ) -> None:
        """Pack the weights and build the layers.

        weights: (Hugging Face name, weight) pairs, preferably in the order of expected_shapes: each is packed as soon
        as its parts are read, and not kept. library: the C kernels, with their threads started; None = torch's
        operations. form: of the matrices in memory. rank: the process's place in a group that computes the model
        together; None = there is no group. cache_type: of the C kernels' KV cache. shares_blocks, take_packed,
        second_forms: see CpuOperations. operations: replace those that the other arguments would select. Errors:
        ModelFileError naming missing tensors.
        """
        whole, self.config, self.state_size_of_model = config, config, config.state_size
        if rank is not None:
            self.config = config = rank.shard.config(whole)
        self.vocab_size = config.vocab_size
        self.max_model_len = self._length = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.dtype = dtype
        packing: dict[str, Any] = {"take_packed": take_packed, "second_forms": second_forms}
        self.operations = operations = operations or choose_operations(
            config, dtype, numerics, library, form, cache_type, shares_blocks=shares_blocks, **packing
        )
        self.sampler, self.wake = operations.sampler, operations.wake
        self.numerics: Numerics = "L2" if numerics == "L2" and operations.is_exact else "L0"
        #: For each kind of layer here, and in the whole model, of which this may be a part.
        self.windows = self.windows_of_model = windows(config)
        self._places = places(config)
        #: Of split_cache(); 0: layers with and without a window have their blocks in common.
        self.num_blocks_per_page = blocks_per_page(operations, whole)
        parts = WeightParts(weights) if rank is None else rank.shard.parts(whole, weights)
        self.head: Product | None = None
        self.classifier: Numbers | None = None  # [labels, hidden]; for a classifier of prompts
        #: [n, hidden], by which final hidden states are multiplied; None = they are embeddings themselves.
        self.to_embedding: Numbers | None = None
        head = self._build_begin(parts)
        self.per_layer = per_layer_inputs(operations, parts, config, dtype)
        self.streams = self._build_streams(parts)
        self.layers = self._build_layers(parts)
        self._build_end(parts, head)
        self.decoder = self._build_decoder(whole, rank)
        if self.decoder is None and rank is not None and isinstance(rank.memory, SharedMemory | SeparateMemory):
            assert self.library is not None, "ranks on a CPU have the C kernels"
            self.gather(GatheredParts(whole, rank.shard, HostGroup(self.library, rank.memory, *rank.shard)))

    def _build_begin(self, parts: WeightParts) -> Product | None:
        """Build the embedding. Return the head if it has the same weights, otherwise None."""
        table = parts.take_matrix("model.embed_tokens.weight")
        head = self._make_head(table) if self.config.tie_word_embeddings else None
        self._build_embedding(parts, table, head)
        return head

    def _build_embedding(self, parts: WeightParts, table: StoredMatrix, head: Product | None) -> None:
        """Build the embedding, with rows by position if the model has any."""
        places = None
        if self.config.position_table:
            places = to_floats(parts.take_matrix("model.embed_positions.weight").dense(FLOAT32)).copy()
        scale = embedding_scale(self.config, self.dtype)
        self.embedding = self.operations.embedding(table, scale, head, places)

    def _build_streams(self, parts: WeightParts) -> ModelStreams | None:
        return build_streams(self.operations, parts, self.config)

    def _build_layers(self, parts: WeightParts) -> list[Layer]:
        indices = range(self.config.num_hidden_layers)
        return [build_layer(self.operations, parts, self.config, index, self.dtype) for index in indices]

    def _build_end(self, parts: WeightParts, head: Product | None) -> None:
        """Build what follows the layers. head: None = it has its own weights."""
        config, operations = self.config, self.operations
        norm, multiplier = take_norm(parts, "model.norm", config), np.float32(config.logits_multiplier)
        self._float_norm = norm.build(operations, config, FLOAT32)
        # The head's product is linear, so the logits' multiplier is applied to its input.
        scaled = NormNumbers(*(None if numbers is None else numbers * multiplier for numbers in norm))
        self._norm = scaled.build(operations, config, self.dtype)
        if head is None:
            weight = parts.take_matrix("lm_head.weight")
            head = self._make_head(weight, parts.take("lm_head.bias") if config.head_bias else None)
        self.head = head
        if config.embedding_size:
            self.to_embedding = parts.take_matrix("model.embedding_projection.weight").dense(self.dtype).copy()
        if config.num_labels:
            self.classifier = parts.take_matrix("score.weight").dense(self.dtype).copy()

    def _build_decoder(self, whole: ModelConfig, rank: Rank | None) -> CpuDecoder | None:
        """Return the C decoder; None: layers run operation by operation, as those of hidden states in streams do."""
        if self.streams is not None:
            return None
        return cpu_decoder(
            whole,
            self.operations,
            self.layers,
            self.embedding,
            self._norm,
            self._float_norm,
            self.head,
            rank=rank,
            per_layer=self.per_layer,
        )

    def gather(self, parts: GatheredParts) -> None:
        """Put the results of a rank's operations, which run one by one, together with those of the others."""
        self.layers = [parts.layer(layer, index) for index, layer in enumerate(self.layers)]
        self.embedding = parts.embedding(self.embedding)
        if self.head is not None:
            self.head = parts.head(self.head)
        self.has_gathered_ends = True

    def _make_head(self, weight: StoredMatrix, bias: Floats | None = None) -> Product:
        return self.operations.head(weight, bias)

    def drop_weights(self) -> None:
        """Free the memory of the weights. The model cannot compute any more; its config and sizes stay."""
        self.decoder = self.per_layer = self.streams = self.head = None
        self.layers.clear()
        for name in ("embedding", "_norm", "_float_norm"):
            self.__dict__.pop(name, None)

    @property
    def final_norm(self) -> Norm:
        """Return the norm after the last layer. Its results are float32."""
        return self._float_norm

    @property
    def variant(self) -> str:
        """Return the names of all kernels and summation orders in use.

        Together with config, weights and dtype it fixes the bits of each logit.
        """
        parts = [f"{name}={variant}" for name, variant in self.product_variants.items()]
        if isinstance(self.config.rope_scaling, LongropeScaling):
            parts.append(f"longrope={'long' if self.config.rope_scaling.is_long(self._length) else 'short'}")
        return " ".join((*parts, self.operations.variant))

    @property
    def first_variants(self) -> dict[str, str]:
        """Return the variants of the products by name of the first layer with attention and of the first layer."""
        attending = next((layer for layer in self.layers if not layer.mixer.is_recurrent), self.layers[0])
        return {name: product.variant for name, product in {**attending.products, **self.layers[0].products}.items()}

    @property
    def product_variants(self) -> dict[str, str]:
        """Return the variants of the products by name: those of the first layers, of the last layer, and the head's."""
        products: dict[str, Any] = dict(self.layers[-1].products)
        if self.head is not None:
            products["head"] = self.head
        if self.per_layer is not None:
            products["per_layer"] = self.per_layer
        return {**self.first_variants, **{name: product.variant for name, product in products.items()}}

    @property
    def library(self) -> CpuLibrary | None:
        """Return the C kernels; None: the model runs without them."""
        return self.operations.library if isinstance(self.operations, CpuOperations) else None

    @property
    def reads_features(self) -> bool:
        """Whether ModelInputs.given may be set: the C decoder and a device read it.

        Rows for positions are not added to given embeddings. Of inputs of single layers, an image's tokens have what
        follows from their embeddings, and of the table the rows of one token.
        """
        reads = self.decoder is not None or isinstance(self.operations, GivingOperations)
        return reads and not self.config.position_table

    def tap(self, places: Sequence[int]) -> None:
        """In each step, keep the residual stream as it is after these numbers of layers.

        The C decoder keeps it for StepResult.states_of(), and then 0 is a place too; hidden_states() appends it to a
        list. places: from 1 to the number of layers. Call it before the first step.
        """
        self.taps = tuple(places)
        if self.decoder is not None:
            self.decoder.tap(places)

    def settle_length(self, max_model_len: int) -> None:
        """Set the rotary embeddings that depend on the number of tokens of the longest request."""
        self._length = max_model_len
        self.operations.settle_length(max_model_len)

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache for one block of block_size tokens, all layers together."""
        return self.operations.bytes_per_block(block_size)

    def split_cache(self, num_blocks: int) -> None:
        """Divide caches into pages of num_blocks (core/models/layers/cache_pages.py).

        Call this before any is allocated.
        """
        assert isinstance(self.operations, CpuOperations), type(self.operations)
        self.operations.split_cache(num_blocks)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        return self.operations.allocate_cache(num_blocks, block_size)

    def allocate_states(self, num_rows: int) -> Floats | None:
        """Allocate the recurrent states of num_rows rows; None for a model without any. Errors: MemoryError."""
        return allocate_states(num_rows, self.config.state_size) if self.config.recurrent is not None else None

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
        """Return the attention work of a step, one per kind of layer in the model; see Model."""
        of_windows = block_tables if window_tables is None else window_tables
        if cache is not self._cache:
            self._use(cache)
        work = {
            key: self.operations.attention_work(
                num_tokens,
                context_lens,
                block_tables if window is None else of_windows,
                part,
                window,
                generation,
                None if self._in_windows and window is None else wholes,
            )
            for key, (window, part) in self._parts.items()
        }
        return tuple([work[key] for key in self._kinds])

    def _use(self, cache: KVCache) -> None:
        """Note which part of this cache each kind of layer has. Most steps use the same cache."""
        parts = [(window, cache.part(place)[0]) for window, place in zip(self.windows, self._places, strict=True)]
        self._cache, self._kinds = cache, [(window, id(part)) for window, part in parts]
        self._parts = dict(zip(self._kinds, parts, strict=True))
        #: Whether tokens of an image see each other in window layers only, as in Gemma 4.
        self._in_windows = self.config.wholes_in_windows

    def forward(self, inputs: ModelInputs) -> StepResult:
        """Run one step.

        With the C kernels it is one call, which computes the last layer only for rows with logits. Otherwise operations
        run one by one.
        """
        if self.decoder is None:
            return self.result(self.hidden_states(inputs), inputs.logits_rows)
        token_ids, positions, slots, attention, cache, logits_rows, generation, adapters, *_ = inputs
        assert isinstance(cache, CpuKVCache | MixedKVCache), type(cache)
        lora, given = None if adapters is None else lora_rows(adapters), inputs.given
        if given is not None:
            assert not isinstance(given, GivenRows), "the C decoder finds the rows by token ids"
        return self.decoder(
            token_ids,
            positions,
            slots,
            attention,
            cache,
            logits_rows,
            generation,
            lora,
            given,
            inputs.requests,
            inputs.window_slots,
            inputs.turned,
            inputs.begun,
        )

    def hidden_states(self, inputs: ModelInputs, tapped: list[Tensor] | None = None) -> Tensor:
        """Run the layers operation by operation, and return the last layer's output [T, hidden] float32.

        tapped: to it the residual stream [T, hidden] float32 at each place of tap() is added.
        """
        operations, own, given = self.operations, self.per_layer, inputs.given
        requests, turned = inputs.requests, inputs.turned
        step = operations.step(inputs.positions, inputs.slots, inputs.attention, inputs.cache, requests, turned)
        places = (inputs.positions,) if self.config.adds_places else ()
        hidden = self.embedding(inputs.token_ids, *places)
        if self.streams is not None:
            layers = self.layers if inputs.adapters is None else self._adapted(inputs.adapters)
            parts = self.config.per_layer
            assert own is not None, "layers of several streams have inputs of their own"
            assert parts is not None, own
            ids = (inputs.token_ids + 1) * (inputs.token_ids < parts.vocab_size) - 1  # the others are -1
            return run_layers(layers, self.streams, hidden, step, own, ids)
        if isinstance(given, GivenRows):
            self._put(hidden, given.places, given.rows[:, : self.config.hidden_size])
        projected = None if own is None else own.project(hidden)
        x = self.layers[0].input_norm(hidden)
        for index, layer in enumerate(self.layers if inputs.adapters is None else self._adapted(inputs.adapters)):
            x = layer.attention_out(layer.mixer(x, step))
            if layer.mlp is not None:
                x = layer.mlp(layer.mlp_norm.after(hidden, x))
                x = layer.mlp_out(x if layer.beside is None else layer.beside(hidden, x))
            if layer.own_inputs is not None and own is not None:
                operations.add(hidden, x)
                x = layer.own_inputs(hidden, own, inputs.token_ids, projected, index)
            follows = index + 1 < len(self.layers)
            if layer.scale is None and follows:
                x = self.layers[index + 1].input_norm.after(hidden, x)
            else:
                operations.add(hidden, x)
                if layer.scale is not None:
                    assert isinstance(operations, LayerwiseOperations), type(operations)
                    operations.scaled(hidden, layer.scale)
                if follows:
                    x = self.layers[index + 1].input_norm(hidden)
            if isinstance(given, GivenRows):
                self._deepen(hidden, x, given, index)
            if tapped is not None:
                tapped += [hidden * 1 for place in self.taps if place == index + 1]  # hidden changes
        return hidden

    def _put(self, target: Tensor, places: Tensor, rows: Tensor) -> None:
        assert isinstance(self.operations, GivingOperations), type(self.operations)
        self.operations.put(target, places, rows)

    def _deepen(self, hidden: Tensor, x: Tensor, given: GivenRows, index: int) -> None:
        """Add to hidden what images' tokens get after this layer. x: the next layer's input, renewed for them."""
        width = self.config.hidden_size
        added = given.rows[:, (index + 1) * width : (index + 2) * width]
        if not added.shape[1]:
            return
        rows = self.operations.pick(hidden, given.places.clamp_min(0)) + added
        self._put(hidden, given.places, rows)
        if index + 1 < len(self.layers):
            self._put(x, given.places, self.layers[index + 1].input_norm(rows))

    def _adapted(self, adapters: TokenAdapters) -> list[Layer]:
        """Return the layers, with products to which the tokens' adapters add."""
        assert isinstance(self.operations, AdaptingOperations), type(self.operations)
        return [adapted_layer(layer, index, self.operations, adapters) for index, layer in enumerate(self.layers)]

    def result(self, hidden: Tensor, rows: Ints) -> HiddenResult:
        """Return the result of a step. hidden: from hidden_states(). rows [S] int64: tokens whose logits are needed."""
        operations = self.operations
        return HiddenResult(
            rows,
            self.vocab_size,
            lambda picked: operations.to_host(self.logits(hidden, picked)),
            lambda picked: operations.to_host(self.final_states(hidden, picked)),
        )

    def final_states(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return these rows [n] of hidden_states() after the final norm [n, hidden] float32."""
        return self._float_norm(self.operations.pick(hidden, rows))

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [n, vocab] float32 for these rows [n] of hidden_states(), on the operations' device."""
        assert self.head is not None, "this part of a model has no head"
        logits = self.head(self._norm(self.operations.pick(hidden, rows)))
        return logits if self.config.logits_cap is None else self.operations.capped(logits, self.config.logits_cap)
