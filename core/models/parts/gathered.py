"""The products of a rank whose operations run one by one, and whose columns are gathered (tensor_parallel_size).

The heads of attention and of recurrent layers, the columns of gate and up, and those of results belong to one rank
each. A number is summed by one rank, so it has the same bits as in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from core.models.config import ModelConfig
from core.models.layers.layer import Layer
from core.models.layers.mlp import DenseMlp, Mlp, RoutedMlp, SparseMlp
from core.models.operations.operations import Product, SharesExperts, SharesNorm
from core.models.operations.tensor import Operation, Tensor
from core.models.parts.ranges import Range
from core.models.parts.rank import GathersParts
from core.models.parts.recurrent_part import num_turns
from core.models.parts.shard import Shard
from kernels.routing import ExpertColumns


@dataclass(frozen=True)
class _GatheredProduct:
    """A product whose input and result are columns of all ranks. Each rank computes some of the result's."""

    product: Product
    group: GathersParts
    taken: Sequence[int]  # widths of the ranks' columns of its input, which are gathered first; none: it has them all
    given: Sequence[int]  # of its result
    num_turns: int = 1  # its input has this many parts, and each rank has columns of each of them

    @property
    def variant(self) -> str:
        return self.product.variant

    def __call__(self, x: Tensor) -> Tensor:
        if self.taken:
            count = len(x)
            x = self.group.gather(x.reshape(count * self.num_turns, -1), self.taken).reshape(count, -1)
        return self.group.gather(self.product(x), self.given)

    def around(self, change: Callable[[Product], Product]) -> Product:
        """Return the same with another product between the exchanges."""
        return replace(self, product=change(self.product))


@dataclass(frozen=True)
class _GatheredEmbedding:
    """An embedding of which this rank has the rows of some tokens."""

    embedding: Operation
    group: GathersParts
    own: Range  # tokens

    def __call__(self, ids: Tensor, *places: Tensor) -> Tensor:
        rows = self.embedding((ids - self.own.first).clip(0, self.own.length - 1), *places)
        return self.group.join_rows(rows, (ids < self.own.first) | (ids >= self.own.last))

    def around(self, change: Callable[[Operation], Operation]) -> Operation:
        """Return the same with another embedding before the exchange."""
        return replace(self, embedding=change(self.embedding))


class GatheredParts:
    """Puts the parts of a rank's model together with those of the other ranks."""

    def __init__(self, config: ModelConfig, shard: Shard, group: GathersParts) -> None:
        """config: of the whole model."""
        every = [shard._replace(rank=rank) for rank in range(shard.size)]

        def widths(width: int) -> list[int]:
            return [one.columns(width).length for one in every]

        self._group, self._own_words = group, shard.columns(config.vocab_size)
        self._hidden, self._words = widths(config.hidden_size), widths(config.vocab_size)
        layers, heads = range(config.num_hidden_layers), [one.heads(config).length for one in every]
        latent, experts = config.latent, config.experts
        #: By layer: of attention, and of the MLP.
        sizes = [config.heads_of(layer).head_dim if latent is None else latent.value_dim for layer in layers]
        self._attended = [[count * size for count in heads] for size in sizes]
        self._gated = [widths(config.mlp_size(layer)) for layer in layers]
        #: Of recurrent layers: the widths of the ranks' columns of a turn, and how many turns a row of results has.
        self._recurred, self._num_turns = list[int](), 1
        if (recurrent := config.recurrent) is not None:
            self._recurred = [one.recurrent(recurrent).columns.length for one in every]
            self._num_turns = num_turns(recurrent)
        #: Of routed MLPs; None: there are none.
        self._experts = None
        if experts is not None:
            wide = experts.intermediate_size, experts.shared_size, config.hidden_size
            self._experts = ExpertColumns(*(partial(group.gather, widths=widths(width)) for width in wide))
        has_norm = recurrent is not None and recurrent.kind == "state space" and recurrent.has_norm
        #: Of state spaces whose heads of all ranks have one norm; None: there are none.
        self._normed = recurrent.sizes if recurrent is not None and has_norm else None

    def layer(self, layer: Layer, index: int) -> Layer:
        """Return the layer with this index, with whole results."""
        mixer, mlp, gated = layer.mixer, layer.mlp, self._gated[index]
        mixed, turns = (self._recurred, self._num_turns) if mixer.is_recurrent else (self._attended[index], 1)
        if mixer.is_recurrent and self._normed is not None:
            assert isinstance(mixer.mix, SharesNorm), type(mixer.mix)
            mixer.mix.share_norm(partial(self._group.gather, widths=self._recurred), self._normed)
            mixed = []  # its results are whole
        mixer = replace(mixer, o=_GatheredProduct(mixer.o, self._group, mixed, self._hidden, turns))
        if isinstance(mlp, DenseMlp):
            mlp = replace(mlp, down=_GatheredProduct(mlp.down, self._group, gated, self._hidden))
        if isinstance(mlp, SparseMlp):  # whose gates count or not by those of all ranks
            gate, up = (_GatheredProduct(one, self._group, (), gated) for one in (mlp.gate, mlp.up))
            mlp = replace(mlp, gate=gate, up=up, down=_GatheredProduct(mlp.down, self._group, (), self._hidden))
        self._share_experts(mlp)
        self._share_experts(None if layer.beside is None else layer.beside.routed)
        return replace(layer, mixer=mixer, mlp=mlp)

    def _share_experts(self, mlp: Mlp | None) -> None:
        """Let a routed MLP give whole results."""
        if isinstance(mlp, RoutedMlp):
            assert isinstance(mlp.experts, SharesExperts), type(mlp.experts)
            assert self._experts is not None, "the config says that there are experts"
            mlp.experts.share_columns(self._experts)

    def embedding(self, embedding: Operation) -> Operation:
        """Return the embedding of all tokens."""
        return _GatheredEmbedding(embedding, self._group, self._own_words)

    def head(self, head: Product) -> Product:
        """Return the head with the logits of all tokens."""
        return _GatheredProduct(head, self._group, (), self._words)
