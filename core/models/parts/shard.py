"""Shard: one rank's part of a model: some of the heads, and some of the columns of each product's result.

Results are split, but sums never are. So each number is computed by one rank, in the same order as in one process, and
has the same bits. Only if all heads of Q, or of K, have one norm, each rank computes all of them; and each computes the
vectors of latent attention, which experts a token has, and what layers make of inputs of their own. Any number of ranks
up to the number of query heads works, and heads need not be divisible by it.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from core.models.config import XIELU_NAMES, ModelConfig, RecurrentParts, RowOfHeads
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.ranges import Range, groups_of, part_of, split_heads
from core.models.parts.recurrent_part import RecurrentPart, part_of_recurrent
from core.models.parts.weight_parts import WeightParts
from ipc.errors import ConfigError

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_HEAD = re.compile(r"(model\.layers\.\d+\.self_attn\.heads)\.(\d+)\.(\w+)\.weight")
_EXPERT = re.compile(r"\.experts\.\d+\.")
#: What each rank has of a routed MLP as a whole: each chooses the experts of all tokens.
_ROUTER = {
    f"mlp.{name}" for name in ("router", "router_correction", "shared_expert_gate", "expert_scales", "router_norm")
}
#: What each rank has of latent attention as a whole: the vector that is cached, and that of queries.
_LATENT = {f"self_attn.{name}" for name in ("q_a_proj", "q_a_norm", "kv_a_proj", "kv_a_norm")}
#: What each rank has of a layer's own inputs as a whole, and of hidden states in streams; these are small.
_OWN_INPUTS = {"per_layer_input_gate", "per_layer_projection"}
_STREAMS = {
    *(f"streams.{name}" for name in ("router_norm", "router", "prediction", "correction", "scale")),
    *(f"residual.{name}" for name in ("left", "right", "norm")),
}
#: Adjacent columns of a packed matrix (kernels/cpu/c/products/gemm.h). A rank gets whole panels if there are enough.
_PANEL = 32


class Shard(NamedTuple):
    """One rank in a group of `size`."""

    rank: int
    size: int

    def heads(self, config: ModelConfig) -> Range:
        """Return the rank's query heads, which are the same in all layers.

        It has whole KV heads with all their query heads. If there are fewer KV heads than ranks, several ranks have the
        same KV head and share its query heads. If layers have two numbers of KV heads, that holds for the smaller one,
        and within it for the larger one.
        """
        counts = {config.num_key_value_heads} | ({config.full_heads[0]} if config.full_heads is not None else set())
        return split_heads(config.num_attention_heads, sorted(counts), self.rank, self.size)

    def kv_heads(self, config: ModelConfig, count: int) -> Range:
        """Return the rank's KV heads in layers with so many of all ranks."""
        return groups_of(self.heads(config), config.num_attention_heads // count)

    def columns(self, width: int) -> Range:
        """Return the rank's columns of a result with this width."""
        return part_of(width, self.rank, self.size, _PANEL)

    def recurrent(self, whole: RecurrentParts) -> RecurrentPart:
        """Return the rank's part of the layers with recurrent states."""
        return part_of_recurrent(whole, self.rank, self.size)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of the rank's part of attention and of recurrent layers."""
        heads, kv_heads = self.heads(config), self.kv_heads(config, config.num_key_value_heads)
        row = RowOfHeads(config.num_attention_heads, config.num_key_value_heads, heads.first, kv_heads.first)
        full = config.full_heads
        own_full = full and full._replace(num_key_value_heads=self.kv_heads(config, full.num_key_value_heads).length)
        return msgspec.structs.replace(
            config,
            num_attention_heads=heads.length,
            num_key_value_heads=kv_heads.length,
            row_of_heads=row if config.qk_norm_of_rows else None,
            full_heads=own_full,
            recurrent=None if config.recurrent is None else self.recurrent(config.recurrent).own,
        )

    def rows(self, config: ModelConfig, layer: int) -> dict[str, Sequence[Range]]:
        """Return the rank's rows of each matrix and vector of a layer, and of embeddings and head, by our name.

        Names have no number of a layer or of an expert, and no ending. config: of the whole model.
        """
        own_heads, (count, head_dim) = self.heads(config), config.heads_of(layer)
        heads, kv_heads = own_heads.times(head_dim), self.kv_heads(config, count).times(head_dim)
        hidden, words = [self.columns(config.hidden_size)], [self.columns(config.vocab_size)]
        queries, keys = config.num_attention_heads * head_dim, count * head_dim
        gates = [heads.moved(queries)] if config.output_gate else []
        rows: dict[str, Sequence[Range]] = {
            "self_attn.q_proj": [heads, *gates],
            "self_attn.k_proj": [kv_heads],
            "self_attn.v_proj": [kv_heads],
            "self_attn.qkv_proj": [heads, kv_heads.moved(queries), kv_heads.moved(queries + keys)],
            "self_attn.g_proj": [own_heads],
            "self_attn.sinks": [own_heads],
            "self_attn.o_proj": hidden,
            "lm_head": words,
            "model.embed_tokens": words,
        }
        sizes_of_mlps = {"mlp": config.mlp_size(layer)}
        if (experts := config.experts) is not None:
            sizes_of_mlps |= {"mlp.experts": experts.intermediate_size, "mlp.shared_expert": experts.shared_size}
        for name, size in sizes_of_mlps.items():
            gated = self.columns(size)
            rows |= {f"{name}.{half}_proj": [gated] for half in ("gate", "up")}
            rows |= {f"{name}.gate_up_proj": [gated, gated.moved(size)], f"{name}.down_proj": hidden}
        if config.qk_norm_of_rows:
            rows |= {"self_attn.q_proj": [Range(0, queries)], "self_attn.k_proj": [Range(0, keys)]}
        if (latent := config.latent) is not None:
            own = [own_heads.times(latent.plain_dim + latent.rotated_dim)]
            rows |= {"self_attn.q_proj": own, "self_attn.q_b_proj": own}
            rows["self_attn.kv_b_proj"] = [own_heads.times(latent.plain_dim + latent.value_dim)]
        if config.recurrent is not None:
            rows |= {**self.recurrent(config.recurrent).rows, "mixer.out_proj": hidden}
        return rows

    def adapted_rows(self, config: ModelConfig) -> list[dict[str, Sequence[Range]]]:
        """Return, by layer, the rows of matrices that adapters change: rows(), with queries and their gates apart."""
        own = [self.heads(config).times(config.head_dim)]
        gates: dict[str, Sequence[Range]] = {"self_attn.q_gate": own, "self_attn.q_proj": own}
        own_gates = gates if config.output_gate else {}
        return [self.rows(config, layer) | own_gates for layer in range(config.num_hidden_layers)]

    def parts(self, config: ModelConfig, weights: Iterable[tuple[str, Weight]]) -> WeightParts:
        """Return the rank's parts of a model's weights."""
        return _ShardedParts(weights, self, config)


class _ShardedParts(WeightParts):
    """The weight rows whose products are the rank's columns, and its part of the embeddings.

    Norms are whole, except that norms and matrices of single heads are those of its heads. Errors: ConfigError for an
    unknown weight of a layer, because its part would be a guess.
    """

    def __init__(self, weights: Iterable[tuple[str, Weight]], shard: Shard, config: ModelConfig) -> None:
        super().__init__(weights)
        first, first_kv = shard.heads(config).first, shard.kv_heads(config, config.num_key_value_heads).first
        self._first_heads = dict.fromkeys(("q_norm", "k_b_proj", "v_b_proj"), first) | {"k_norm": first_kv}
        every = range(config.num_hidden_layers)
        self._rows = [shard.rows(config, layer) for layer in every]
        self._whole = {"mixer.norm"} if config.recurrent is not None else set[str]()
        self._whole |= {f"mlp.{name}" for name in XIELU_NAMES}
        self._whole |= _ROUTER if config.experts is not None else set[str]()
        self._whole |= _LATENT if config.latent is not None else set[str]()
        if config.qk_norm_of_rows:
            self._whole |= {"self_attn.q_norm", "self_attn.k_norm"}
        self._whole |= _OWN_INPUTS if config.per_layer is not None else set[str]()
        self._whole |= _STREAMS if config.streams is not None else set[str]()
        self._whole |= {"layer_scale"} if config.layer_scales else set[str]()
        self._norm_shapes = {(config.hidden_size,), *((config.heads_of(layer).head_dim,) for layer in every)}

    def _take(self, names: tuple[str, ...], name: str) -> Weight:
        if (match := _OF_HEAD.fullmatch(name)) is not None:
            prefix, head, kind = match.groups()
            name = f"{prefix}.{self._first_heads[kind] + int(head)}.{kind}.weight"
            return super()._take((name,), name)
        weight = super()._take(names, name)
        of_layer = _LAYER.match(name)
        own_name = _EXPERT.sub(".experts.", _LAYER.sub("", name)).rpartition(".")[0]
        own = self._rows[int(of_layer[1]) if of_layer else 0].get(own_name)
        if own is None:
            if of_layer and weight.shape not in self._norm_shapes and own_name not in self._whole:
                raise ConfigError(f"tensor_parallel_size > 1 does not support models with {name}: leave it out")
            return weight
        if isinstance(weight, StoredMatrix):
            return StoredMatrix.joined([weight.rows(*one) for one in own])
        return (
            weight[own[0].first : own[0].last]
            if len(own) == 1
            else np.concatenate([weight[slice(*one)] for one in own])
        )
