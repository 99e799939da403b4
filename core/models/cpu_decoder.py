"""cpu_decoder: the C decoder of a model, which runs all layers of a step in one call."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from core.models.config import ModelConfig, RecurrentParts
from core.models.layers.layer import Layer, OwnInputs
from core.models.layers.mlp import DenseMlp, ExpertsBeside, Mlp, RoutedMlp
from core.models.layers.rotary import axes_of_pairs
from core.models.operations.cpu_latent import CpuLatentAttend
from core.models.operations.cpu_operations import CpuAttend, CpuOperations, CpuRecur
from core.models.operations.operations import Norm, Operations, PerLayerInputs, Product
from core.models.operations.tensor import Operation, Tensor
from core.models.operations.unchanged import unchanged
from core.models.parts.rank import Rank
from core.models.parts.recurrent_part import num_turns
from core.models.parts.shard import Shard
from ipc.tables.arrays import Ints
from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.decoder_parts import AttentionParts, BesideParts, DenseParts, LayerParts, OwnInputParts
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.experts import CpuExperts
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.group import DecoderGroup, RecurrencePlaces, SeparateMemory, SharedMemory
from kernels.cpu.norm import CpuNorm
from kernels.cpu.per_layer import CpuPerLayerInputs
from kernels.cpu.recurrence import CpuRecurrence


def cpu_decoder(
    config: ModelConfig,
    operations: Operations,
    layers: Sequence[Layer],
    embedding: Operation,
    norm: Norm,
    float_norm: Norm,
    head: Product | None,
    *,
    rank: Rank | None = None,
    per_layer: PerLayerInputs | None = None,
) -> CpuDecoder | None:
    """Return the decoder built from these parts of a model, or None if its operations are not the C kernels'.

    config: that of all ranks. head: None = logits are never asked for. rank: of the process in a group, whose parts
    these are. per_layer: the inputs of single layers; None = there are none.
    """
    if not isinstance(operations, CpuOperations):
        return None
    assert isinstance(embedding, CpuEmbedding), type(embedding)
    assert per_layer is None or isinstance(per_layer, CpuPerLayerInputs), type(per_layer)
    return CpuDecoder(
        operations.library,
        [_parts(layer) for layer in layers],
        embedding,
        _norm(norm),
        float_norm=_norm(float_norm),
        head=None if head is None else _matrix(head),
        tables=operations.tables,
        num_heads=config.num_attention_heads if rank is None else rank.shard.heads(config).length,
        residual_multiplier=config.residual_multiplier,
        logits_cap=config.logits_cap,
        group=None if rank is None else _group(config, rank),
        per_layer=per_layer,
        axes=axes_of_pairs(config),
    )


def _group(config: ModelConfig, rank: Rank) -> DecoderGroup:
    """Return where the rank's columns are in the results of the group."""
    shard = rank.shard
    assert isinstance(rank.memory, SharedMemory | SeparateMemory), type(rank.memory)
    every = [shard._replace(rank=one) for one in range(shard.size)]
    recurrent, experts, layers = config.recurrent, config.experts, range(config.num_hidden_layers)

    def columns(width: int) -> Ints:
        return np.array([*(one.columns(width).first for one in every), width], np.int64)

    heads = np.array([*(one.heads(config).first for one in every), config.num_attention_heads], np.int64)

    def attended(layer: int) -> Ints:
        if recurrent is not None and layer in recurrent.layers:
            return _recurred(every, recurrent)
        return heads * (config.heads_of(layer).head_dim if config.latent is None else config.latent.value_dim)

    own = max(shard.heads(config).length * config.heads_of(layer).head_dim for layer in layers)
    if recurrent is not None:
        own = max(own, _own_recurred(shard, recurrent))
    return DecoderGroup(
        rank.memory,
        shard.rank,
        shard.size,
        own_attended=own,
        attended=[attended(layer) for layer in layers],
        hidden=columns(config.hidden_size),
        gated=[columns(config.mlp_size(layer)) for layer in layers],
        vocabulary=columns(config.vocab_size),
        expert_gated=columns(0 if experts is None else experts.intermediate_size),
        shared_gated=columns(0 if experts is None else experts.shared_size),
        recurrences=None if recurrent is None else _recurrences(recurrent),
    )


def _recurred(every: Sequence[Shard], whole: RecurrentParts) -> Ints:
    """Return where the columns of recurrences are in a part of a row. every: the shards of all ranks."""
    width = whole.sizes.out_width // num_turns(whole)
    return np.array([*(one.recurrent(whole).columns.first for one in every), width], np.int64)


def _own_recurred(shard: Shard, whole: RecurrentParts) -> int:
    """Return how many columns of a recurrence's result a rank needs: its own, or all if their norm is common."""
    if whole.kind == "state space":
        return whole.sizes.out_width
    return shard.recurrent(whole).columns.length * num_turns(whole)


def _recurrences(whole: RecurrentParts) -> RecurrencePlaces:
    size = whole.sizes.out_width // whole.num_groups
    return RecurrencePlaces(num_turns(whole), norm_size=size if whole.kind == "state space" else 0)


def _parts(layer: Layer) -> LayerParts:
    mixer = layer.mixer
    return LayerParts(
        input_norm=_norm(layer.input_norm),
        qkv=_matrix(mixer.qkv),
        mix=_mix(mixer.mix),
        place=mixer.place,
        output_gate=None if mixer.output_gate is None else _matrix(mixer.output_gate.product),
        o=_matrix(mixer.o),
        attention_out_norm=None if layer.attention_out is unchanged else _norm(layer.attention_out),
        mlp_norm=_norm(layer.mlp_norm),
        mlp=None if layer.mlp is None else _mlp(layer.mlp),
        mlp_out_norm=None if layer.mlp_out is unchanged else _norm(layer.mlp_out),
        kind=layer.kind,
        beside=None if layer.beside is None else _beside(layer.beside),
        own_inputs=None if layer.own_inputs is None else _own_inputs(layer.own_inputs),
        scale=layer.scale,
    )


def _beside(beside: ExpertsBeside) -> BesideParts:
    experts = _mlp(beside.routed)
    assert isinstance(experts, CpuExperts), type(experts)
    return BesideParts(
        _norm(beside.input_norm),
        _norm(beside.router_norm),
        experts,
        _norm(beside.dense_norm),
        _norm(beside.output_norm),
    )


def _own_inputs(own: OwnInputs) -> OwnInputParts:
    return OwnInputParts(_matrix(own.gate), _matrix(own.out), _norm(own.norm))


def _mix(mix: Callable[[Tensor, Any, int], Tensor]) -> AttentionParts | CpuRecurrence:
    if isinstance(mix, CpuRecur):
        return mix.recurrence
    if isinstance(mix, CpuLatentAttend):
        return AttentionParts(None, mix.scale, latent=mix.latent)
    assert isinstance(mix, CpuAttend), type(mix)
    rope = mix.rope
    return AttentionParts(
        rope.norms,
        mix.scale,
        rope.of_rows,
        mix.cap,
        mix.sinks,
        centred_norms=rope.is_centred,
        norms_after=rope.is_after,
        values=rope.values,
        row=rope.row,
    )


def _mlp(mlp: Mlp) -> DenseParts | CpuExperts:
    if isinstance(mlp, RoutedMlp):
        assert isinstance(mlp.experts, CpuExperts), type(mlp.experts)
        return mlp.experts
    assert isinstance(mlp, DenseMlp), type(mlp)
    return DenseParts(_matrix(mlp.gate_up), _matrix(mlp.down))


def _norm(norm: Norm | Operation) -> CpuNorm:
    assert isinstance(norm, CpuNorm), type(norm)
    return norm


def _matrix(product: Product) -> PackedMatrix:
    assert isinstance(product, PackedMatrix), type(product)
    return product
