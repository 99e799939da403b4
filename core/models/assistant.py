"""Assistant: a small decoder that predicts a model's next tokens from the model's hidden states, K and V.

It has no K and V of its own: each of its layers reads those of a layer of the model (Gemma 4's assistants). At the
position of the last known token, of which the model has computed nothing yet, it reads this token's embedding and the
hidden state after the token before, and attends to the tokens before. From what it makes of a draft it goes on at the
same position: the model has no K and V of drafts.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from core.models.config import ModelConfig
from core.models.llama import Llama
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.operations.tensor import Operation
from core.models.parts.rank import Rank
from core.models.step import ModelInputs
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.cpu.decoder import DecoderResult
from kernels.elements import FLOAT32, Numbers, rounded, to_floats
from kernels.memory.kv_cache import KVCache


class TokenClusters(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary in clusters of equal size, of which only the most likely ones get logits."""

    num_clusters: int
    num_chosen: int


class AssistantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and constants of an assistant."""

    own: ModelConfig  # of its layers, with the places of the model's K and V (lent_places), and of its vocabulary
    clusters: TokenClusters | None = None  # None: all tokens get logits


class AssistantWeights(NamedTuple):
    """An assistant's weights."""

    tensors: Iterable[tuple[str, Weight]]  # with the names and shapes of assistant_shapes()
    token_ids: Ints | None  # [vocabulary] the tokens cluster by cluster; None = there are no clusters


#: Of the products around the layers, and of the centroids.
_IN, _OUT, _CENTROIDS = (f"model.layers.0.{name}.weight" for name in ("pre_projection", "post_projection", "centroids"))
_EMBEDDING = "model.embed_tokens.weight"


class Assistant:
    """The weights and the forward pass of an assistant, on the C kernels.

    If ranks have a part of the model each, they run its layers together: each attends with the heads whose K and V
    it has. The first rank does the rest, and tells the others.
    """

    #: Called before the layers run with the arguments of run(), but for the cache; None: no other rank runs them.
    tell: Callable[[Floats, Ints, AnyInts], None] | None = None

    def __init__(
        self,
        config: AssistantConfig,
        weights: AssistantWeights,
        target: Llama,
        *,
        rank: Rank | None = None,
        embedding: Operation | None = None,
    ) -> None:
        """Pack the weights. Errors: ModelFileError naming missing tensors.

        target: the model whose tokens it predicts, or a part of it. Its operations are those of the C kernels. rank: of
        the process in a group that computes the model. embedding: of all the model's tokens, with its factor; None:
        that of the target.
        """
        assert isinstance(target.operations, CpuOperations), type(target.operations)
        tensors, own = dict(weights.tensors), config.own
        self.vocab_size, self.max_model_len, self.sampler = own.vocab_size, own.max_position_embeddings, target.sampler
        self._dtype, self._embedding, self._norm = target.dtype, embedding or target.embedding, target.final_norm
        around = {name: _matrix(tensors.pop(name)) for name in (_IN, _OUT)}
        self._clusters: _ChosenClusters | None = None
        if config.clusters is not None:
            assert weights.token_ids is not None, config
            if rank is None or not rank.shard.rank:
                rows = _matrix(tensors[_EMBEDDING]).own(self._dtype)
                self._clusters = _ChosenClusters(config.clusters, weights.token_ids, rows)
            # The centroids are the head of the layers, whose inputs are no tokens.
            tensors[_EMBEDDING] = tensors.pop(_CENTROIDS)
            own = msgspec.structs.replace(own, vocab_size=config.clusters.num_clusters)
        self._width, operations = target.config.hidden_size, target.operations
        self._layers = Llama(
            own,
            [(_EMBEDDING, tensors.pop(_EMBEDDING)), *tensors.items()],
            target.dtype,
            target.numerics,
            library=operations.library,
            form=operations.form,
            rank=rank,
            shares_blocks=operations.shares_blocks,
        )
        self._layers.tap((own.num_hidden_layers,))
        self._in, self._out = (self._layers.operations.linear(one, out_dtype=FLOAT32) for one in around.values())

    def bytes_per_block(self, block_size: int) -> int:
        """Return 0: it has no K and V."""
        return 0

    def states(self, taps: Floats) -> Floats:
        """Return the states [n, width] float32 for the model's hidden states after its last layer [n, 1, width]."""
        states: Floats = self._norm(taps.reshape(len(taps), -1))
        return states

    def trial_states(self, count: int) -> Floats:
        """Return states [count, width] float32 without a meaning."""
        return np.zeros((count, self._width), np.float32)

    def forward(
        self, token_ids: Ints, states: Floats, lengths: Ints, block_tables: AnyInts, cache: KVCache
    ) -> tuple[Floats, Floats]:
        """Return the float32 logits [n, vocab] after one token of each of n rows, and the states [n, width] there.

        token_ids [n]: of the last known token, or a draft. states [n, width]: before it. lengths [n]: of the known
        tokens, all but the last of which have K and V in the model's cache. block_tables [n, P]: of their blocks.
        """
        x = rounded(np.concatenate((self._embedding(token_ids), states), 1), self._dtype)
        given = self._in(x)
        if self.tell is not None:
            self.tell(given, lengths, block_tables)
        result = self.run(given, lengths, block_tables, cache)
        normed = to_floats(self._layers.final_norm(result.states_of(np.arange(len(token_ids)))[:, 0]))
        logits = result.logits if self._clusters is None else self._clusters.logits(result.logits, normed)
        return logits, self._out(rounded(normed, self._dtype))

    def run(self, given: Floats, lengths: Ints, block_tables: AnyInts, cache: KVCache) -> DecoderResult:
        """Run the layers on inputs [n, hidden] float32, of one token of each of n rows. The rest: see forward()."""
        each, places = np.arange(len(given)), lengths - 1
        attention = self._layers.attention_metadata(np.ones(len(given), np.int64), places, block_tables, cache)
        result = self._layers.forward(
            ModelInputs(-1 - each, places, np.full(len(given), -1), attention, cache, each, given=given, turned=places)
        )
        assert isinstance(result, DecoderResult), type(result)
        return result


class _ChosenClusters:
    """Logits of the tokens in the clusters whose centroids have the largest products with a state."""

    def __init__(self, clusters: TokenClusters, token_ids: Ints, rows: Numbers) -> None:
        """token_ids [vocabulary]: see AssistantWeights. rows [vocabulary, d]: the head."""
        self._num_chosen = clusters.num_chosen
        self._token_ids = token_ids.reshape(clusters.num_clusters, -1)
        self._rows = rows[self._token_ids]  # [clusters, tokens, d]

    def logits(self, fits: Floats, states: Floats) -> Floats:
        """Return the logits [n, vocabulary] float32, -inf outside the chosen clusters.

        fits [n, clusters]: products of centroids and states [n, d] float32.
        """
        chosen = np.argpartition(-fits, self._num_chosen - 1)[:, : self._num_chosen]
        logits = np.full((len(states), self._token_ids.size), -np.inf, np.float32)
        for row, state, own in zip(logits, states, chosen, strict=True):  # each reads some megabytes
            row[self._token_ids[own]] = np.einsum("ctd,d->ct", to_floats(self._rows[own]), state)
        return logits


def _matrix(weight: Weight) -> StoredMatrix:
    return StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight


def assistant_shapes(
    config: AssistantConfig, own: dict[str, tuple[int, ...]], width: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of an assistant's weights. own: of a model with config.own. width: of the model."""
    hidden, clusters = config.own.hidden_size, config.clusters
    shapes = {**own, _IN: (hidden, 2 * width), _OUT: (width, hidden)}
    return shapes if clusters is None else {**shapes, _CENTROIDS: (clusters.num_clusters, hidden)}
