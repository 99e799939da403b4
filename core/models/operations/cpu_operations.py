"""CpuOperations: a model's operations with C kernels. Each operation is one call for the whole batch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from core.models.config import Activation, EncoderActivation, HeadSizes, LatentParts, ModelConfig
from core.models.grid_parts import GridActivation
from core.models.layers.cache_pages import CachePages, Widths, blocks_per_page, cache_pages
from core.models.layers.layer_kinds import cached_layers, places_of_parts, windows
from core.models.layers.rotary import of_each_kind, rotary_embeddings
from core.models.operations.cpu_head_place import CpuHeadPlace
from core.models.operations.cpu_latent import CpuLatentAttend
from core.models.operations.cpu_streams import CpuStreams
from core.models.operations.latent_weights import LatentWeights
from core.models.operations.second_forms import SecondForms
from core.models.operations.stored_matrix import StoredMatrix
from core.models.operations.tensor import Operation
from core.models.operations.token_adapters import TokenAdapters
from core.models.operations.unchanged import unchanged
from core.models.operations.weight_form import WeightForm
from ipc.tables.arrays import AnyInts, Floats, Ints, UInt8s
from kernels.cpu.attention import CpuAttention, sink_scores
from kernels.cpu.attention_plan import TILE, AttentionPlan, AttentionPlanner
from kernels.cpu.decoder_parts import exceed_caches
from kernels.cpu.elementwise import cap_logits, open_gates
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.experts import CpuExperts, ExpertProducts
from kernels.cpu.gemm import PackedMatrix, SecondForm, pack, pack_second
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.latent import CpuLatent
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary, arithmetic_of
from kernels.cpu.lora import CpuAdapter, LoraRows, multiply_adapted
from kernels.cpu.norm import CpuNorm
from kernels.cpu.packed_weights import QUANTIZED, PackedWeights
from kernels.cpu.per_layer import CpuPerLayerInputs
from kernels.cpu.quantized import BlockRows
from kernels.cpu.recurrence import CpuRecurrence
from kernels.cpu.rope import CpuRope, RotaryTable
from kernels.cpu.sampling import CpuSampler
from kernels.dequantize import BLOCK_SIZES, PLAIN_TYPES
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers, to_floats
from kernels.low_rank import LowRank, ProductShape
from kernels.memory.aligned import ALIGNMENT
from kernels.memory.kv_cache import KVCache, MixedKVCache
from kernels.recurrence import RecurrenceParts, StateRows
from kernels.rounding import round_up
from kernels.routing import Routing
from kernels.value_form import ValueForm

_ROWS_AT_ONCE = 1024  # of a table that is converted

#: Returns the packed bytes of a name, and facts about them; or calls the function, which makes them, and keeps them.
TakePacked = Callable[[str, Callable[[], tuple[UInt8s, tuple[int, ...]]]], tuple[UInt8s, tuple[int, ...]]]


class CpuStep(NamedTuple):
    """The inputs that attention needs in one step of T tokens."""

    positions: Ints  # [T]
    slots: Ints  # [T], -1 = do not store
    tables: tuple[RotaryTable | None, ...]  # one for each kind of layer; None = heads are not rotated
    work: tuple[AttentionPlan, ...]  # one for each kind of layer
    cache: KVCache
    requests: StateRows | None = None  # of recurrent states


@dataclass(frozen=True)
class CpuRecur:
    """One layer's recurrence."""

    recurrence: CpuRecurrence

    def __call__(self, tokens: Numbers, step: CpuStep, place: int) -> Numbers:
        assert step.requests is not None, "a step of a model with recurrent states lacks them"
        assert place == self.recurrence.offset, (place, self.recurrence.offset)
        return self.recurrence(tokens, step.positions, step.requests)


@dataclass(frozen=True)
class CpuAttend:
    """One layer's attention: normalise and rotate heads, store K and V, attend. kind: see layer_kinds.py."""

    rope: CpuRope
    attention: CpuAttention
    kind: int
    scale: float
    cap: float | None = None  # of the scores
    sinks: Floats | None = None  # [H], from sink_scores()

    def __call__(self, qkv: Numbers, step: CpuStep, index: int) -> Numbers:
        q = self.store(qkv, step, index)
        cache, place = step.cache.part(index)
        return self.attention(q, cache, place, step.work[self.kind], self.scale, self.cap, self.sinks)

    def store(self, qkv: Numbers, step: CpuStep, index: int) -> Numbers:
        """Store K and V of the step's tokens. Return Q, normalised and rotated."""
        cache, place = step.cache.part(index)
        return self.rope(qkv, step.tables[self.kind], step.positions, cache, place, step.slots)


class CpuOperations:
    """Operations with the C kernels, at numerics level L2. The methods are documented at Operations.

    shares_blocks: see AttentionPlan; no bit depends on it. take_packed: returns packed bytes by name, and makes those
    that it does not have (core/model_files/weight_cache.py). second_forms: those to pack later; None = at once.
    """

    is_exact = True

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        library: CpuLibrary,
        form: WeightForm = WeightForm.STORED,
        *,
        cache_type: type[CpuKVCache] = CpuKVCache,
        shares_blocks: bool = True,
        take_packed: TakePacked | None = None,
        second_forms: SecondForms | None = None,
    ) -> None:
        self._config, self._dtype, self.library, self.form = config, dtype, library, form
        self._cache_type, self.shares_blocks, self._take_packed = cache_type, shares_blocks, take_packed
        self._is_kept = not exceed_caches(config.num_matrix_weights * dtype.itemsize)
        self.tables = _rotary_tables(config)
        self._attention = CpuAttention(library)
        self._plans: dict[int, AttentionPlanner] = {}  # by KV heads
        self._cached = cached_layers(config)  # the layers with K and V
        self.sampler = CpuSampler(library)
        self._pages: CachePages | None = None
        self.second_forms, self._num_packed_bytes = second_forms, 0

    @property
    def num_packed_bytes(self) -> int:
        """Return the bytes of all matrices that it has made, but for routers. What comes later is estimated."""
        own, later = self._num_packed_bytes, self.second_forms
        return own if later is None else later.total_bytes(own)

    @property
    def variant(self) -> str:
        """Return the names of the kernels and constants that determine the results' bits; part of the fingerprint."""
        stored_as = self._cache_type.stored_as
        kernels = f"c-{self.library.variant} arithmetic={arithmetic_of(self.library.variant)} attention={TILE}"
        return f"{kernels} kv={stored_as}" if stored_as else kernels

    def wake(self) -> None:
        """Wake the kernels' threads."""
        self.library.wake_threads()

    def embedding(
        self,
        table: StoredMatrix,
        scale: float,
        head: Operation | None,
        places: Floats | None = None,
        kinds: Floats | None = None,
    ) -> CpuEmbedding:
        """Return the embedding. It reads the packed head if the table is the head's weight."""
        if self._config.encoder is not None:
            return CpuEmbedding(self.library, table.own(self._dtype), scale, kinds=kinds, places=places)
        if isinstance(head, PackedMatrix):
            return CpuEmbedding(self.library, head, scale, places=places)  # the packed head replaces the table
        is_stored = self._dtype == BFLOAT16 and self.form is not WeightForm.DENSE
        if is_stored and (part := table.parts[0]).type_name not in PLAIN_TYPES and len(table.parts) == 1:
            kept, _ = self._taken(table, "blocks", lambda: (part.data.copy().reshape(-1), ()))
            blocks = BlockRows(part.type_name, kept.reshape(part.data.shape))
            return CpuEmbedding(self.library, blocks, scale, places=places)
        numbers, _ = self._taken(table, "rows", lambda: (table.own(self._dtype).reshape(-1).view(np.uint8), ()))
        return CpuEmbedding(self.library, numbers.view(self._dtype).reshape(table.shape), scale, places=places)

    def linear(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
        activation: EncoderActivation | GridActivation | None = None,
    ) -> PackedMatrix:
        """Pack the weight and return the product, with an activation applied to its result if one is given."""
        return self._packed(weight, bias, out_dtype=out_dtype, activation=activation)

    def head(self, weight: StoredMatrix, bias: Floats | None = None) -> PackedMatrix:
        """Pack the weight and return the product with float32 results."""
        return self._packed(weight, bias, out_dtype=FLOAT32)

    def norm(
        self,
        weight: Floats | None,
        eps: float,
        dtype: Dtype,
        *,
        bias: Floats | None = None,
        is_centred: bool = False,
        precedes: bool = False,
        replaces: bool = False,
    ) -> CpuNorm:
        """Return the norm with this weight [d] float32."""
        return CpuNorm(
            self.library,
            weight,
            eps,
            dtype,
            multiplier=self._config.residual_multiplier,
            bias=bias,
            is_centred=is_centred,
            precedes=precedes,
            replaces=replaces,
        )

    def activated(
        self,
        weight: StoredMatrix,
        function: Activation,
        bias: Floats | None = None,
        constants: Floats | None = None,
    ) -> tuple[PackedMatrix, Operation]:
        """Return a product that applies the activation itself, and `unchanged`."""
        return self._packed(weight, bias, activation=function, constants=constants), unchanged

    def gate_up(
        self, weight: StoredMatrix, function: Activation | GridActivation, bias: Floats | None = None
    ) -> tuple[PackedMatrix, Operation]:
        """Return a product that applies the activation itself, and `unchanged`."""
        return self._packed(weight, bias, gate=function), unchanged

    def _packed(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
        gate: str | None = None,
        activation: str | None = None,
        constants: Floats | None = None,
    ) -> PackedMatrix:
        """Pack the weight as stored if bfloat16 products can read that form, otherwise as the model's dtype."""
        has_both = self.form is WeightForm.BOTH
        packed = self._pack(weight, WeightForm.STORED if has_both else self.form, is_gated=gate is not None)
        self._count(packed)
        return PackedMatrix(
            self.library,
            packed,
            bias,
            dtype=self._dtype,
            out_dtype=out_dtype,
            gate=gate,
            activation=activation,
            constants=constants,
            second=self._second_form(weight, packed) if has_both and packed.packing == QUANTIZED else None,
        )

    def _second_form(self, weight: StoredMatrix, first: PackedWeights) -> SecondForm:
        """Return the dequantized form of a quantized matrix, or where it will be."""
        make = partial(pack_second, self.library, first, is_kept=self._is_kept)
        if self.second_forms is not None:
            return self.second_forms.add(make)
        packed = self._take_or_make(weight, WeightForm.DENSE, make, is_gated=first.is_gated)
        self._count(packed)
        return SecondForm(packed)

    def _count(self, packed: PackedWeights) -> None:
        self._num_packed_bytes += round_up(packed.packed.nbytes, ALIGNMENT)

    def _pack(self, weight: StoredMatrix, form: WeightForm, *, is_gated: bool = False) -> PackedWeights:
        """Take the packed weight from the cache, or pack it."""
        return self._take_or_make(
            weight, form, lambda: self._pack_now(weight, form, is_gated=is_gated), is_gated=is_gated
        )

    def _take_or_make(
        self, weight: StoredMatrix, form: WeightForm, make_packed: Callable[[], PackedWeights], *, is_gated: bool
    ) -> PackedWeights:
        def make() -> tuple[UInt8s, tuple[int, ...]]:
            packed = make_packed()
            return packed.packed, (ELEMENT_NUMBERS[packed.dtype], packed.packing, int(packed.has_whole_panels))

        name = f"{form.name} gated={is_gated} kept={self._is_kept}"
        data, (element, packing, has_whole_panels) = self._taken(weight, name, make)
        dtype = next(dtype for dtype, number in ELEMENT_NUMBERS.items() if number == element)
        return PackedWeights(data, *weight.shape, dtype, packing, is_gated, has_whole_panels=bool(has_whole_panels))

    def _taken(
        self, weight: StoredMatrix, form: str, make: Callable[[], tuple[UInt8s, tuple[int, ...]]]
    ) -> tuple[UInt8s, tuple[int, ...]]:
        if self._take_packed is None or not weight.source:
            return make()
        return self._take_packed(f"{weight.source} {form}", make)

    def _pack_now(self, weight: StoredMatrix, form: WeightForm, *, is_gated: bool) -> PackedWeights:
        in_8_bits, stored = form is WeightForm.INT8, None
        if in_8_bits or (self._dtype == BFLOAT16 and form is WeightForm.STORED):
            stored = weight.quantized(self.library, is_gated=is_gated, in_8_bits=in_8_bits)
        if stored is not None and (self._dtype == BFLOAT16 or not stored.has_whole_panels):
            return stored  # whole panels are for bfloat16
        numbers = weight.dense(self._dtype, self.library.memory.brief)
        return pack(self.library, numbers, self._dtype, is_gated=is_gated, is_kept=self._is_kept)

    def router(self, weight: StoredMatrix, bias: Floats | None = None) -> PackedMatrix:
        """Return the product of a routed MLP's router. It never uses 8 bits, which would choose other experts."""
        return PackedMatrix(self.library, self._pack(weight, WeightForm.DENSE), bias, out_dtype=FLOAT32)

    def per_layer_inputs(
        self, table: StoredMatrix | None, projection: StoredMatrix, norm: Floats, *, scale: float, eps: float
    ) -> CpuPerLayerInputs:
        """Return the inputs of all layers. The table stays in the mapped file if its numbers can be read there."""
        if table is None:
            return CpuPerLayerInputs(self.library, None, self._packed(projection), norm=norm, eps=eps)
        width, part = len(norm), table.parts[0]
        row_bytes = part.data.shape[1] * width // part.depth
        is_stored = self._dtype == BFLOAT16 and len(table.parts) == 1 and part.type_name not in PLAIN_TYPES
        own = self._config.per_layer
        assert own is not None, "a model without inputs of single layers"
        rows: Numbers | BlockRows
        place = (own.first_layer, own.row_layers) if own.row_layers else None
        if is_stored and width % BLOCK_SIZES[part.type_name][0] == 0:
            rows = BlockRows(part.type_name, part.data.reshape(-1, row_bytes))
        elif place is None or (len(table.parts) == 1 and PLAIN_TYPES.get(part.type_name) == self._dtype):
            rows = table.dense(self._dtype).reshape(-1, width)
        else:
            first, count, place = own.first_layer * width, self._config.num_hidden_layers * width, None
            rows = _columns(table, first, first + count, self._dtype).reshape(-1, width)
        lookup, product = CpuEmbedding(self.library, rows, scale), self._packed(projection)
        options: dict[str, Any] = {"given_id": own.given_id, "place": place}
        return CpuPerLayerInputs(self.library, lookup, product, norm=norm, eps=eps, **options)

    def experts(
        self,
        router: PackedMatrix,
        experts: Sequence[ExpertProducts],
        routing: Routing,
        shared: ExpertProducts | None = None,
    ) -> CpuExperts:
        """Return the routed MLP of these experts."""
        return CpuExperts(self.library, router, experts, routing, shared=shared)

    def attention(
        self, kind: int, norms: Floats | None, sinks: Floats | None = None, values: ValueForm = "own"
    ) -> CpuAttend:
        """Return the attention of one layer."""
        config = self._config
        rope = CpuRope(
            self.library,
            config.num_attention_heads,
            norms,
            config.rms_norm_eps,
            of_rows=config.qk_norm_of_rows,
            is_centred=config.centred_norms,
            is_after=config.qk_norm_after,
            values=values,
            row=config.row_of_heads,
        )
        scores = None if sinks is None else sink_scores(sinks)
        return CpuAttend(rope, self._attention, kind, config.scores_scale, config.scores_cap, scores)

    def latent_attention(self, kind: int, latent: LatentParts, weights: LatentWeights) -> CpuLatentAttend:
        """Return latent attention with these weights. The heads' own matrices are not multiplied in 8 bits."""
        parts = CpuLatent(
            self.library,
            [self._head_product(each) for each in weights.keys],
            [self._head_product(each) for each in weights.values],
            weights.latent_norm,
            rotated_dim=latent.rotated_dim,
            eps=latent.norm_eps,
            query=None if weights.query is None else self._packed(weights.query),
            query_norm=weights.query_norm,
        )
        return CpuLatentAttend(parts, self._attention, kind, self._config.scores_scale)

    def _head_product(self, weight: StoredMatrix) -> PackedMatrix:
        if self.form is not WeightForm.INT8:
            return self._packed(weight)
        return PackedMatrix(self.library, self._pack(weight, WeightForm.DENSE))

    def settle_length(self, length: int) -> None:
        """Set the rotary embeddings that depend on the length of the longest context."""
        for table, rotary in zip(self.tables, rotary_embeddings(self._config, length), strict=True):
            if table is not None:
                table.settle(*rotary)

    def recurrence(self, parts: RecurrenceParts, place: int) -> CpuRecur:
        """Return the recurrence of one layer."""
        return CpuRecur(CpuRecurrence(self.library, parts, self._dtype, place))

    def open_gates(self, mixed: Numbers, gates: Numbers) -> Numbers:
        """Multiply attention's output by the sigmoid of gates, in place."""
        open_gates(self.library, mixed, gates)
        return mixed

    def step(
        self,
        positions: Ints,
        slots: Ints,
        work: tuple[AttentionPlan, ...],
        cache: KVCache,
        requests: StateRows | None = None,
        turned: Ints | None = None,
    ) -> CpuStep:
        """Return the step's inputs of attention, with rotary tables as long as the longest context.

        Without work K and V can be stored.
        """
        assert turned is None, "only a decoder's own step turns heads by other positions"
        assert isinstance(cache, CpuKVCache | MixedKVCache), type(cache)
        tables = tuple(table for table in self.tables if table is not None)
        longest = work[0].longest if work else int(positions.max()) + 1
        for table in tables:
            table.reach(longest)
        return CpuStep(np.ascontiguousarray(positions), np.ascontiguousarray(slots), tables, work, cache, requests)

    def of_head(self, config: ModelConfig) -> "tuple[CpuOperations, CpuHeadPlace]":
        """Return operations like these for a head whose layer is that of this config, and where it computes."""
        options: dict[str, Any] = {"shares_blocks": self.shares_blocks, "second_forms": self.second_forms}
        own = CpuOperations(config, self._dtype, self.library, self.form, **options)
        return own, CpuHeadPlace(self._dtype, own.allocate_cache)

    def pack_adapter(self, shapes: Sequence[ProductShape], products: Sequence[Sequence[LowRank | None]]) -> CpuAdapter:
        """Return an adapter packed for the C kernels."""
        return CpuAdapter(shapes, products, self._dtype)

    def multiply_adapted(self, product: PackedMatrix, x: Numbers, adapters: TokenAdapters, number: int) -> Numbers:
        """Return the product plus what the tokens' adapters add; if there is a gate, they add before it."""
        return multiply_adapted(self.library, product, x, lora_rows(adapters), number)

    def add(self, hidden: Floats, x: Numbers) -> None:
        """Add x times the residual multiplier to hidden, in place."""
        hidden += to_floats(x) * np.float32(self._config.residual_multiplier)

    def scaled(self, hidden: Floats, scale: float) -> None:
        """Multiply hidden by the scale, in place."""
        hidden *= np.float32(scale)

    def capped(self, logits: Floats, cap: float) -> Floats:
        """Return cap * tanh(logits / cap), in place."""
        cap_logits(self.library, logits, cap)
        return logits

    def streams(self) -> CpuStreams:
        """Return the arithmetic of hidden states in several streams."""
        return CpuStreams(self.library, self._dtype)

    def pick(self, hidden: Floats, rows: Ints) -> Floats:
        """Return these rows of hidden."""
        return hidden[rows]

    def to_host(self, numbers: Floats) -> Floats:
        """Return the numbers unchanged."""
        return numbers

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
        wholes: Ints | None = None,
    ) -> AttentionPlan:
        """Return the plan that splits the step's attention among threads."""
        plan = self._plans.get(cache.num_kv_heads)
        if plan is None:
            heads, is_causal = self._config.num_attention_heads, self._config.is_causal
            shares = self.shares_blocks
            plan = AttentionPlanner(self.library, heads, cache.num_kv_heads, is_causal=is_causal, shares_blocks=shares)
            self._plans[cache.num_kv_heads] = plan
        return plan(num_tokens, context_lens, block_tables, cache.block_size, window, generation, wholes)

    def split_cache(self, num_blocks: int) -> None:
        """Divide caches, before any is allocated, into pages of num_blocks (core/models/layers/cache_pages.py)."""
        self._pages = cache_pages(self._config, num_blocks, self._widths(self._config))

    def blocks_per_page(self, whole: ModelConfig) -> int:
        """Return how many blocks a page has; 0: pages do not pay. whole: the model of which this may be a part."""
        return blocks_per_page(whole, self._widths(whole))

    def _widths(self, config: ModelConfig) -> Widths:
        """Return what a token takes in layers that see everything, and in those with a window."""
        full, sliding = config.full_heads, HeadSizes(config.num_key_value_heads, config.head_dim)
        every = [
            heads.num_key_value_heads * self._cache_type.stored_width(heads.head_dim, self._dtype)[0]
            for heads in (full or sliding, sliding)
        ]
        return every[0], every[1]

    def _counts(self) -> dict[HeadSizes, int]:
        """Return how many arrays the cache has for heads of each size; with pages, one size has those of all layers."""
        counts = dict(Counter(kind.heads for kind in self._cached))
        if self._pages is None:
            return counts
        first = next((kind.heads for kind in self._cached if kind.window is None), self._cached[0].heads)
        return {first: self._pages.num_arrays}

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache of one block, all layers together; heads are padded."""
        num_sides = 2 if self._config.latent is None else 1
        return sum(
            self._cache_type.bytes_per_block(block_size, *heads, count, self._dtype, num_sides=num_sides)
            for heads, count in self._counts().items()
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> CpuKVCache | MixedKVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        latent = self._config.latent
        value_dim = None if latent is None else latent.latent_dim
        parts = {
            heads: self._cache_type(
                count,
                num_blocks,
                block_size,
                heads.num_key_value_heads,
                head_dim=heads.head_dim,
                dtype=self._dtype,
                value_dim=value_dim,
            )
            for heads, count in self._counts().items()
        }
        first = next(iter(parts.values()))
        own = [kind.heads for kind in self._cached]
        sizes = list(dict.fromkeys(own))
        if self._pages is not None:
            of_size = {
                heads: [place for place, size in zip(self._pages.places, own, strict=True) if size == heads]
                for heads in sizes
            }
            for heads in sizes:
                if heads in parts:
                    first.share(of_size[heads])
                else:
                    parts[heads] = first.within(*heads, of_size[heads])
        if len(sizes) == 1:
            return first
        return MixedKVCache([parts[heads] for heads in sizes], places_of_parts(own))


def _columns(table: StoredMatrix, first: int, last: int, dtype: Dtype) -> Numbers:
    """Return some columns of a table in dtype. It may be much larger, so it is never converted as a whole."""
    columns = np.empty((table.shape[0], last - first), dtype)
    for begin in range(0, len(columns), _ROWS_AT_ONCE):
        rows = table.rows(begin, begin + _ROWS_AT_ONCE).dense(dtype)
        columns[begin : begin + _ROWS_AT_ONCE] = rows[:, first:last]
    return columns


def lora_rows(adapters: TokenAdapters) -> LoraRows:
    """Return the adapters of a step's tokens in the form that the C kernels take."""
    addresses = np.array([*(one.address for one in adapters.packed), 0], np.int64)  # -1 is the last
    return LoraRows(addresses[adapters.of_token], max((one.width for one in adapters.packed), default=0))


def _rotary_tables(config: ModelConfig) -> tuple[RotaryTable | None, ...]:
    """Return the rotary table of each kind of layer, or None for a model with a position table."""
    if config.encoder is not None and config.encoder.num_positions:
        return (None,) * len(windows(config))
    return of_each_kind(lambda rotary: RotaryTable(*rotary), rotary_embeddings(config))
