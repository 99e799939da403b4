"""TorchOperations: a model's operations with torch, for machines without the C kernels; numerics level L0."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import layer_norm

from core.models.config import Activation, LatentParts, ModelConfig
from core.models.layers.layer_kinds import cached_layers, kinds, places_of_parts
from core.models.layers.rotary import of_each_kind, rotary_embeddings
from core.models.operations.latent_weights import LatentWeights
from core.models.operations.stored_matrix import StoredMatrix
from core.models.operations.tensor import Operation
from core.models.operations.token_adapters import TokenAdapters
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.elements import FLOAT32, Dtype
from kernels.low_rank import LowRank, ProductShape
from kernels.memory.kv_cache import KVCache, MixedKVCache, bytes_per_block
from kernels.recurrence import RecurrenceParts, StateRows, recur
from kernels.rotary import query_factors
from kernels.routing import Routing
from kernels.torch.activation import gelu_erf, gelu_tanh, relu_squared, xielu
from kernels.torch.attention import AttentionMetadata, attention_metadata, paged_attention
from kernels.torch.experts import TorchExpert, TorchExperts
from kernels.torch.gated_activation import clamped_silu_mul, gelu_erf_mul, gelu_tanh_mul, silu_mul
from kernels.torch.kv_cache import TorchKVCache
from kernels.torch.linear import TorchLinear
from kernels.torch.lora import TorchAdapter
from kernels.torch.norm import TorchNorm, add
from kernels.torch.output_gate import open_gates
from kernels.torch.rms_norm import rms_norm
from kernels.torch.rope import rope_kv_write, rotary_tables, rotate
from kernels.torch.tensors import DTYPES, to_array, to_tensor
from kernels.value_form import ValueForm

# TorchLatentAttend: one layer's latent attention (kernels/cpu/c/attention/latent.h) with torch's operations.


class TorchLatentAttend:
    """Write the cache, attend, and compute the heads' values from the result.

    The cache has both K and V. V is the same as K here, and the results for rotated numbers are dropped.
    """

    def __init__(
        self, latent: LatentParts, weights: LatentWeights, kind: int, scale: float, *, dtype: torch.dtype, stored: Dtype
    ) -> None:
        """stored: the dtype, as named by the readers of weights."""

        def tensor(matrix: StoredMatrix) -> torch.Tensor:
            return to_tensor(matrix.dense(stored))

        self._parts, self._kind, self._scale, self._dtype = latent, kind, scale, dtype
        self._keys = torch.stack([tensor(each) for each in weights.keys])  # [H, latent_dim, plain_dim]
        self._values = torch.stack([tensor(each) for each in weights.values])  # [H, value_dim, latent_dim]
        self._latent_norm = to_tensor(weights.latent_norm)
        self._query = None if weights.query is None else tensor(weights.query)
        self._query_norm = None if weights.query_norm is None else to_tensor(weights.query_norm)

    @property
    def variant(self) -> str:
        """Return the names of the choices that determine the results' bits; part of the fingerprint."""
        return "latent"

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), weight, self._parts.norm_eps, self._dtype)

    def __call__(self, x: torch.Tensor, step: Any, index: int) -> torch.Tensor:
        parts, heads = self._parts, len(self._keys)
        cos, sin = step.tables[self._kind]
        split = [x.shape[1] - parts.latent_dim - parts.rotated_dim, parts.latent_dim, parts.rotated_dim]
        queries, latent, rotated = torch.split(x, split, -1)
        if self._query is not None and self._query_norm is not None:
            queries = self._norm(queries, self._query_norm) @ self._query.T
        key = torch.cat(
            (self._norm(latent, self._latent_norm), rotate(rotated[:, None], cos, sin)[:, 0].to(self._dtype)), -1
        )
        step.cache.write(index, step.write_rows[1], torch.cat((key, key), -1)[step.write_tokens])
        sizes = [parts.plain_dim, parts.rotated_dim]
        plain, turned = torch.split(queries.reshape(len(x), heads, -1), sizes, -1)
        product = torch.einsum("thp,hlp->thl", plain, self._keys).float()
        q = torch.cat((product, rotate(turned, cos, sin)), -1)
        attended = paged_attention(q, step.cache, index, step.work[self._kind], self._scale)
        sums = attended.view(len(x), heads, -1)[..., : parts.latent_dim]
        return torch.einsum("thl,hvl->thv", sums, self._values).flatten(1)


GATES: dict[Activation, Operation] = {
    "silu": silu_mul,
    "gelu": gelu_erf_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
    "clamped_silu": clamped_silu_mul,
}
#: Activations of MLPs without a gate.
ACTIVATIONS: dict[Activation, Operation] = {
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": gelu_erf,
    "relu2": relu_squared,
}


class TorchPerLayerInputs(NamedTuple):
    """Inputs that each layer has for each token, made of torch's operations (kernels/cpu/c/layers/per_layer.h)."""

    table: torch.Tensor  # [vocab, layers, width]
    projection: TorchLinear
    norm: TorchNorm  # to float32
    scale: float

    @property
    def variant(self) -> str:
        """Name of the choices that fix the results' bits; part of the fingerprint."""
        return self.projection.variant

    def project(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the projection [T, layers * width] of embeddings [T, hidden] float32."""
        return self.projection(embedded.to(self.table.dtype))

    def multiply(self, x: torch.Tensor, ids: Ints, projected: torch.Tensor, layer: int) -> torch.Tensor:
        """Return x [T, width] times the layer's inputs of the tokens ids [T]."""
        own = self.norm(projected.view(len(x), *self.table.shape[1:])[:, layer])
        own += self.table[torch.as_tensor(ids), layer].float() * self.scale
        return (x.float() * own).to(x.dtype)


class TorchStep(NamedTuple):
    """The inputs that attention needs in one step of T tokens."""

    tables: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # cosines and sines of all tokens, for each kind of layer
    query_factors: torch.Tensor | None  # [T, 1, 1]: of queries
    work: tuple[AttentionMetadata, ...]  # one for each kind of layer
    cache: KVCache
    write_rows: dict[int, torch.Tensor]  # cache rows of the tokens that are stored, by KV heads
    write_tokens: torch.Tensor | slice  # indices of the tokens that are stored
    positions: Ints  # [T]
    requests: StateRows | None = None  # where the recurrent states are


class TorchOperations:
    """Operations with torch. The methods are documented at Operations."""

    is_exact = False
    sampler = None

    def __init__(self, config: ModelConfig, dtype: Dtype) -> None:
        self._config, self._dtype = config, dtype
        self.settle_length(config.max_position_embeddings)

    def settle_length(self, length: int) -> None:
        """Set the rotary embeddings that depend on the length of the longest context."""
        embeddings = rotary_embeddings(self._config, length)
        self._rotary = of_each_kind(lambda rotary: (to_tensor(rotary.frequencies), rotary.factor), embeddings)
        self._growth = embeddings[0].growth

    @property
    def variant(self) -> str:
        """Return the names of the kernels and constants that determine the results' bits; part of the fingerprint."""
        return f"torch={torch.__version__} cpu={torch.backends.cpu.get_cpu_capability()}"

    def wake(self) -> None:
        """Do nothing: torch wakes its own threads."""

    def embedding(
        self,
        table: StoredMatrix,
        scale: float,
        head: Operation | None,
        places: Floats | None = None,
        kinds: Floats | None = None,
    ) -> Callable[..., torch.Tensor]:
        """Return the operation from ids [T] int64 to the table's rows times scale [T, d] float32."""
        assert kinds is None, "encoders do not run on torch's operations"
        rows = to_tensor(table.own(self._dtype))
        if places is None:
            return lambda ids: rows.index_select(0, torch.as_tensor(ids)).float().mul_(scale)
        added = to_tensor(places)
        return lambda ids, positions: (
            rows.index_select(0, torch.as_tensor(ids)).float().mul_(scale)
            + added.index_select(0, torch.as_tensor(positions))
        )

    def linear(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
    ) -> TorchLinear:
        """Return the product with this weight [out, in] and bias [out] float32."""
        return TorchLinear(
            to_tensor(weight.dense(self._dtype)),
            None if bias is None else to_tensor(bias),
            out_dtype=DTYPES[out_dtype or self._dtype],
        )

    def head(self, weight: StoredMatrix, bias: Floats | None = None) -> TorchLinear:
        """Return the product with float32 results."""
        return self.linear(weight, bias, out_dtype=FLOAT32)

    def norm(
        self,
        weight: Floats | None,
        eps: float,
        dtype: Dtype,
        *,
        bias: Floats | None = None,
        is_centred: bool = False,
        precedes: bool = False,
        replaces: bool = False,
    ) -> TorchNorm:
        """Return the norm with this weight [d] float32. Its results are of dtype."""
        tensor, shift = (None if one is None else to_tensor(one) for one in (weight, bias))
        multiplier = self._config.residual_multiplier
        return TorchNorm(tensor, eps, DTYPES[dtype], multiplier, shift, is_centred, precedes, replaces)

    def activated(
        self,
        weight: StoredMatrix,
        function: Activation,
        bias: Floats | None = None,
        constants: Floats | None = None,
    ) -> tuple[TorchLinear, Operation]:
        """Return the product, and the operation that applies the function to its result."""
        product = self.linear(weight, bias)
        if constants is not None:
            return product, functools.partial(xielu, numbers=constants.tolist())
        return product, ACTIVATIONS[function]

    def gate_up(
        self, weight: StoredMatrix, function: Activation, bias: Floats | None = None
    ) -> tuple[TorchLinear, Operation]:
        """Return the product of gate and up, and the operation that computes f(gate) * up from its result."""
        return self.linear(weight, bias), GATES[function]

    def router(self, weight: StoredMatrix, bias: Floats | None = None) -> TorchLinear:
        """Return the product of a routed MLP's router."""
        return self.linear(weight, bias, out_dtype=FLOAT32)

    def experts(
        self,
        router: TorchLinear,
        experts: Sequence[TorchExpert],
        routing: Routing,
        shared: TorchExpert | None = None,
    ) -> TorchExperts:
        """Return the routed MLP of these experts."""
        return TorchExperts(router, tuple(experts), routing, shared)

    def per_layer_inputs(
        self, table: StoredMatrix | None, projection: StoredMatrix, norm: Floats, *, scale: float, eps: float
    ) -> TorchPerLayerInputs:
        """Return the inputs of all layers."""
        assert table is not None, "inputs without a table are of encoders, which need the C kernels"
        rows = to_tensor(table.own(self._dtype)).view(table.shape[0], -1, len(norm))
        return TorchPerLayerInputs(rows, self.linear(projection), TorchNorm(to_tensor(norm), eps, torch.float32), scale)

    def attention(
        self, kind: int, norms: Floats | None, sinks: Floats | None = None, values: ValueForm = "own"
    ) -> Callable[[torch.Tensor, TorchStep, int], torch.Tensor]:
        """Return the attention of one layer; see Operations."""
        scale, cap, eps = self._config.scores_scale, self._config.scores_cap, self._config.rms_norm_eps
        scores = None if sinks is None else to_tensor(sinks)
        value_norm: Operation = torch.Tensor.float
        if norms is not None and values in ("normalised", "keys"):
            count = kinds(self._config)[kind].heads.num_key_value_heads
            norms, value_norm = norms[:-count], self.norm(norms[-count:], eps, FLOAT32)
        unchanged, normed = torch.Tensor.float, self._head_norms(norms)
        around = (unchanged, normed) if self._config.qk_norm_after else (normed, unchanged)

        def attend(qkv: torch.Tensor, step: TorchStep, index: int) -> torch.Tensor:
            (cos, sin), (cache, place) = step.tables[kind], step.cache.part(index)
            rows = step.write_rows[cache.num_kv_heads]
            q = rope_kv_write(
                qkv,
                cos,
                sin,
                cache,
                place,
                rows,
                step.write_tokens,
                *around,
                values=values,
                value_norm=value_norm,
            )
            if step.query_factors is not None:
                q = q * step.query_factors
            return paged_attention(q, cache, place, step.work[kind], scale, cap, scores)

        return attend

    def latent_attention(self, kind: int, latent: LatentParts, weights: LatentWeights) -> TorchLatentAttend:
        """Return latent attention with these weights."""
        return TorchLatentAttend(
            latent, weights, kind, self._config.scores_scale, dtype=DTYPES[self._dtype], stored=self._dtype
        )

    def _head_norms(self, norms: Floats | None) -> Operation:
        """Return the operation on heads of Q and K [T, H + Hkv, D] before or after rotation, to float32."""
        config = self._config
        if norms is None:
            return torch.Tensor.float
        if not config.qk_norm_of_rows:
            return self._norm_of_each_head(norms)
        # Q and K are rounded to the model's dtype in between, like a product's result.
        count = config.num_attention_heads
        parts = [
            self.norm(part.reshape(-1), config.rms_norm_eps, self._dtype, is_centred=config.centred_norms)
            for part in (norms[:count], norms[count:])
        ]

        def normed(heads: torch.Tensor) -> torch.Tensor:
            pairs = zip((heads[:, :count], heads[:, count:]), parts, strict=True)
            return torch.cat([part(rows.flatten(1)).view_as(rows).float() for rows, part in pairs], 1)

        return normed

    def _norm_of_each_head(self, norms: Floats) -> Operation:
        eps = self._config.rms_norm_eps
        if not self._config.centred_norms:
            return self.norm(norms, eps, FLOAT32)
        weights = to_tensor(norms)  # layer_norm() would treat both dimensions of the weights as one
        return lambda heads: layer_norm(heads.float(), weights.shape[1:], eps=eps) * weights

    def recurrence(self, parts: RecurrenceParts, place: int) -> Callable[[torch.Tensor, TorchStep, int], torch.Tensor]:
        """Return the recurrence of one layer: its definition in NumPy."""
        own = slice(place, place + parts.sizes.state_size)

        def renew(tokens: torch.Tensor, step: TorchStep, _: int) -> torch.Tensor:
            assert step.requests is not None, "a step of a model with recurrent states lacks them"
            states, rows, firsts, saves = step.requests
            numbers, results = to_array(tokens.float()), []
            for row, first, end in zip(rows.tolist(), firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
                state = states[row, own]
                if step.positions[first] == 0:
                    state[:] = 0
                kept = np.zeros(0, np.int64) if saves is None else np.flatnonzero(saves[first:end] >= 0)
                for stop in dict.fromkeys([*(first + kept + 1).tolist(), end]):
                    results.append(recur(parts, numbers[first:stop], state))
                    first = stop
                    if saves is not None and saves[stop - 1] >= 0:
                        states[saves[stop - 1], own] = state
            return to_tensor(np.concatenate(results)).to(tokens.dtype)

        return renew

    def open_gates(self, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return attention's output times the sigmoid of gates."""
        return open_gates(mixed, gates)

    def step(
        self,
        positions: Ints,
        slots: Ints,
        work: tuple[AttentionMetadata, ...],
        cache: KVCache,
        requests: StateRows | None = None,
        turned: Ints | None = None,
    ) -> TorchStep:
        """Return the step's inputs of attention, with the rotary tables of its positions."""
        assert turned is None, "torch's operations read no features"
        tables = of_each_kind(lambda rotary: rotary_tables(to_tensor(positions), *rotary), self._rotary)
        stored = np.flatnonzero(slots >= 0)
        write_tokens = slice(0, len(slots)) if len(stored) == len(slots) else to_tensor(stored)
        factors = None
        if self._growth is not None:
            factors = to_tensor(query_factors(positions, *self._growth))[:, None, None]
        stored_slots, parts = to_tensor(slots[stored]), cache.parts if isinstance(cache, MixedKVCache) else (cache,)
        rows: dict[int, torch.Tensor] = {}
        for part in parts:
            assert isinstance(part, TorchKVCache), type(part)
            rows[part.num_kv_heads] = part.slot_rows(stored_slots)
        return TorchStep(tables, factors, work, cache, rows, write_tokens, positions, requests)

    def pack_adapter(
        self, shapes: Sequence[ProductShape], products: Sequence[Sequence[LowRank | None]]
    ) -> TorchAdapter:
        """Return an adapter as torch tensors."""
        return TorchAdapter(shapes, products, DTYPES[self._dtype])

    def multiply_adapted(
        self, product: TorchLinear, x: torch.Tensor, adapters: TokenAdapters, number: int
    ) -> torch.Tensor:
        """Return the product plus what the tokens' adapters add, after the product is rounded, like PEFT."""
        y = product(x)
        for index, packed in enumerate(adapters.packed):
            tokens = to_tensor(np.flatnonzero(adapters.of_token == index))
            packed.add(x, y, tokens, number)
        return y

    def add(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """Add x times the residual multiplier to hidden, in place."""
        add(hidden, x, self._config.residual_multiplier)

    def scaled(self, hidden: torch.Tensor, scale: float) -> None:
        """Multiply hidden by the scale, in place."""
        hidden.mul_(scale)

    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap * tanh(logits / cap), in place."""
        return logits.div_(cap).tanh_().mul_(cap)

    def pick(self, hidden: torch.Tensor, rows: Ints) -> torch.Tensor:
        """Return these rows of hidden."""
        return hidden.index_select(0, to_tensor(rows))

    def to_host(self, numbers: torch.Tensor) -> Floats:
        """Return an array with the tensor's memory."""
        return to_array(numbers)

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
        wholes: Ints | None = None,
    ) -> AttentionMetadata:
        """Return the attention work of a step for one window."""
        assert wholes is None, "only the C kernels read features"
        return attention_metadata(num_tokens, context_lens, block_tables, cache, window)

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache of one block, all layers together."""
        counts = Counter(kind.heads for kind in cached_layers(self._config))
        return sum(bytes_per_block(block_size, *heads, count, self._dtype) for heads, count in counts.items())

    def allocate_cache(self, num_blocks: int, block_size: int) -> TorchKVCache | MixedKVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        own = [kind.heads for kind in cached_layers(self._config)]
        parts = [
            TorchKVCache(
                count,
                num_blocks,
                block_size,
                heads.num_key_value_heads,
                head_dim=heads.head_dim,
                dtype=self._dtype,
            )
            for heads, count in Counter(own).items()
        ]
        return parts[0] if len(parts) == 1 else MixedKVCache(parts, places_of_parts(own))
