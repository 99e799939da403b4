"""DraftHead: one decoder layer that predicts a model's next tokens from the model's own hidden states.

For the position after token i it reads token i + 1 and the hidden state after token i. Its output is a state after
token i + 1, from which it can continue. EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840) and multi-token prediction
layers (MTP; DeepSeek-V3, arXiv 2412.19437) work like this; they differ in how token and state are joined, and in which
norms come between.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from core.models.architectures.architecture import MtpRow
from core.models.config import ModelConfig
from core.models.layers.layer import Layer, build_layer, build_norm
from core.models.layers.layer_kinds import windows
from core.models.llama import Llama
from core.models.operations.head_place import HeadPlace, StoringMix, TappedOperations
from core.models.operations.operations import AttentionWork, Norm, Operations, Product
from core.models.operations.stored_matrix import Weight
from core.models.operations.tensor import Operation, Tensor
from core.models.parts.weight_parts import WeightParts
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.elements import FLOAT32
from kernels.memory.kv_cache import KVCache


class Eagle3Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What an EAGLE-3 head has in addition to its layer."""

    draft_vocab_size: int  # tokens that it can predict
    has_embeddings: bool  # it has its own embeddings; otherwise it uses the model's
    norms_taps: bool = False  # the joined hidden states are normalised before fc
    norm_is_residual: bool = False  # the normalised state is passed on


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes and constants of a draft head."""

    layer: ModelConfig  # config of a one-layer model like the head's layer; it has the model's vocabulary
    taps: tuple[int, ...]  # it reads the hidden states after this many of the model's layers
    tap_width: int  # numbers in each of these
    eagle3: Eagle3Parts | None = None  # of an EAGLE-3 head
    mtp: MtpRow | None = None  # of a layer for multi-token prediction


class HeadWeights(NamedTuple):
    """A draft head's weights."""

    tensors: Iterable[tuple[str, Weight]]  # with the names and shapes of head_shapes()
    token_ids: Ints | None  # [draft vocabulary] ids in the model's vocabulary; None = all


class ModelEnds(Protocol):
    """A model's embeddings and its head, which a draft head uses too."""

    def embedding(self) -> Operation:
        """Return the embeddings of all tokens, without the model's factor."""

    def head(self) -> Product:
        """Return the head with the logits of all tokens."""


class _OwnEnds(NamedTuple):
    """The embeddings and the head of a whole model."""

    target: Llama
    place: HeadPlace

    def embedding(self) -> Operation:
        return self.place.unscaled(self.target.embedding)

    def head(self) -> Product:
        assert self.target.head is not None, "the target is whole"
        return self.target.head


class _Joint(Protocol):
    """Joins a token and the hidden state before it."""

    def states(self, taps: Tensor) -> Tensor:
        """Return the states [T, hidden] float32 that represent the model's hidden states [T, taps * width]."""

    def join(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of Q, K and V, and the residual stream [T, hidden] float32, which the caller owns."""


@dataclass(frozen=True)
class _Eagle3Joint:
    taps_norm: Norm | None
    fc: Product
    token_norm: Norm
    state_norm: Norm
    norm_is_residual: bool
    place: HeadPlace

    def states(self, taps: Tensor) -> Tensor:
        return self.fc(self.place.rounded(taps) if self.taps_norm is None else self.taps_norm(taps))

    def join(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.state_norm(states)
        residual = self.place.own_floats(normed if self.norm_is_residual else states)
        return self.place.joined((self.token_norm(embedded), normed), 1), residual


@dataclass(frozen=True)
class _MtpJoint:
    token_norm: Norm
    state_norm: Norm
    projection: Product
    input_norm: Norm
    taps_norm: Norm | None
    row: MtpRow
    place: HeadPlace

    def states(self, taps: Tensor) -> Tensor:
        return taps if self.taps_norm is None else self.place.own_floats(self.taps_norm(taps))

    def join(self, embedded: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.row.zeroes_first:
            embedded[positions == 0] = 0
        normed = self.token_norm(embedded), self.state_norm(states)
        residual = self.projection(self.place.joined(normed if self.row.token_first else normed[::-1], 1))
        return self.input_norm(residual), residual


class DraftHead:
    """The weights and the forward pass of a draft head. It computes where the model does (HeadPlace).

    States and the model's hidden states are tensors there; tokens, positions, slots and logits are in host memory.
    """

    def __init__(self, config: HeadConfig, weights: HeadWeights, target: Llama, ends: ModelEnds | None = None) -> None:
        """Pack the weights, and tap the model's hidden states. Errors: ModelFileError naming missing tensors.

        target: the model whose tokens it predicts; its operations are TappedOperations. ends: if this process has a
        part of the model only; None = the target's.
        """
        assert isinstance(target.operations, TappedOperations), type(target.operations)
        own, dtype = config.layer, target.dtype
        self.config, self.dtype, self.sampler = config, dtype, target.sampler
        self.vocab_size, self.max_model_len = own.vocab_size, own.max_position_embeddings
        self._token_ids = weights.token_ids
        operations, place = target.operations.of_head(own)
        self._operations, self._place = operations, place
        parts = WeightParts(weights.tensors)
        self._layer = build_layer(operations, parts, own, 0, dtype)
        self._norm = build_norm(operations, parts, "model.norm", own, dtype)
        ends = ends or _OwnEnds(target, place)
        if config.eagle3 is None:
            self._joint: _Joint = _mtp_joint(operations, place, parts, config, self._layer, target)
            self._embedding, self._head = ends.embedding(), ends.head()
        else:
            self._joint = _eagle3_joint(operations, place, parts, config, self._layer, target)
            if config.eagle3.has_embeddings:
                self._embedding = operations.embedding(parts.take_matrix("model.embed_tokens.weight"), 1.0, None)
            else:
                self._embedding = ends.embedding()
            self._head = operations.head(parts.take_matrix("lm_head.weight"))
        target.tap(config.taps)

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of K and V of one block of block_size tokens."""
        return self._operations.bytes_per_block(block_size)

    def allocate_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate the cache of its K and V. Errors: MemoryError."""
        return self._operations.allocate_cache(num_blocks, block_size)

    def allocate_swap_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a cache for K and V of blocks that are swapped out. Errors: MemoryError."""
        return self._place.allocate_swap_cache(num_blocks, block_size)

    def states(self, *taps: Tensor) -> Tensor:
        """Return the states [T, hidden] float32 for the model's hidden states float32.

        taps: one or more [n, taps, width] or [n, taps * width], one after the other.
        """
        return self._joint.states(self._place.joined([part.reshape(len(part), -1) for part in taps], 0))

    def trial_states(self, count: int) -> Tensor:
        """Return states [count, hidden] float32 without a meaning."""
        return self.states(self._place.zeros(count, len(self.config.taps) * self.config.tap_width))

    def store(self, token_ids: Ints, states: Tensor, positions: Ints, slots: Ints, cache: KVCache) -> None:
        """Store K and V of tokens [T], each with the state before it [T, hidden] and that state's position and slot."""
        x, _ = self._join(token_ids, states, positions)
        mixer = self._layer.mixer
        assert isinstance(mixer.mix, StoringMix), type(mixer.mix)
        mixer.mix.store(mixer.qkv(x), self._step(positions, slots, cache), 0)

    def forward(
        self, token_ids: Ints, states: Tensor, positions: Ints, block_tables: AnyInts, cache: KVCache
    ) -> tuple[Floats, Tensor]:
        """Return the float32 logits [n, vocab] after one token of each of n rows, and the states [n, hidden] there.

        token_ids, states, positions [n]: as in store(). block_tables [n, P]: of the contexts. Tokens that the head
        cannot predict have the logit -inf.
        """
        size = cache.block_size
        slots = block_tables[np.arange(len(positions)), positions // size].astype(np.int64) * size + positions % size
        x, residual = self._join(token_ids, states, positions)
        step = self._step(positions, slots, cache, self._work(positions + 1, block_tables, cache))
        layer, mtp = self._layer, self.config.mtp
        assert layer.mlp is not None
        x = layer.mlp(layer.mlp_norm.after(residual, layer.mixer(x, step)))
        x = self._norm.after(residual, x)
        logits = self._over_vocabulary(self._place.to_host(self._head(x)))
        return logits, self._place.own_floats(x) if mtp and mtp.reads_normed else residual

    def _join(self, token_ids: Ints, states: Tensor, positions: Ints) -> tuple[Tensor, Tensor]:
        """Return the input of Q, K and V, and the residual stream."""
        return self._joint.join(self._embedding(self._place.sent(token_ids)), states, self._place.sent(positions))

    def _step(self, positions: Ints, slots: Ints, cache: KVCache, *work: AttentionWork) -> Any:
        return self._operations.step(self._place.sent(positions), self._place.sent(slots), work, cache)

    def _work(self, context_lens: Ints, block_tables: AnyInts, cache: KVCache) -> AttentionWork:
        counts = np.ones(len(context_lens), np.int64)
        (window,) = windows(self.config.layer)
        return self._operations.attention_work(counts, context_lens, block_tables, cache, window, 0)

    def _over_vocabulary(self, logits: Floats) -> Floats:
        if self._token_ids is None:
            return logits
        all_logits = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        all_logits[:, self._token_ids] = logits
        return all_logits


def _eagle3_joint(
    operations: Operations, place: HeadPlace, parts: WeightParts, config: HeadConfig, layer: Layer, target: Llama
) -> _Eagle3Joint:
    own, eagle3, dtype = config.layer, config.eagle3, target.dtype
    assert eagle3 is not None, config
    taps_norm = build_norm(operations, parts, "input_norm", own, dtype) if eagle3.norms_taps else None
    fc = operations.linear(parts.take_matrix("fc.weight"), out_dtype=FLOAT32)
    state_norm = build_norm(operations, parts, "model.layers.0.hidden_norm", own, dtype)
    return _Eagle3Joint(taps_norm, fc, layer.input_norm, state_norm, eagle3.norm_is_residual, place)


def _mtp_joint(
    operations: Operations, place: HeadPlace, parts: WeightParts, config: HeadConfig, layer: Layer, target: Llama
) -> _MtpJoint:
    own, row, dtype = config.layer, config.mtp, target.dtype
    assert row is not None, config
    token_norm, state_norm = (
        build_norm(operations, parts, f"model.layers.0.{name}_layernorm", own, dtype) for name in ("token", "hidden")
    )
    projection = operations.linear(parts.take_matrix("model.layers.0.input_proj.weight"), out_dtype=FLOAT32)
    taps_norm = target.final_norm if row.reads_normed else None
    return _MtpJoint(token_norm, state_norm, projection, layer.input_norm, taps_norm, row, place)


def head_shapes(config: HeadConfig, layer_shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of a head's weights by name. layer_shapes: of a layer with config.layer."""
    hidden, eagle3 = config.layer.hidden_size, config.eagle3
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer_shapes.items()} | {
        "model.norm.weight": (hidden,)
    }
    if eagle3 is None:
        names = ("token_layernorm", "hidden_layernorm")
        shapes |= {f"model.layers.0.{name}.weight": (hidden,) for name in names}
        return shapes | {"model.layers.0.input_proj.weight": (hidden, 2 * hidden)}
    for name in "qkv":
        rows = shapes[f"model.layers.0.self_attn.{name}_proj.weight"][0]
        shapes[f"model.layers.0.self_attn.{name}_proj.weight"] = (rows, 2 * hidden)
    depth = len(config.taps) * config.tap_width
    shapes |= {"model.layers.0.hidden_norm.weight": (hidden,), "fc.weight": (hidden, depth)}
    shapes |= {"input_norm.weight": (depth,)} if eagle3.norms_taps else {}
    shapes |= {"model.embed_tokens.weight": (config.layer.vocab_size, hidden)} if eagle3.has_embeddings else {}
    return shapes | {"lm_head.weight": (eagle3.draft_vocab_size, hidden)}
