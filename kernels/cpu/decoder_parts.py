"""The parts of a C decoder (kernels/cpu/decoder.py): layers, their C structs, and values derived from their sizes."""

import ctypes
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kernels.arrays import Floats
from kernels.cpu.attention import score_factors
from kernels.cpu.embedding import CpuEmbedding, address
from kernels.cpu.experts import CpuExperts
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.latent import CpuLatent
from kernels.cpu.library import ELEMENT_NUMBERS
from kernels.cpu.mixer_structs import PerLayerArguments
from kernels.cpu.norm import CpuNorm
from kernels.cpu.packed_weights import INT8
from kernels.cpu.recurrence import CpuRecurrence
from kernels.cpu.rope import VALUE_NUMBERS
from kernels.cpu.structs import (
    BesideArguments,
    DecoderArguments,
    GemmArguments,
    LayerArguments,
    NormWeights,
    RowHeads,
)
from kernels.value_form import ValueForm

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Bytes of the last level cache for each CPU that this process may use. A virtual machine reports the cache of a whole
#: socket, up to 480 MiB, which it shares with others.
_CACHE_BYTES_PER_CPU = 4 << 20


class DenseParts(NamedTuple):
    """The products of a dense MLP; the first one has the activation."""

    gate_up: PackedMatrix
    down: PackedMatrix


class AttentionParts(NamedTuple):
    """The constants of one layer's attention."""

    norms: Floats | None  # of Q and K: float32, contiguous; see CpuRope
    scale: float  # factor of the scores
    norms_of_rows: bool = False
    cap: float | None = None  # of the scores
    sinks: Floats | None = None  # [H], from sink_scores()
    latent: CpuLatent | None = None  # around attention
    centred_norms: bool = False
    norms_after: bool = False
    values: ValueForm = "own"
    row: RowHeads = RowHeads()  # see CpuRope


class BesideParts(NamedTuple):
    """Experts alongside a dense MLP, and the norms around them."""

    input_norm: CpuNorm
    router_norm: CpuNorm
    experts: CpuExperts
    dense_norm: CpuNorm  # to float32
    output_norm: CpuNorm  # to float32


class OwnInputParts(NamedTuple):
    """What a layer makes of its own inputs (c/layers/per_layer.h)."""

    gate: PackedMatrix  # has the activation
    out: PackedMatrix
    norm: CpuNorm  # to float32


class LayerParts(NamedTuple):
    """The kernels and constants of one layer."""

    input_norm: CpuNorm
    qkv: PackedMatrix
    mix: AttentionParts | CpuRecurrence
    o: PackedMatrix
    attention_out_norm: CpuNorm | None
    mlp_norm: CpuNorm
    mlp: DenseParts | CpuExperts | None  # None: the layer ends after its first half
    mlp_out_norm: CpuNorm | None
    kind: int  # index into a step's plans and tables, one for each kind of layer
    place: int = 0  # of the layer's K and V in the cache
    output_gate: PackedMatrix | None = None  # of attention's output
    beside: BesideParts | None = None
    own_inputs: OwnInputParts | None = None
    scale: float | None = None  # of the hidden states at the layer's end

    @property
    def experts(self) -> CpuExperts | None:
        """The layer's routed MLP."""
        if self.beside is not None:
            return self.beside.experts
        return self.mlp if isinstance(self.mlp, CpuExperts) else None


def latent_of(parts: LayerParts) -> CpuLatent | None:
    """Return the layer's latent attention, or None if it has another kind."""
    return parts.mix.latent if isinstance(parts.mix, AttentionParts) else None


def widths_of(width: int, layers: Sequence[LayerParts]) -> dict[str, int]:
    """Return the row widths of the buffers that have the model's dtype, by name."""
    dense = [parts.mlp for parts in layers if isinstance(parts.mlp, DenseParts)]
    attended = max(parts.o.in_features for parts in layers)
    # Picked rows of `attended` are stored in place of those of `qkv`.
    inner = {"qkv": max(attended, *(parts.qkv.out_features for parts in layers)), "q": attended, "attended": attended}
    if any(parts.output_gate is not None for parts in layers):
        inner["output_gates"] = attended
    if (latent := latent_of(layers[0])) is not None:
        own = latent.num_heads * latent.latent_dim
        attended = max(own, layers[0].o.in_features)  # of a rank: the values of all heads
        inner = {"q": own + latent.num_heads * latent.rotated_dim, "attended": attended}
        inner["qkv"] = max(layers[0].qkv.out_features, attended)  # also picked rows of `attended`
        inner |= {"queries": latent.queries_width, "values": layers[0].o.in_features}
    gated = max((mlp.down.in_features for mlp in dense), default=1)
    return {"x": width, "added": width, **inner, "gated": gated}


def tail_length(layers: Sequence[LayerParts]) -> int:
    """Return how many of the last layers read K and V of others: no later token needs anything of them.

    The first layer is not counted, because a step computes it for all rows.
    """
    mixes = [parts.mix for parts in reversed(layers[1:])]
    shared = (isinstance(mix, AttentionParts) and mix.values == "shared" for mix in mixes)
    return sum(1 for _ in itertools.takewhile(bool, shared))


def mixed_width(layers: Sequence[LayerParts]) -> int:
    """Return the row width of the recurrent layers' buffer; 0 without such layers."""
    return max((parts.mix.sizes.mixed_width for parts in layers if isinstance(parts.mix, CpuRecurrence)), default=0)


def weight_bytes(layers: Sequence[LayerParts], head: PackedMatrix | None) -> int:
    """Return the bytes of weights that steps read, those of all experts included."""
    routed = sum(parts.experts.num_bytes for parts in layers if parts.experts is not None)
    return routed + sum(matrix.packed.nbytes for matrix in _matrices(layers, head))


def deepest_in_8_bits(layers: Sequence[LayerParts], head: PackedMatrix | None) -> int:
    """Return the largest depth of a product in 8 bits; 0 if there is none."""
    return max((matrix.in_features for matrix in _matrices(layers, head) if matrix.packing == INT8), default=0)


def _matrices(layers: Sequence[LayerParts], head: PackedMatrix | None) -> list[PackedMatrix]:
    own = [] if head is None else [head]
    dense = [matrix for parts in layers if isinstance(parts.mlp, DenseParts) for matrix in parts.mlp]
    gates = [parts.output_gate for parts in layers if parts.output_gate is not None]
    gates += [matrix for parts in layers if (inputs := parts.own_inputs) is not None for matrix in inputs[:2]]
    latent = [matrix for parts in layers if (inner := latent_of(parts)) is not None for matrix in inner.matrices]
    return [*own, *dense, *gates, *latent, *(matrix for parts in layers for matrix in (parts.qkv, parts.o))]


def exceed_caches(num_bytes: int) -> bool:
    """Return whether num_bytes exceeds what the CPU's last level cache keeps from one step to the next."""
    try:
        sizes = [int(path.read_text().strip().removesuffix("K")) << 10 for path in _CACHES.glob("index*/size")]
    except (OSError, ValueError):  # not Linux, or no such files
        sizes = []
    share = len(os.sched_getaffinity(0)) * _CACHE_BYTES_PER_CPU
    return num_bytes > min(share, max(sizes, default=share))


def beside_arguments(parts: BesideParts) -> BesideArguments:
    """Return the C struct of the norms around experts alongside a dense MLP."""
    norms = parts.input_norm, parts.router_norm, parts.dense_norm, parts.output_norm
    return BesideArguments(*[norm.constants for norm in norms])


def own_input_arguments(parts: OwnInputParts) -> PerLayerArguments:
    """Return the C struct of what a layer makes of its own inputs."""
    return PerLayerArguments(parts.gate.arguments, parts.out.arguments, parts.norm.constants)


def decoder_arguments(embedding: CpuEmbedding, norm: CpuNorm, head: PackedMatrix | None) -> DecoderArguments:
    """Return the decoder's struct. Its layers and head counts are not set yet."""
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


def layer_arguments(parts: LayerParts) -> LayerArguments:
    """Return the C struct of a layer."""

    def constants(norm: CpuNorm | None) -> NormWeights:
        return NormWeights() if norm is None else norm.constants

    mix, gate = parts.mix, parts.output_gate
    arguments = LayerArguments(
        qkv=parts.qkv.arguments,
        o=parts.o.arguments,
        gate_up=parts.mlp.gate_up.arguments if isinstance(parts.mlp, DenseParts) else GemmArguments(),
        down=parts.mlp.down.arguments if isinstance(parts.mlp, DenseParts) else GemmArguments(),
        experts=None if parts.experts is None else ctypes.addressof(parts.experts.arguments),
        layer_scale=parts.scale or 0.0,
        input_norm=constants(parts.input_norm),
        mlp_norm=constants(parts.mlp_norm),
        attention_out_norm=constants(parts.attention_out_norm),
        mlp_out_norm=constants(parts.mlp_out_norm),
        kind=parts.kind,
        lacks_mlp=parts.mlp is None,
        output_gate=None if gate is None else ctypes.addressof(gate.arguments),
    )
    if isinstance(mix, CpuRecurrence):
        arguments.recurrence = ctypes.addressof(mix.arguments)
        return arguments
    arguments.scale, arguments.cap_factor = score_factors(mix.scale, mix.cap)
    arguments.norms, arguments.norms_of_rows = address(mix.norms), mix.norms_of_rows
    arguments.centred_norms, arguments.norms_after = mix.centred_norms, mix.norms_after
    arguments.values, arguments.row = VALUE_NUMBERS[mix.values], mix.row
    arguments.sinks = address(mix.sinks)
    arguments.latent = None if mix.latent is None else ctypes.addressof(mix.latent.arguments)
    return arguments
