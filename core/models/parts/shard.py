"""Shard: one rank's part of a model: some of the heads, and some of the columns of each product's result.

Results are split, but sums never are. So each number is computed by one rank, in the same order as in one process, and
has the same bits. Any number of ranks up to the number of query heads works, and heads need not be divisible by it.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from core.models.config import ModelConfig
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.weight_parts import WeightParts
from ipc.errors import ConfigError

_LAYER = re.compile(r"model\.layers\.\d+\.")
_HEAD_NORM = re.compile(r"(model\.layers\.\d+\.self_attn\.heads)\.(\d+)\.([qk])_norm\.weight")
#: Adjacent columns of a packed matrix (kernels/cpu/c/products/gemm.h). A rank gets whole panels if there are enough.
_PANEL = 32


class Range(NamedTuple):
    """Consecutive items: from `first` to before `last`."""

    first: int
    last: int

    @property
    def length(self) -> int:
        """Return the number of items."""
        return self.last - self.first

    def times(self, size: int) -> "Range":
        """Return the range of the parts of these items, which have `size` parts each."""
        return Range(self.first * size, self.last * size)


def part_of(count: int, rank: int, size: int, unit: int = 1) -> Range:
    """Return a rank's share of `count` items: whole units except for the last one, if there are enough of them."""
    unit = unit if count >= unit * size else 1
    units = -(-count // unit)
    first, last = (min(count, units * one // size * unit) for one in (rank, rank + 1))
    return Range(first, last)


class Shard(NamedTuple):
    """One rank in a group of `size`."""

    rank: int
    size: int

    def heads(self, config: ModelConfig) -> tuple[Range, Range]:
        """Return the rank's query heads and its KV heads.

        It has whole KV heads with all their query heads. If there are fewer KV heads than ranks, several ranks have the
        same KV head and share its query heads.
        """
        num_kv, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        if self.size <= num_kv:
            kv = part_of(num_kv, self.rank, self.size)
            return kv.times(group), kv
        owner = self.rank * num_kv // self.size
        ranks = [rank for rank in range(self.size) if rank * num_kv // self.size == owner]
        own = part_of(group, ranks.index(self.rank), len(ranks))
        return Range(owner * group + own.first, owner * group + own.last), Range(owner, owner + 1)

    def columns(self, width: int) -> Range:
        """Return the rank's columns of a result with this width."""
        return part_of(width, self.rank, self.size, _PANEL)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the config of the rank's part of attention."""
        heads, kv_heads = self.heads(config)
        return msgspec.structs.replace(config, num_attention_heads=heads.length, num_key_value_heads=kv_heads.length)

    def parts(self, config: ModelConfig, weights: Iterable[tuple[str, Weight]]) -> WeightParts:
        """Return the rank's parts of a model's weights."""
        return _ShardedParts(weights, self, config)


class _ShardedParts(WeightParts):
    """The weight rows whose products are the rank's columns, and its part of the embeddings.

    Norms are whole, except that per-head norms are those of its heads. Errors: ConfigError for an unknown weight of a
    layer, because its part would be a guess.
    """

    def __init__(self, weights: Iterable[tuple[str, Weight]], shard: Shard, config: ModelConfig) -> None:
        super().__init__(weights)
        own_heads = shard.heads(config)
        self._first_heads = {kind: own.first for kind, own in zip("qk", own_heads, strict=True)}
        heads, kv_heads = (one.times(config.head_dim) for one in own_heads)
        hidden, gated = shard.columns(config.hidden_size), shard.columns(config.intermediate_size)
        self._rows = {
            "self_attn.q_proj": heads,
            "self_attn.k_proj": kv_heads,
            "self_attn.v_proj": kv_heads,
            "self_attn.o_proj": hidden,
            "mlp.gate_proj": gated,
            "mlp.up_proj": gated,
            "mlp.down_proj": hidden,
            **dict.fromkeys(("lm_head", "model.embed_tokens"), shard.columns(config.vocab_size)),
        }
        self._norm_shapes = {(config.hidden_size,), (config.head_dim,)}

    def _take(self, names: tuple[str, ...], name: str) -> Weight:
        if (match := _HEAD_NORM.fullmatch(name)) is not None:
            prefix, head, kind = match.groups()
            name = f"{prefix}.{self._first_heads[kind] + int(head)}.{kind}_norm.weight"
            return super()._take((name,), name)
        weight = super()._take(names, name)
        own = self._rows.get(_LAYER.sub("", name).rpartition(".")[0])
        if own is None:
            if _LAYER.match(name) and weight.shape not in self._norm_shapes:
                raise ConfigError(f"tensor_parallel_size > 1 does not support models with {name}: leave it out")
            return weight
        return weight.rows(*own) if isinstance(weight, StoredMatrix) else weight[own.first : own.last]
