"""CpuDecoder: a decoder's whole step - embedding, layers, final norm, head - as one C call (kernels/cpu/decoder.h)."""

import ctypes
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernels.arrays import Floats, Int32s, Ints
from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import AttentionPlan
from kernels.cpu.embedding import CpuEmbedding, address
from kernels.cpu.gemm import INT8, PackedMatrix, blocks_in_8_bits, row_bytes_in_8_bits
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.cpu.rope import RotaryTable
from kernels.cpu.structs import (
    DecoderArguments,
    GemmArguments,
    KindArguments,
    LayerArguments,
    NormWeights,
    StepArguments,
)
from kernels.elements import FLOAT32, Dtype, Numbers
from kernels.memory.aligned import aligned_empty

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Of the last level, for each CPU that this process may use. A virtual machine reports the cache of a whole socket, up
#: to 480 MiB, which it shares with others.
_CACHE_BYTES_PER_CPU = 4 << 20


class LayerParts(NamedTuple):
    """The kernels and constants of one layer."""

    input_norm: CpuNorm
    qkv: PackedMatrix
    head_norms: Floats | None  # float32, contiguous
    scale: float  # factor of the scores
    o: PackedMatrix
    attention_out_norm: CpuNorm | None
    mlp_norm: CpuNorm
    gate_up: PackedMatrix
    down: PackedMatrix
    mlp_out_norm: CpuNorm | None
    kind: int  # index into a step's plans and tables, one for each kind of layer


class DecoderResult:
    """A step's result, of the protocol in core/models/step.py. Valid until the decoder's next step or plans."""

    __slots__ = ("_decoder", "_number", "largest", "logits")

    def __init__(self, decoder: "CpuDecoder", number: int, logits: Floats, largest: Int32s) -> None:
        """Keep logits [S, vocab] float32, and largest [S]: CpuSampler.largest() of them, as the step wrote them."""
        self._decoder, self._number, self.logits, self.largest = decoder, number, logits, largest

    def logits_of(self, rows: Ints) -> Floats:
        """Return the logits [n, vocab] float32 of rows [n] int64; n is at most the step's number of tokens."""
        return self._decoder.logits(self._number, rows)

    def hidden_of(self, rows: Ints) -> Floats:
        """Return the hidden states after the final norm [n, hidden] float32 of rows [n], as in logits_of()."""
        return self._decoder.normalised(self._number, rows)


class CpuDecoder:
    """Runs a decoder's whole step in one C call. Its bits are those of the single kernels called one after the other.
    A cache of one layer serves all layers in turn, for models whose prompts are computed in one step.

    The next step overwrites the result of the one before."""

    def __init__(
        self,
        library: CpuLibrary,
        layers: Sequence[LayerParts],
        embedding: CpuEmbedding,
        norm: CpuNorm,
        float_norm: CpuNorm,
        head: PackedMatrix | None,
        tables: Sequence[RotaryTable | None],
        *,
        num_heads: int,
    ) -> None:
        """Prepare the C structs of a model. `head` must return float32, None = no logits; `float_norm` is `norm` with
        float32 results. `tables`: a rotary table for each kind of layer, None = no rotation; kinds may share one."""
        assert float_norm.dtype == FLOAT32, float_norm.dtype
        assert head is None or head.out_dtype == FLOAT32, head
        self._kept = (layers, embedding, norm, head)  # the C structs point into these
        self._layers = (LayerArguments * len(layers))(*map(_layer_arguments, layers))
        self._width, self._vocab_size, self._dtype = embedding.width, head.out_features if head else 0, norm.dtype
        first, self._deepest = layers[0], _deepest_in_8_bits(layers, head)
        self._decoder = _decoder_arguments(embedding, norm, head)
        self._decoder.layers, self._decoder.num_layers = ctypes.addressof(self._layers), len(layers)
        self._decoder.num_heads = self._num_heads = num_heads
        streams = exceed_caches(_weight_bytes(layers, head))
        self._decoder.head.streams = streams
        for layer in self._layers:
            layer.qkv.streams = layer.o.streams = layer.gate_up.streams = layer.down.streams = streams
        self._widths = {"x": self._width, "added": self._width}
        self._widths |= {"qkv": first.qkv.out_features, "q": first.o.in_features, "attended": first.o.in_features}
        self._widths |= {"gated": first.down.in_features}
        self._normalises_added = first.attention_out_norm is not None or first.mlp_out_norm is not None
        self._kinds = (KindArguments * len(tables))()
        # Each kind has scratch memory of its own.
        self._attention = [(CpuAttention(library), kind.attention) for kind in self._kinds]
        self._plans: tuple[AttentionPlan, ...] = ()
        self._step = StepArguments(
            decoder=ctypes.addressof(self._decoder), kinds=ctypes.addressof(self._kinds), num_tokens=0
        )
        self._float_norm = float_norm
        self._tables, self._num_positions = tables, 0  # positions that the step's cos and sin cover
        self._cache: CpuKVCache | None = None
        self._buffers: dict[str, Numbers] = {}
        self._columns: tuple[Ints, ...] = ()  # the last step's, kept alive
        self._generation = 0  # of these columns; 0 = none
        self._number = 0  # the last step's number
        self._results: tuple[Floats, Int32s]  # logits, and the index of the largest one in each row
        self._reserve(1, 1)
        pointer = ctypes.POINTER(StepArguments)
        self._run = library.function("decoder_step", pointer)
        self._run_logits = library.function("decoder_logits", pointer)

    def __call__(
        self,
        token_ids: Ints,
        positions: Ints,
        slots: Ints,
        plans: Sequence[AttentionPlan],
        cache: CpuKVCache,
        logits_rows: Ints,
        generation: int,
    ) -> "DecoderResult":
        """Run one step.

        token_ids, positions and slots (-1 = do not store) are [T]; logits_rows [S] are indices of tokens; all int64.
        `plans` has one plan for each kind of layer. Equal generations other than 0 mean: columns, plans and cache are
        the objects of the step before, with other numbers. They are not read then: beside the weights, each object that
        is touched costs microseconds."""
        if not generation or generation != self._generation:
            self._take(*map(np.ascontiguousarray, (token_ids, positions, slots, logits_rows)))
            self._use(cache, plans)
            self._generation = generation
        if (longest := plans[0].arguments.longest) > self._num_positions:
            self._reach(longest)
        for plan, (attention, arguments) in zip(plans, self._attention, strict=True):
            attention.reserve(arguments, cache, plan, self._num_heads)
        self._run(self._step)
        self._number += 1
        return DecoderResult(self, self._number, *self._results)

    def logits(self, number: int, rows: Ints) -> Floats:
        """Compute the logits [n, vocab] float32 of rows [n] int64 of step `number`; n is at most its number of tokens.

        The last layer is finished for these rows now, by the step's plans. So no step may have been run, and no plan
        made, since."""
        logits = aligned_empty((len(rows), self._vocab_size), FLOAT32)
        self._finish(number, np.ascontiguousarray(rows), logits)
        return logits

    def normalised(self, number: int, rows: Ints) -> Floats:
        """Compute the hidden states after the final norm [n, hidden] float32 of rows [n], as in logits()."""
        self._finish(number, np.ascontiguousarray(rows), None)
        normalised: Floats = self._float_norm(self._buffers["last_hidden"][: len(rows)])
        return normalised

    def _finish(self, number: int, rows: Ints, logits: Floats | None) -> None:
        """Finish the last layer for these rows [n]; if `logits` [n, vocab] is given, fill it by the head."""
        step = self._step
        assert number == self._number, f"a result of step {number} is asked after step {self._number}"
        assert len(rows) <= step.num_tokens, (len(rows), step.num_tokens)
        if not len(rows):
            return
        before = step.logits_rows, step.num_logits, step.logits, step.largest
        step.logits_rows, step.num_logits = rows.ctypes.data, len(rows)
        step.logits, step.largest = None if logits is None else logits.ctypes.data, None
        self._run_logits(step)
        step.logits_rows, step.num_logits, step.logits, step.largest = before

    def _take(self, *columns: Ints) -> None:
        """Point the step to its columns, and reserve memory for its result."""
        num_tokens, num_logits = len(columns[0]), len(columns[-1])
        self._reserve(num_tokens, num_logits)
        self._columns, step = columns, self._step
        step.token_ids, step.positions, step.slots, step.logits_rows = (column.ctypes.data for column in columns)
        assert not num_logits or self._vocab_size, "logits are asked of a model without a head"
        step.num_tokens, step.num_logits = num_tokens, num_logits
        logits, largest = self._buffers["logits"][:num_logits], self._buffers["largest"][:num_logits]
        self._results = logits, largest

    def _use(self, cache: CpuKVCache, plans: Sequence[AttentionPlan]) -> None:
        """Point the step to this cache and these plans, which most steps share."""
        if cache is self._cache and self._plans == tuple(plans):
            return
        self._cache, self._plans = cache, tuple(plans)
        for plan, kind, (_, arguments) in zip(plans, self._kinds, self._attention, strict=True):
            kind.plan = ctypes.addressof(plan.arguments)
            arguments.shape, arguments.num_heads = cache.shape, self._num_heads
        pointers = [layer.ctypes.data for layer in cache.layers]
        self._cache_layers = (ctypes.c_void_p * len(self._layers))(*pointers * (len(self._layers) // len(pointers)))
        self._step.cache = ctypes.addressof(self._cache_layers)

    def _reach(self, num_positions: int) -> None:
        """Make cos and sin for at least num_positions positions."""
        tables = [(kind, table) for kind, table in zip(self._kinds, self._tables, strict=True) if table is not None]
        for _, table in tables:
            table.reach(num_positions)
        # Kept alive: an extended table has new arrays.
        self._rotations = [(table.cos, table.sin) for _, table in tables]
        self._num_positions = min((len(cos) for cos, _ in self._rotations), default=num_positions)
        for (kind, _), (cos, sin) in zip(tables, self._rotations, strict=True):
            kind.cos, kind.sin = cos.ctypes.data, sin.ctypes.data

    def _reserve(self, num_tokens: int, num_logits: int) -> None:
        """Allocate buffers for so many tokens and logits rows. Buffers only grow, by powers of two."""
        if not self._buffers or max(num_tokens, num_logits) > len(self._buffers["x"]):
            rows = 1 << (max(num_tokens, num_logits) - 1).bit_length()
            for name, width in self._widths.items():
                self._keep(name, (rows, width), self._dtype)
            self._keep("hidden", (rows, self._width), FLOAT32)
            self._keep("last_hidden", (rows, self._width), FLOAT32)
            if self._deepest:
                self._keep("quantized", (rows, row_bytes_in_8_bits(self._deepest)), np.dtype(np.uint8))
                self._step.quantized_stride = blocks_in_8_bits(self._deepest)
            if self._normalises_added:
                self._keep("normed", (rows, self._width), FLOAT32)
        if "logits" not in self._buffers or num_logits > len(self._buffers["logits"]):
            rows = 1 << (num_logits - 1).bit_length()
            self._keep("logits", (rows, self._vocab_size), FLOAT32)
            self._keep("largest", (rows,), np.dtype(np.int32))

    def _keep(self, name: str, shape: tuple[int, ...], dtype: Dtype) -> None:
        self._buffers[name] = buffer = aligned_empty(shape, dtype)
        setattr(self._step, name, buffer.ctypes.data)


def _weight_bytes(layers: Sequence[LayerParts], head: PackedMatrix | None) -> int:
    """Return the bytes of weights that a step reads, whatever its number of rows."""
    return sum(matrix.packed.nbytes for matrix in _matrices(layers, head))


def _deepest_in_8_bits(layers: Sequence[LayerParts], head: PackedMatrix | None) -> int:
    """Return the largest depth of a product in 8 bits; 0 without one."""
    return max((matrix.in_features for matrix in _matrices(layers, head) if matrix.packing == INT8), default=0)


def _matrices(layers: Sequence[LayerParts], head: PackedMatrix | None) -> list[PackedMatrix]:
    own = [] if head is None else [head]
    return [*own, *(matrix for parts in layers for matrix in (parts.qkv, parts.o, parts.gate_up, parts.down))]


def exceed_caches(num_bytes: int) -> bool:
    """Whether num_bytes is more than the CPU's caches keep from one step to the next: a share of the last one."""
    try:
        sizes = [int(path.read_text().strip().removesuffix("K")) << 10 for path in _CACHES.glob("index*/size")]
    except (OSError, ValueError):  # not Linux, or no such files
        sizes = []
    share = len(os.sched_getaffinity(0)) * _CACHE_BYTES_PER_CPU
    return num_bytes > min(share, max(sizes, default=share))


def _decoder_arguments(embedding: CpuEmbedding, norm: CpuNorm, head: PackedMatrix | None) -> DecoderArguments:
    """Return the decoder's struct, with its layers and head counts still unset."""
    return DecoderArguments(
        head=head.arguments if head else GemmArguments(),
        embeddings=embedding.table.ctypes.data,
        norm=norm.constants,
        hidden_size=embedding.width,
        dtype=ELEMENT_NUMBERS[norm.dtype],
        eps=norm.eps,
        embedding_scale=embedding.scale,
        embeddings_packing=embedding.packing,
        kinds=address(embedding.kinds),
        places=address(embedding.places),
        num_words=embedding.num_words,
    )


def _layer_arguments(parts: LayerParts) -> LayerArguments:
    def constants(norm: CpuNorm | None) -> NormWeights:
        return NormWeights() if norm is None else norm.constants

    return LayerArguments(
        qkv=parts.qkv.arguments,
        o=parts.o.arguments,
        gate_up=parts.gate_up.arguments,
        down=parts.down.arguments,
        input_norm=constants(parts.input_norm),
        mlp_norm=constants(parts.mlp_norm),
        attention_out_norm=constants(parts.attention_out_norm),
        mlp_out_norm=constants(parts.mlp_out_norm),
        head_norms=None if parts.head_norms is None else parts.head_norms.ctypes.data,
        scale=parts.scale * math.log2(math.e),
        kind=parts.kind,
    )
