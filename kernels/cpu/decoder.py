"""CpuDecoder: a decoder's whole step (embedding, layers, final norm, head) as one C call (c/layers/decoder.h)."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from kernels.arrays import Floats, Int32s, Ints
from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import AttentionPlan
from kernels.cpu.decoder_parts import (
    AttentionParts,
    LayerParts,
    beside_arguments,
    decoder_arguments,
    deepest_in_8_bits,
    exceed_caches,
    latent_of,
    layer_arguments,
    mixed_width,
    own_input_arguments,
    tail_length,
    weight_bytes,
    widths_of,
)
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.experts import Room
from kernels.cpu.gemm import PackedMatrix, blocks_in_8_bits, row_bytes_in_8_bits
from kernels.cpu.group import DecoderGroup, SeparateMemory, SharedMemory
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.lora import LoraRows
from kernels.cpu.norm import CpuNorm
from kernels.cpu.per_layer import CpuPerLayerInputs
from kernels.cpu.recurrence import CpuRecurrence
from kernels.cpu.rope import RotaryTable
from kernels.cpu.structs import (
    KindArguments,
    LayerArguments,
    StepArguments,
)
from kernels.elements import FLOAT32, Dtype, Numbers
from kernels.memory.aligned import aligned_empty
from kernels.memory.kv_cache import MixedKVCache
from kernels.recurrence import MIXED_ROWS, StateRows


class DecoderResult:
    """A step's result, with the protocol in core/models/step.py. Valid until the decoder's next step or plans."""

    __slots__ = ("_decoder", "_number", "largest", "logits")

    def __init__(self, decoder: "CpuDecoder", number: int, logits: Floats, largest: Int32s) -> None:
        """Keep logits [S, vocab] float32 and largest [S]: their CpuSampler.largest(), as the step wrote them."""
        self._decoder, self._number, self.logits, self.largest = decoder, number, logits, largest

    def logits_of(self, rows: Ints) -> Floats:
        """Return the logits [n, vocab] float32 of rows [n] int64; n is at most the step's number of tokens."""
        return self._decoder.logits(self._number, rows)

    def hidden_of(self, rows: Ints) -> Floats:
        """Return the hidden states after the final norm [n, hidden] float32 of rows [n], as in logits_of()."""
        return self._decoder.normalised(self._number, rows)

    def states_of(self, rows: Ints) -> Floats:
        """Return what the decoder taps [n, taps, hidden] float32 for rows [n], as in logits_of()."""
        return self._decoder.states(self._number, rows)


class CpuDecoder:
    """Runs a decoder's whole step in one C call.

    Its bits are the same as if the single kernels were called one after the other. A cache of one layer can serve all
    layers in turn, for models whose prompts are computed in one step. The next step overwrites the result of the
    previous one.
    """

    _cache: CpuKVCache | MixedKVCache | None = None
    _parts: Sequence[CpuKVCache] = ()  # of the cache, for each kind of layer
    _memory: SharedMemory | SeparateMemory | None = None  # of a rank's group
    _recurred_width = 0  # of the group's buffer of gated results
    _columns: tuple[Ints, ...] = ()  # the last step's, kept alive
    _lora: LoraRows | None = None  # the last step's, kept alive
    _given: Floats | None = None  # the last step's, kept alive
    _requests: StateRows | None = None  # the last step's, kept alive
    _window_slots: Ints | None = None  # the last step's, kept alive
    _turned: Ints | None = None  # the last step's, kept alive
    _deep: Floats | None = None  # the last step's, kept alive
    _begun: tuple[Ints | Floats, ...] | None = None  # the last step's, kept alive
    _taps: tuple[int, ...] = ()  # see tap()
    _finished: tuple[int, Ints] = (0, np.zeros(0, np.int64))  # the last call of _finish(): number of the step, rows

    def __init__(
        self,
        library: CpuLibrary,
        layers: Sequence[LayerParts],
        embedding: CpuEmbedding,
        norm: CpuNorm,
        *,
        float_norm: CpuNorm,
        head: PackedMatrix | None,
        tables: Sequence[RotaryTable | None],
        num_heads: int,
        group: DecoderGroup | None = None,
        residual_multiplier: float = 1.0,
        logits_cap: float | None = None,
        per_layer: CpuPerLayerInputs | None = None,
        axes: Ints | None = None,
    ) -> None:
        """Prepare the C structs of a model. `head` must return float32, None = no logits; `float_norm` is `norm` with
        float32 results. `tables`: a rotary table for each kind of layer, None = no rotation; kinds may share one.
        `group`: the parts are a rank's, and num_heads its heads; None = this process is alone. per_layer: the inputs of
        single layers, None = there are none. axes [head_dim / 2]: which of several positions of a token turns each pair
        of a head; None = tokens have one position."""
        assert float_norm.dtype == FLOAT32, float_norm.dtype
        assert head is None or head.out_dtype == FLOAT32, head
        self._kept = (layers, embedding, norm, head)  # the C structs point into these
        self._layers = (LayerArguments * len(layers))(*map(layer_arguments, layers))
        self._width, self._vocab_size, self._dtype = embedding.width, head.out_features if head else 0, norm.dtype
        self._deepest = deepest_in_8_bits(layers, head)
        self._decoder = decoder_arguments(embedding, norm, head)
        self._decoder.layers, self._decoder.num_layers = ctypes.addressof(self._layers), len(layers)
        self._decoder.num_heads = self._num_heads = num_heads
        self._decoder.residual_multiplier, self._decoder.logits_cap = residual_multiplier, logits_cap or 0.0
        self._experts = [parts.experts for parts in layers if parts.experts is not None]
        self._per_layer, self._axes = per_layer, axes
        self._decoder.num_tail = self._num_tail = tail_length(layers)
        self._point_to_parts(layers)
        self._room = Room(None if group is None else group.memory)
        self._set_streams(exceed_caches(weight_bytes(layers, head)))
        self._widths, self._mixed_width = widths_of(self._width, layers), mixed_width(layers)
        if group is not None:
            self._join(group)
        norms = (norm for parts in layers for norm in (parts.attention_out_norm, parts.mlp_out_norm))
        self._normalises_added = any(norm is not None for norm in norms)
        self._kinds = (KindArguments * len(tables))()
        # Each kind has its own scratch memory.
        self._attention = [(CpuAttention(library), kind.attention) for kind in self._kinds]
        self._plans: tuple[AttentionPlan, ...] = ()
        self._step = StepArguments(
            decoder=ctypes.addressof(self._decoder), kinds=ctypes.addressof(self._kinds), num_tokens=0
        )
        self._float_norm = float_norm
        self._tables, self._num_positions = tables, 0  # positions covered by the step's cos and sin
        self._buffers: dict[str, Numbers] = {}
        self._generation = self._number = 0  # of these columns, 0 = none; of the last step
        self._results: tuple[Floats, Int32s]  # logits, and the index of the largest one in each row
        self._reserve(1, 1)
        names = "decoder_step", "decoder_logits"
        self._run, self._run_logits = (library.function(name, ctypes.POINTER(StepArguments)) for name in names)

    def _join(self, group: DecoderGroup) -> None:
        """Connect the decoder to its group, and set the widths of a rank's buffers."""
        self._memory, self._vocab_size = group.memory, int(group.vocabulary[-1])
        self._places, self._group = group, group.arguments  # the C struct points into the first one
        self._decoder.group = ctypes.addressof(self._group)
        for layer, attended, gated in zip(self._layers, group.attended, group.gated, strict=True):
            layer.attended, layer.gated = group.place(attended), group.place(gated)
        self._widths["own_attended"] = group.own_attended
        if latent_of(self._kept[0][0]) is None:
            self._widths["q"] = group.own_attended
        if group.recurrences is not None and group.recurrences.norm_size:
            recurring = [isinstance(parts.mix, CpuRecurrence) for parts in self._kept[0]]
            self._recurred_width = int(self._layers[recurring.index(True)].attended.width)

    def _point_to_parts(self, layers: Sequence[LayerParts]) -> None:
        """Point the layers to experts alongside their MLPs, and to what they make of their own inputs."""
        self._beside = {i: beside_arguments(one.beside) for i, one in enumerate(layers) if one.beside is not None}
        self._own_inputs = {
            i: own_input_arguments(one.own_inputs) for i, one in enumerate(layers) if one.own_inputs is not None
        }
        for index, beside in self._beside.items():
            self._layers[index].beside = ctypes.addressof(beside)
        for index, own in self._own_inputs.items():
            self._layers[index].per_layer = ctypes.addressof(own)
        if self._per_layer is not None:
            self._decoder.per_layer = ctypes.addressof(self._per_layer.arguments)

    def _set_streams(self, streams: bool) -> None:
        """Set whether the caches are too small to keep the weights from one step to the next (gemm.h)."""
        self._decoder.head.streams = streams
        for layer in self._layers:
            layer.qkv.streams = layer.o.streams = layer.gate_up.streams = layer.down.streams = streams
        for parts in self._kept[0]:
            if parts.output_gate is not None:
                parts.output_gate.arguments.streams = streams
        for own in self._own_inputs.values():
            own.gate.streams = own.out.streams = streams
        if self._per_layer is not None:
            self._per_layer.arguments.projection.streams = streams
        for experts in self._experts:
            experts.set_streams(streams)
        for latent in filter(None, map(latent_of, self._kept[0])):
            latent.set_streams(streams)

    def __call__(
        self,
        token_ids: Ints,
        positions: Ints,
        slots: Ints,
        plans: Sequence[AttentionPlan],
        cache: CpuKVCache | MixedKVCache,
        logits_rows: Ints,
        generation: int,
        lora: LoraRows | None = None,
        given: Floats | None = None,
        requests: StateRows | None = None,
        window_slots: Ints | None = None,
        turned: Ints | None = None,
        begun: tuple[Ints, Floats] | None = None,
    ) -> "DecoderResult":
        """Run one step.

        token_ids, positions and slots (-1 = do not store) are [T]; logits_rows [S] are indices of tokens; all int64.
        `plans` has one plan per kind of layer. lora: the rows' adapters; None = no row has one. given [.., (1 + deep) *
        hidden] float32: the embeddings for token ids below 0, which are -1 - row, and what is added to their hidden
        states after the first layers. requests: where the recurrent states are. window_slots [T]: the slots in layers
        with a window; None = the same as in the others. turned: the positions by which heads are rotated, [T], or
        [T, axes] if tokens have several; None = positions. begun: if `given` is what other layers have made of the
        tokens, what these layers' own inputs read: the tokens' ids [T] and embeddings [T, hidden] float32.
        Equal generations other than 0 mean that columns, plans, cache and the rest are the previous step's objects with
        new numbers.
        Then they are not read again: after the weights, each object that is touched costs microseconds.
        """
        if not generation or generation != self._generation:
            self._take(*map(np.ascontiguousarray, (token_ids, positions, slots, logits_rows)))
            self._use(cache, plans)
            self._point_to_slots(plans, None if window_slots is None else np.ascontiguousarray(window_slots))
            self._adapt(lora)
            self._give(given)
            self._place_states(requests)
            self._turn(turned)
            self._begin(begun)
            self._generation = generation
        if turned is None or turned.ndim == 1:
            longest = plans[0].arguments.longest if turned is None else int(turned.max()) + 1
            if longest > self._num_positions:
                self._reach(longest)
        for plan, part, (attention, arguments) in zip(plans, self._parts, self._attention, strict=True):
            attention.reserve(arguments, part, plan, self._num_heads)
        self._run(self._step)
        self._number += 1
        return DecoderResult(self, self._number, *self._results)

    @contextlib.contextmanager
    def first_layers(self, count: int) -> Iterator[None]:
        """Let steps in this context end after `count` layers. They have no logits: they show how long layers take."""
        whole = self._decoder.num_layers, self._decoder.num_tail
        assert 0 < count <= whole[0], (count, whole)
        self._decoder.num_layers, self._decoder.num_tail = count, 0
        try:
            yield
        finally:
            self._decoder.num_layers, self._decoder.num_tail = whole

    def tap(self, places: Sequence[int]) -> None:
        """In each step, keep the residual stream of the tokens after these numbers of layers, for states().

        places: from 0, of embeddings, to the number of layers. Call this before the first step.
        """
        num_layers = len(self._layers)
        assert all(0 <= place <= num_layers for place in places), (places, num_layers)
        self._taps = tuple(places)
        for index, place in enumerate(self._inner_taps):
            self._layers[place].tap = index + 1
        self._step.num_taps = len(self._inner_taps)
        self._buffers.clear()
        self._reserve(1, 1)

    @property
    def _inner_taps(self) -> list[int]:
        """Return the places before the end of the last layer, without repetitions: a step copies these to its taps."""
        return sorted({place for place in self._taps if place < len(self._layers)})

    def states(self, number: int, rows: Ints) -> Floats:
        """Return what tap() keeps [n, taps, hidden] float32 for rows [n] of step `number`, as in logits().

        The last layer's output is computed now for rows where the step has not computed it.
        """
        states = np.empty((len(rows), len(self._taps), self._width), np.float32)
        inner, last = self._inner_taps, len(self._layers)
        for index, place in enumerate(self._taps):
            if place < last:
                taps = self._buffers["taps"].reshape(-1, len(inner), self._width)
                states[:, index] = taps[rows, inner.index(place)]
            else:
                states[:, index] = self._last_states(number, rows)
        return states

    def _last_states(self, number: int, rows: Ints) -> Floats:
        """Return the last layer's output [n, hidden] float32 of rows [n] of step `number`."""
        finished = self._finished[1] if self._finished[0] == number else self._columns[-1]
        order = np.argsort(finished)
        places = np.searchsorted(finished, rows, sorter=order)
        if len(finished) and np.array_equal(finished[order[np.minimum(places, len(finished) - 1)]], rows):
            places = order[places]
        else:
            self._finish(number, np.ascontiguousarray(rows), None)
            places = np.arange(len(rows))
        states: Floats = self._buffers["last_hidden"][places]
        return states

    def logits(self, number: int, rows: Ints) -> Floats:
        """Compute the logits [n, vocab] float32 for rows [n] int64 of step `number`. n is at most its number of tokens.

        The last layer is finished for these rows now, with the step's plans. So no step may have run, and no plan been
        made, since.
        """
        shape = len(rows), self._vocab_size
        logits = (
            aligned_empty(shape, FLOAT32) if self._memory is None else self._memory.reserve("asked", shape, FLOAT32)
        )
        self._finish(number, np.ascontiguousarray(rows), logits)
        return logits

    def normalised(self, number: int, rows: Ints) -> Floats:
        """Compute the hidden states after the final norm [n, hidden] float32 of rows [n], as in logits()."""
        self._finish(number, np.ascontiguousarray(rows), None)
        normalised: Floats = self._float_norm(self._buffers["last_hidden"][: len(rows)])
        return normalised

    def _finish(self, number: int, rows: Ints, logits: Floats | None) -> None:
        """Finish the last layer for these rows [n]. If `logits` [n, vocab] is given, the head fills it."""
        step = self._step
        assert number == self._number, f"a result of step {number} is requested after step {self._number}"
        assert len(rows) <= step.num_tokens, (len(rows), step.num_tokens)
        if not len(rows):
            return
        before = step.logits_rows, step.num_logits, step.logits, step.largest
        step.logits_rows, step.num_logits = rows.ctypes.data, len(rows)
        step.logits, step.largest = None if logits is None else logits.ctypes.data, None
        self._run_logits(step)
        self._finished = number, rows
        step.logits_rows, step.num_logits, step.logits, step.largest = before

    def _take(self, *columns: Ints) -> None:
        """Point the step to its columns, and reserve memory for its result."""
        num_tokens, num_logits = len(columns[0]), len(columns[-1])
        self._reserve(num_tokens, num_logits)
        self._columns, step = columns, self._step
        token_ids, positions, _, logits_rows = (column.ctypes.data for column in columns)
        step.token_ids, step.positions, step.logits_rows = token_ids, positions, logits_rows
        assert not num_logits or self._vocab_size, "logits are requested from a model without a head"
        step.num_tokens, step.num_logits = num_tokens, num_logits
        logits, largest = self._buffers["logits"][:num_logits], self._buffers["largest"][:num_logits]
        self._results = logits, largest

    def _use(self, cache: CpuKVCache | MixedKVCache, plans: Sequence[AttentionPlan]) -> None:
        """Point the step to this cache and these plans, which most steps share."""
        if cache is self._cache and self._plans == tuple(plans):
            return
        self._cache, self._plans = cache, tuple(plans)
        self._parts = [self._part_of_kind(cache, kind) for kind in range(len(self._kinds))]
        for plan, part, kind, (_, arguments) in zip(plans, self._parts, self._kinds, self._attention, strict=True):
            kind.plan = ctypes.addressof(plan.arguments)
            arguments.shape, arguments.num_heads = part.shape, self._num_heads
        pointers = [layer.ctypes.data for layer in cache.layers]
        places = [one.place % len(pointers) for one in self._kept[0]]  # one array may serve all layers
        self._cache_layers = (ctypes.c_void_p * len(self._layers))(*(pointers[place] for place in places))
        self._step.cache = ctypes.addressof(self._cache_layers)

    def _part_of_kind(self, cache: CpuKVCache | MixedKVCache, kind: int) -> CpuKVCache:
        """Return the cache with the heads of the layers of a kind."""
        places = [one.place for one in self._kept[0] if one.kind == kind and isinstance(one.mix, AttentionParts)]
        part = cache.part(places[0] % len(cache.layers) if places else 0)[0]
        assert isinstance(part, CpuKVCache), type(part)
        return part

    def _point_to_slots(self, plans: Sequence[AttentionPlan], window_slots: Ints | None) -> None:
        """Point each kind of layer to the slots of the step's tokens in its layers."""
        self._window_slots, slots = window_slots, self._columns[2].ctypes.data
        of_windows = slots if window_slots is None else window_slots.ctypes.data
        for plan, kind in zip(plans, self._kinds, strict=True):
            kind.slots = of_windows if plan.has_window_slots else slots

    def _adapt(self, lora: LoraRows | None) -> None:
        """Point the step to its rows' adapters, and reserve the memory they need."""
        step, self._lora = self._step, lora
        step.adapters = None
        if lora is None:
            return
        rows, width, lowered = len(self._buffers["x"]), max(1, lora.width), self._buffers.get("lowered")
        if lowered is None or len(lowered) < rows or lowered.shape[1] < width:
            self._keep("lowered", (rows, width), FLOAT32)
            self._keep("picked", (rows,), np.dtype(np.int64))
        step.adapters, step.lowered_stride = lora.adapters.ctypes.data, self._buffers["lowered"].shape[1]

    def _give(self, given: Floats | None) -> None:
        """Point the step to the embeddings for token ids below 0."""
        step, self._deep = self._step, None
        if given is not None:
            assert given.shape[1] % self._width == 0, given.shape
            if given.shape[1] > self._width:
                self._deep = np.ascontiguousarray(given[:, self._width :])
            given = np.ascontiguousarray(given[:, : self._width])
        self._given, step.given = given, None if given is None else given.ctypes.data
        step.num_deep = 0 if self._deep is None else self._deep.shape[1] // self._width
        step.deep = None if self._deep is None else self._deep.ctypes.data
        assert step.num_deep <= len(self._layers), step.num_deep

    def _begin(self, begun: tuple[Ints, Floats] | None) -> None:
        """Point the step to what is known of tokens of which other layers have run."""
        self._begun = None if begun is None else tuple(map(np.ascontiguousarray, begun))
        words, embeddings = (None, None) if self._begun is None else (each.ctypes.data for each in self._begun)
        self._step.words, self._step.embeddings = words, embeddings

    def _turn(self, turned: Ints | None) -> None:
        """Point the step to the positions of its tokens' rotations, or to their own rows of cos and sin."""
        if turned is None:
            self._turned, self._step.rotations = None, None
            return
        if turned.ndim == 1:
            self._turned = np.ascontiguousarray(turned)
        else:
            assert self._axes is not None, "a token of this model has one position"
            self._turned = np.arange(len(turned))
            made: dict[int, tuple[Floats, Floats, Floats, Floats]] = {}
            for kind, table in zip(self._kinds, self._tables, strict=True):
                if table is not None:
                    arrays = made[id(table)] = made.get(id(table)) or table.rows_at(turned, self._axes)
                    kind.cos, kind.sin, kind.query_cos, kind.query_sin = (array.ctypes.data for array in arrays)
            self._rotations, self._num_positions = list(made.values()), 0  # kept alive; the tables are pointed to again
        self._step.rotations = self._turned.ctypes.data

    def _place_states(self, requests: StateRows | None) -> None:
        """Point the step to the recurrent states of its requests."""
        assert (requests is None) == (not self._mixed_width), "a model's recurrent states"
        self._requests, step = requests, self._step
        if requests is not None:
            step.states, step.state_stride = requests.states.ctypes.data, requests.states.shape[1]
            step.state_rows, step.firsts = requests.rows.ctypes.data, requests.firsts.ctypes.data
            step.saves = None if requests.saves is None else requests.saves.ctypes.data
            step.num_requests = len(requests.rows)

    def _reach(self, num_positions: int) -> None:
        """Compute cos and sin for at least num_positions positions."""
        tables = [(kind, table) for kind, table in zip(self._kinds, self._tables, strict=True) if table is not None]
        for _, table in tables:
            table.reach(num_positions)
        # Kept alive: an extended table has new arrays.
        self._rotations = [(table.cos, table.sin, table.query_cos, table.query_sin) for _, table in tables]
        self._num_positions = min((len(cos) for cos, *_ in self._rotations), default=num_positions)
        for (kind, _), arrays in zip(tables, self._rotations, strict=True):
            kind.cos, kind.sin, kind.query_cos, kind.query_sin = (array.ctypes.data for array in arrays)

    def _reserve(self, num_tokens: int, num_logits: int) -> None:
        """Allocate buffers for num_tokens tokens and num_logits logits rows. Buffers only grow, by powers of two."""
        if not self._buffers or max(num_tokens, num_logits) > len(self._buffers["x"]):
            rows = 1 << (max(num_tokens, num_logits) - 1).bit_length()
            for name, width in self._widths.items():
                self._keep(name, (rows, width), self._dtype)
            self._keep("hidden", (rows, self._width), FLOAT32)
            if self._memory is not None:
                self._keep("embedded", (rows, self._width), FLOAT32)
            if self._recurred_width:
                self._keep("recurred", (rows, self._recurred_width), FLOAT32)
            self._keep("last_hidden", (rows, self._width), FLOAT32)
            if self._deepest:
                self._keep("quantized", (rows, row_bytes_in_8_bits(self._deepest)), np.dtype(np.uint8))
                self._step.quantized_stride = blocks_in_8_bits(self._deepest)
            if self._step.num_taps:
                self._keep("taps", (rows, self._step.num_taps * self._width), FLOAT32)
            if self._experts:
                self._room.reserve(rows, self._experts[0])
                self._step.experts_room = ctypes.addressof(self._room.arguments)
            if self._mixed_width:
                self._keep("mixed", (min(rows, MIXED_ROWS), self._mixed_width), FLOAT32)
                self._step.mixed_stride = self._mixed_width
            if self._normalises_added:
                self._keep("normed", (rows, self._width), FLOAT32)
            if self._beside:
                self._keep("beside", (rows, self._width), FLOAT32)
                self._keep("router_x", (rows, self._width), self._dtype)
            if self._per_layer is not None:
                self._keep("projected", (rows, self._per_layer.projection.out_features), self._dtype)
                self._keep("own_inputs", (rows, self._per_layer.width), self._dtype)
            if self._num_tail:
                for name in ("tail_q", "tail_attended", "tail_picked"):
                    self._keep(name, (rows, self._widths["attended"]), self._dtype)
        if "logits" not in self._buffers or num_logits > len(self._buffers["logits"]):
            rows = 1 << (num_logits - 1).bit_length()
            self._keep("logits", (rows, self._vocab_size), FLOAT32)
            self._keep("largest", (rows,), np.dtype(np.int32))

    def _keep(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> None:
        if self._memory is not None and name in self._memory:
            self._buffers[name] = buffer = self._memory.reserve(name, shape, dtype)
        else:
            self._buffers[name] = buffer = aligned_empty(shape, dtype)
        setattr(self._step, name, buffer.ctypes.data)
