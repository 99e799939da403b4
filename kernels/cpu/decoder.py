"""CpuDecoder: a decoder's whole step - embedding, layers, final norm, head - as one C call (kernels/cpu/decoder.h)."""

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.arrays import Int32s
from kernels.cpu.attention import CpuAttention
from kernels.cpu.attention_plan import AttentionPlan
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import ELEMENT_TYPES, CpuLibrary
from kernels.cpu.rms_norm import CpuNorm
from kernels.cpu.rope import RotaryTable
from kernels.cpu.structs import DecoderArguments, KindArguments, LayerArguments, StepArguments

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE_BYTES = 64 << 20  # of the last level, where the system does not tell


class LayerParts(NamedTuple):
    """What the kernels of one layer were made with."""

    input_norm: CpuNorm
    qkv: PackedMatrix
    head_norms: torch.Tensor | None  # float32, contiguous
    scale: float  # of the scores
    o: PackedMatrix
    attention_out_norm: CpuNorm | None
    mlp_norm: CpuNorm
    gate_up: PackedMatrix
    down: PackedMatrix
    mlp_out_norm: CpuNorm | None
    kind: int  # index into the plans and tables that a step has for each kind of layer


class DecoderResult:
    """A step's result, as core/models/step.py has it: good until the decoder's next step or its next plans."""

    __slots__ = ("_decoder", "_number", "largest", "logits")

    def __init__(self, decoder: "CpuDecoder", number: int, logits: torch.Tensor, largest: Int32s) -> None:
        """logits [S, vocab] float32; largest [S]: what CpuSampler.largest() is of them as the step writes them."""
        self._decoder, self._number, self.logits, self.largest = decoder, number, logits, largest

    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n] int64, of which there are no more than tokens -> logits [n, vocab] float32."""
        return self._decoder.logits(self._number, rows)

    def hidden_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows -> hidden states behind the final norm [n, hidden] float32."""
        return self._decoder.normalised(self._number, rows)


class CpuDecoder:
    """Gives the bits of its parts' kernels called one after the other. The next step overwrites what one returns."""

    def __init__(
        self,
        library: CpuLibrary,
        layers: Sequence[LayerParts],
        embedding: CpuEmbedding,
        norm: CpuNorm,
        float_norm: CpuNorm,
        head: PackedMatrix,
        tables: Sequence[RotaryTable],
        *,
        num_heads: int,
    ) -> None:
        """head gives float32; float_norm: norm with float32 results; tables: one for each kind of layer, which kinds
        may share."""
        assert float_norm.dtype == torch.float32, float_norm.dtype
        assert head.out_dtype == torch.float32, head.out_dtype
        self._kept = (layers, embedding, norm, head)  # what the pointers point to
        self._layers = (LayerArguments * len(layers))(*map(_layer_arguments, layers))
        self._width, self._vocab_size, self._dtype = embedding.width, head.out_features, norm.dtype
        first = layers[0]
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
        # Each with room of its own.
        self._attention = [(CpuAttention(library), kind.attention) for kind in self._kinds]
        self._plans: tuple[AttentionPlan, ...] = ()
        self._step = StepArguments(
            decoder=ctypes.addressof(self._decoder), kinds=ctypes.addressof(self._kinds), num_tokens=0
        )
        self._float_norm = float_norm
        self._tables, self._num_positions = tables, 0  # the latter: that the step's cos and sin reach
        self._cache: CpuKVCache | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._columns: tuple[torch.Tensor, ...] = ()  # of the last step
        self._generation = 0  # of these
        self._number = 0  # of the last step
        self._results: tuple[torch.Tensor, Int32s]  # of the generation: logits and the largest of each row
        self._reserve(1, 1)
        pointer = ctypes.POINTER(StepArguments)
        self._run = library.function("decoder_step", pointer)
        self._run_logits = library.function("decoder_logits", pointer)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        plans: Sequence[AttentionPlan],
        cache: CpuKVCache,
        logits_rows: torch.Tensor,
        generation: int,
    ) -> "DecoderResult":
        """Run one step. token_ids, positions, slots (-1 = do not store) [T] and logits_rows [S], indices of tokens,
        int64; plans: one for each kind of layer. generation: equal numbers other than 0 say that columns, plans and
        cache are the objects of the step before, with other numbers in them. They are not looked at then: next to the
        weights each object touched costs microseconds."""
        if not generation or generation != self._generation:
            self._take(token_ids.contiguous(), positions.contiguous(), slots.contiguous(), logits_rows.contiguous())
            self._use(cache, plans)
            self._generation = generation
        if (longest := plans[0].arguments.longest) > self._num_positions:
            self._reach(longest)
        for plan, (attention, arguments) in zip(plans, self._attention, strict=True):
            attention.reserve(arguments, cache, plan, self._num_heads)
        self._run(self._step)
        self._number += 1
        return DecoderResult(self, self._number, *self._results)

    def logits(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Compute logits [n, vocab] float32 of tokens of a step: rows [n] int64, of which there are no more than
        tokens. The last layer is finished for them now, by the step's plans: no step and no plan may have been made
        since."""
        logits = torch.empty((len(rows), self._vocab_size))
        self._finish(number, rows.contiguous(), logits)
        return logits

    def normalised(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states behind the final norm [n, hidden] float32, for rows as logits() takes them."""
        self._finish(number, rows.contiguous(), None)
        return self._float_norm(self._buffers["last_hidden"][: len(rows)])

    def _finish(self, number: int, rows: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Finish the last layer for these rows [n], and the head where there is room for logits [n, vocab]."""
        step = self._step
        assert number == self._number, f"a result of step {number} is asked after step {self._number}"
        assert len(rows) <= step.num_tokens, (len(rows), step.num_tokens)
        if not len(rows):
            return
        before = step.logits_rows, step.num_logits, step.logits, step.largest
        step.logits_rows, step.num_logits = rows.data_ptr(), len(rows)
        step.logits, step.largest = None if logits is None else logits.data_ptr(), None
        self._run_logits(step)
        step.logits_rows, step.num_logits, step.logits, step.largest = before

    def _take(self, *columns: torch.Tensor) -> None:
        """Point to the columns of a step, and make the place of its result."""
        num_tokens, num_logits = len(columns[0]), len(columns[-1])
        self._reserve(num_tokens, num_logits)
        self._columns, step = columns, self._step
        step.token_ids, step.positions, step.slots, step.logits_rows = (column.data_ptr() for column in columns)
        step.num_tokens, step.num_logits = num_tokens, num_logits
        logits, largest = self._buffers["logits"][:num_logits], self._buffers["largest"][:num_logits]
        self._results = logits, largest.numpy()

    def _use(self, cache: CpuKVCache, plans: Sequence[AttentionPlan]) -> None:
        """Point to these, which most steps have in common."""
        if cache is self._cache and self._plans == tuple(plans):
            return
        self._cache, self._plans = cache, tuple(plans)
        for plan, kind, (_, arguments) in zip(plans, self._kinds, self._attention, strict=True):
            kind.plan = ctypes.addressof(plan.arguments)
            arguments.shape, arguments.num_heads = cache.shape, self._num_heads
        pointers = (tensor.data_ptr() for tensor in cache.layers)
        self._cache_layers = (ctypes.c_void_p * len(cache.layers))(*pointers)
        self._step.cache = ctypes.addressof(self._cache_layers)

    def _reach(self, num_positions: int) -> None:
        """Have cos and sin for so many."""
        for table in self._tables:
            table.reach(num_positions)
        self._rotations = [(table.cos, table.sin) for table in self._tables]  # whoever else reaches on makes others
        self._num_positions = min(len(cos) for cos, _ in self._rotations)
        for kind, (cos, sin) in zip(self._kinds, self._rotations, strict=True):
            kind.cos, kind.sin = cos.data_ptr(), sin.data_ptr()

    def _reserve(self, num_tokens: int, num_logits: int) -> None:
        """Buffers for so many rows; they only grow, by powers of two."""
        if not self._buffers or max(num_tokens, num_logits) > len(self._buffers["x"]):
            rows = 1 << (max(num_tokens, num_logits) - 1).bit_length()
            for name, width in self._widths.items():
                self._keep(name, torch.empty((rows, width), dtype=self._dtype))
            self._keep("hidden", torch.empty((rows, self._width)))
            self._keep("last_hidden", torch.empty((rows, self._width)))
            if self._normalises_added:
                self._keep("normed", torch.empty((rows, self._width)))
        if "logits" not in self._buffers or num_logits > len(self._buffers["logits"]):
            rows = 1 << (num_logits - 1).bit_length()
            self._keep("logits", torch.empty((rows, self._vocab_size)))
            self._keep("largest", torch.empty(rows, dtype=torch.int32))

    def _keep(self, name: str, buffer: torch.Tensor) -> None:
        self._buffers[name] = buffer
        setattr(self._step, name, buffer.data_ptr())


def _weight_bytes(layers: Sequence[LayerParts], head: PackedMatrix) -> int:
    """That a step reads, for each row the same."""
    matrices = [head, *(matrix for parts in layers for matrix in (parts.qkv, parts.o, parts.gate_up, parts.down))]
    return sum(matrix.packed.nbytes for matrix in matrices)


def exceed_caches(num_bytes: int) -> bool:
    """Whether the CPU's caches cannot keep so much from a step to the next one."""
    try:
        sizes = [int(path.read_text().strip().removesuffix("K")) << 10 for path in _CACHES.glob("index*/size")]
    except (OSError, ValueError):  # another system says it in another way
        sizes = []
    return num_bytes > max(sizes, default=_USUAL_CACHE_BYTES)


def _decoder_arguments(embedding: CpuEmbedding, norm: CpuNorm, head: PackedMatrix) -> DecoderArguments:
    """All but what concerns layers and heads."""
    return DecoderArguments(
        head=head.arguments,
        embeddings=embedding.table.data_ptr(),
        norm=norm.weight.data_ptr(),
        hidden_size=embedding.width,
        dtype=ELEMENT_TYPES[norm.dtype],
        eps=norm.eps,
        embedding_scale=embedding.scale,
        embeddings_packing=embedding.packing,
    )


def _layer_arguments(parts: LayerParts) -> LayerArguments:
    def weight(norm: CpuNorm | None) -> int | None:
        return None if norm is None else norm.weight.data_ptr()

    return LayerArguments(
        qkv=parts.qkv.arguments,
        o=parts.o.arguments,
        gate_up=parts.gate_up.arguments,
        down=parts.down.arguments,
        input_norm=weight(parts.input_norm),
        mlp_norm=weight(parts.mlp_norm),
        attention_out_norm=weight(parts.attention_out_norm),
        mlp_out_norm=weight(parts.mlp_out_norm),
        head_norms=None if parts.head_norms is None else parts.head_norms.data_ptr(),
        scale=parts.scale * math.log2(math.e),
        kind=parts.kind,
    )
