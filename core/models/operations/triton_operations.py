"""TritonOperations: a model's operations on a device: Triton kernels, or torch's products at numerics level L0.

This module imports triton, so import it only for device=cuda.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from core.models.config import Activation, HeadSizes, LatentParts, ModelConfig
from core.models.layers.layer_kinds import cached_layers, kinds, places_of_parts, windows
from core.models.layers.rotary import axes_of_pairs, of_each_kind, rotary_embeddings
from core.models.operations.fp8_matrix import fp8_matrix, input_scale
from core.models.operations.latent_weights import LatentWeights
from core.models.operations.operations import Product
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from core.models.operations.tensor import Operation, Tensor
from core.models.operations.token_adapters import TokenAdapters
from core.models.operations.triton_head_place import TritonHeadPlace
from core.models.operations.triton_streams import TritonStreams
from core.models.operations.unchanged import unchanged
from core.models.operations.weight_form import WeightForm
from ipc.errors import OutOfMemoryError
from ipc.tables.arrays import AnyInts, Floats, Ints
from kernels.dequantize import FLOAT_CODES, PLAIN_TYPES
from kernels.elements import FLOAT32, Dtype, Numbers
from kernels.low_rank import LowRank, ProductShape
from kernels.memory.kv_cache import KVCache, Scales
from kernels.recurrence import RecurrenceParts, RecurrenceSizes, StateRows
from kernels.routing import Routing
from kernels.torch.packed_rows import PackedRows, join, pack_blocks, quantize_rows
from kernels.torch.rope import query_factors
from kernels.torch.tensors import DTYPES, to_array, to_tensor
from kernels.triton.activation import gelu_erf, gelu_tanh, relu_squared, xielu
from kernels.triton.arithmetic.caps import ARITHMETIC as CAP_ARITHMETIC
from kernels.triton.arithmetic.caps import capped
from kernels.triton.arithmetic.rotary_tables import rotary_tables
from kernels.triton.attention_work import SPLIT, TritonWork, triton_work, whole_prompts
from kernels.triton.decode_attention import decode_attention
from kernels.triton.embedding import TritonPerLayerInputs, embedding, put_rows
from kernels.triton.fp8.fp8_linear import Fp8Linear
from kernels.triton.gated_activation import clamped_silu_mul, gelu_erf_mul, gelu_tanh_mul, silu_mul
from kernels.triton.kv_cache import MixedTritonKVCache, TritonKVCache
from kernels.triton.latent import TritonLatent, heads_together
from kernels.triton.linear import DeviceLinear, DeviceProduct, GatedLinear, torch_product
from kernels.triton.lora import LoraWork, TritonAdapter, add_adapters, lora_work
from kernels.triton.norm import TritonNorm
from kernels.triton.ordered_product import ARITHMETIC, ordered_product
from kernels.triton.output_gate import open_gates
from kernels.triton.packed_linear import PackedLinear
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.recurrence import CommonNorm, DeviceStates, TritonRecurrence, device_states
from kernels.triton.rope import TritonRope
from kernels.triton.routed.experts import AnyLinear, DeviceExpert, TritonExperts
from kernels.triton.routed.packed_experts import Scratch
from kernels.value_form import ValueForm

GATES: dict[str, Operation] = {
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


#: Frequencies on the device, and the other fields of core.models.layers.rotary.Rotary.
_Rotary = tuple[torch.Tensor, float, tuple[float, float] | None]


class TritonStep(NamedTuple):
    """The inputs that attention needs in one step of T tokens."""

    slots: torch.Tensor  # [T] int64, -1 = do not store
    #: For each kind of layer: cosines, sines and, if queries grow, their factors, for all tokens.
    tables: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], ...]
    work: tuple[TritonWork, ...]  # one per kind of layer
    cache: TritonKVCache | MixedTritonKVCache
    positions: torch.Tensor  # [T]
    requests: DeviceStates | None = None  # where the recurrent states are; None: the model has none


@dataclass(frozen=True)
class TritonAttend:
    """One layer's attention: normalise and rotate heads, store K and V, attend. kind: see layer_kinds.py."""

    rope: TritonRope
    kind: int
    scale: float
    cap: float | None = None  # of the scores
    sinks: torch.Tensor | None = None  # [H] float32

    def __call__(self, qkv: torch.Tensor, step: TritonStep, index: int) -> torch.Tensor:
        """Return the heads' results [T, H * D] for the layer's first product."""
        q, (cache, place) = self.store(qkv, step, index), step.cache.part(index)
        for attention in (prefill_attention, decode_attention):
            attention(q, cache, place, step.work[self.kind], self.scale, q, self.cap, self.sinks)
        return q.flatten(1)

    def store(self, qkv: torch.Tensor, step: TritonStep, index: int) -> torch.Tensor:
        """Store K and V of the step's tokens. Return Q, normalised and rotated."""
        (cos, sin, growth), (cache, place) = step.tables[self.kind], step.cache.part(index)
        return self.rope(qkv, cos, sin, cache, place, step.slots, growth)


class TritonLatentAttend:
    """One layer's latent attention. kind: see layer_kinds.py."""

    def __init__(self, latent: TritonLatent, kind: int, scale: float) -> None:
        self._latent, self._kind, self._scale = latent, kind, scale
        self.variant = latent.variant

    def __call__(self, x: torch.Tensor, step: TritonStep, index: int) -> torch.Tensor:
        """Return the heads' values [T, H * value_dim] for the layer's first product x."""
        work, (cache, place) = step.work[self._kind], step.cache.part(index)

        def attend(q: torch.Tensor) -> torch.Tensor:
            prefill_attention(q, cache, place, work, self._scale, q)
            decode_attention(q, cache, place, work, self._scale, q)
            return q

        return self._latent.attend(self.store(x, step, index), attend)

    def store(self, x: torch.Tensor, step: TritonStep, index: int) -> torch.Tensor:
        """Store the tokens' vectors. Return the queries."""
        (cos, sin, _), (cache, place) = step.tables[self._kind], step.cache.part(index)
        return self._latent.begin(x, cos, sin, step.slots, cache, place)


@dataclass(frozen=True)
class TritonRecur:
    """One layer's recurrence."""

    recurrence: TritonRecurrence

    def __call__(self, tokens: torch.Tensor, step: TritonStep, _: int) -> torch.Tensor:
        assert step.requests is not None, "a step of a model with recurrent states lacks them"
        return self.recurrence(tokens, step.positions, step.requests)

    def share_norm(self, gather: Callable[[torch.Tensor], torch.Tensor], sizes: RecurrenceSizes) -> None:
        """Give results of all ranks from now on; see SharesNorm."""
        self.recurrence.common_norm = CommonNorm(gather, sizes)


class TritonOperations:
    """Operations on a device. The methods are documented at Operations.

    At numerics level L2 no bit of a row depends on the batch. At L0 those of torch's products do.
    """

    sampler = None

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        device: torch.device,
        form: WeightForm = WeightForm.DENSE,
        *,
        is_exact: bool = True,
        cache_type: type[TritonKVCache] = TritonKVCache,
        kv_scales: Sequence[Scales] = (),
    ) -> None:
        """is_exact: whether a row's bits must not depend on other rows. cache_type: of the KV cache.

        kv_scales: of each layer of a cache of 8-bit floats.
        """
        self._cache_type, self._kv_scales = cache_type, kv_scales
        self._config, self._dtype, self.device, self._form = config, dtype, device, form
        self.is_exact = is_exact
        self._product: DeviceProduct = ordered_product if is_exact else torch_product
        self._scratch = Scratch()
        self._input_scales = list[float]()  # that files have for products in FP8, in the order in which these are built
        self._lora: tuple[TokenAdapters, LoraWork] | None = None  # of the last step with adapters
        axes = axes_of_pairs(config)
        self._axes = None if axes is None else self._send(np.concatenate((axes, axes)))  # of both halves of heads
        self.settle_length(config.max_position_embeddings)
        #: Query heads per KV head: the most, where layers differ. A program of fewer does not use all its rows.
        self.group_size = config.num_attention_heads // min(kind.heads.num_key_value_heads for kind in kinds(config))
        if config.latent is not None:
            self.group_size = heads_together(config.num_attention_heads)

    def settle_length(self, length: int) -> None:
        """Set the rotary embeddings that depend on the length of the longest context."""
        self._rotary = of_each_kind(
            lambda rotary: (self._send(rotary.frequencies), rotary.factor, rotary.growth),
            rotary_embeddings(self._config, length),
        )

    @property
    def variant(self) -> str:
        """Return the names of the kernels and constants that determine the results' bits; part of the fingerprint."""
        name = self._kernels if self._config.logits_cap is None else f"{self._kernels} cap.{CAP_ARITHMETIC}"
        # A model's fingerprint comes from some pages of its files, which may not have its scales.
        if self._input_scales:
            name += f" inputs={_digest(self._input_scales)}"
        if self._cache_type.stored_as:
            name += f" kv={self._cache_type.stored_as}" + (f".{_digest(self._kv_scales)}" if self._kv_scales else "")
        return name

    @property
    def _kernels(self) -> str:
        on_gpu = self.device.type == "cuda"
        if self.is_exact:  # the arithmetic is that of the machine code, which all devices of an architecture run
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability(self.device)) if on_gpu else "interpreter"
            return f"triton-{triton.__version__} ordered.{ARITHMETIC} split={SPLIT} {arch}"
        name = torch.cuda.get_device_name(self.device) if on_gpu else "interpreter"
        return f"torch={torch.__version__} triton-{triton.__version__} split={SPLIT} device={name}"

    def wake(self) -> None:
        """Do nothing: the device needs no wake-up."""

    def embedding(
        self,
        table: StoredMatrix,
        scale: float,
        head: Operation | None,
        places: Floats | None = None,
        kinds: Floats | None = None,
    ) -> Operation:
        """Return the operation from ids [T] int64 to the table's rows times scale [T, d] float32.

        places: rows that are added, by a second argument, the positions [T].
        """
        rows, own = (None if one is None else self._send(one) for one in (places, kinds))
        return partial(embedding, table=self._send(table.dense(self._dtype)), scale=scale, places=rows, kinds=own)

    def linear(
        self,
        weight: StoredMatrix,
        bias: Floats | None = None,
        *,
        out_dtype: Dtype | None = None,
    ) -> AnyLinear:
        """Return the product with this weight [out, in] and bias [out] float32."""
        return self._linear(weight, bias, out_dtype or self._dtype, self._form)

    def head(self, weight: StoredMatrix, bias: Floats | None = None) -> AnyLinear:
        """Return the product with float32 results. No activations are quantized here, as in other engines."""
        form = WeightForm.STORED if self._form is WeightForm.FP8 else self._form
        return self._linear(weight, bias, FLOAT32, form)

    def _linear(self, weight: StoredMatrix, bias: Floats | None, out_dtype: Dtype, form: WeightForm) -> AnyLinear:
        shift, own, results = None if bias is None else self._send(bias), DTYPES[self._dtype], DTYPES[out_dtype]
        if form is WeightForm.FP8 and (rows := fp8_matrix(weight, self.device)) is not None:
            scale = input_scale(weight)
            self._input_scales += [] if scale is None else [scale]
            return Fp8Linear(rows, shift, own, results, input_scale=scale)
        packed = pack(weight, form, self.device)
        if packed is None:
            return DeviceLinear(self._send(weight.dense(self._dtype)), shift, results, self._product)
        return PackedLinear(packed, shift, own, results, name=form.name.lower(), product=self._product)

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
    ) -> TritonNorm:
        """Return the norm with this weight [d] float32. Its results are of dtype."""
        tensor, shift = (None if one is None else self._send(one) for one in (weight, bias))
        return TritonNorm(
            tensor,
            eps,
            DTYPES[dtype],
            self._config.residual_multiplier,
            bias=shift,
            is_centred=is_centred,
            precedes=precedes,
            replaces=replaces,
        )

    def gate_up(
        self, weight: StoredMatrix, function: Activation, bias: Floats | None = None
    ) -> tuple[AnyLinear, Operation]:
        """Return the product of gate and up, and the operation that computes f(gate) * up from its result.

        An ordered product of dense weights does both.
        """
        product = self.linear(weight, bias)
        if self.is_exact and isinstance(product, DeviceLinear):
            return GatedLinear(product.weight, product.bias, function), unchanged
        return product, GATES[function]

    def activated(
        self,
        weight: StoredMatrix,
        function: Activation,
        bias: Floats | None = None,
        constants: Floats | None = None,
    ) -> tuple[AnyLinear, Operation]:
        """Return the product, and the operation that applies the function to its result. constants: of xIELU."""
        if constants is not None:
            return self.linear(weight, bias), partial(xielu, constants=self._send(constants))
        return self.linear(weight, bias), ACTIVATIONS[function]

    def router(self, weight: StoredMatrix, bias: Floats | None = None) -> DeviceLinear:
        """Return the product of a routed MLP's router: float32, not rounded to the model's dtype."""
        matrix, shift = self._send(weight.dense(self._dtype)), None if bias is None else self._send(bias)
        return DeviceLinear(matrix, shift, torch.float32, self._product)

    def experts(
        self,
        router: DeviceLinear,
        experts: Sequence[DeviceExpert],
        routing: Routing,
        shared: DeviceExpert | None = None,
    ) -> TritonExperts:
        """Return the routed MLP of these experts."""
        return TritonExperts(router, experts, routing, shared, function=self._config.hidden_act, scratch=self._scratch)

    def latent_attention(self, kind: int, latent: LatentParts, weights: LatentWeights) -> "TritonLatentAttend":
        """Return latent attention with these weights."""
        keys, values = (
            torch.stack([self._send(matrix.dense(self._dtype)) for matrix in each])
            for each in (weights.keys, weights.values)
        )

        def norm(weight: Floats) -> TritonNorm:
            return TritonNorm(self._send(weight), latent.norm_eps, DTYPES[self._dtype], 1.0)

        query = None if weights.query is None else self._send(weights.query.dense(self._dtype))
        own = TritonLatent(
            keys,
            values,
            self._product,
            norm=norm(weights.latent_norm),
            query=None if query is None else DeviceLinear(query, product=self._product),
            query_norm=None if weights.query_norm is None else norm(weights.query_norm),
        )
        return TritonLatentAttend(own, kind, self._config.scores_scale)

    def attention(
        self, kind: int, norms: Floats | None, sinks: Floats | None = None, values: ValueForm = "own"
    ) -> "TritonAttend":
        """Return the attention of one layer; see Operations."""
        config = self._config
        head_norms, scores = (None if one is None else self._send(one) for one in (norms, sinks))
        rope = TritonRope(
            config.num_attention_heads,
            head_norms,
            config.rms_norm_eps,
            of_rows=config.qk_norm_of_rows,
            is_centred=config.centred_norms,
            is_after=config.qk_norm_after,
            values=values,
            row=config.row_of_heads,
        )
        return TritonAttend(rope, kind, config.scores_scale, config.scores_cap, scores)

    def per_layer_inputs(
        self, table: StoredMatrix | None, projection: StoredMatrix, norm: Floats, *, scale: float, eps: float
    ) -> TritonPerLayerInputs:
        """Return the inputs of all layers. The table is dense."""
        own = self._config.per_layer
        return TritonPerLayerInputs(
            None if table is None else self._send(table.dense(self._dtype)),
            self.linear(projection),
            self._send(norm),
            DTYPES[self._dtype],
            scale=scale,
            eps=eps,
            given_id=0 if own is None else own.given_id,
        )

    def streams(self) -> TritonStreams:
        """Return the arithmetic of hidden states in several streams."""
        return TritonStreams(DTYPES[self._dtype], self.device)

    def scaled(self, hidden: torch.Tensor, scale: float) -> None:
        """Multiply hidden by the scale, in place."""
        hidden.mul_(scale)

    def recurrence(self, parts: RecurrenceParts, place: int) -> Callable[[torch.Tensor, TritonStep, int], torch.Tensor]:
        """Return the recurrence of one layer."""
        return TritonRecur(TritonRecurrence(parts, place, self.device))

    def open_gates(self, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return attention's output times the sigmoid of gates, of each number or each head."""
        return open_gates(mixed, gates)

    def step(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        work: tuple[TritonWork, ...],
        cache: KVCache,
        requests: StateRows | DeviceStates | None = None,
        turned: torch.Tensor | None = None,
    ) -> TritonStep:
        """Return the step's inputs for attention, with the rotary tables of its positions."""
        at = positions if turned is None else turned

        def of_tokens(rotary: _Rotary) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            frequencies, factor, growth = rotary
            factors = None if growth is None else query_factors(positions, *growth)
            tables = rotary_tables(at.flatten(), frequencies, factor)
            cos, sin = tables if at.ndim == 1 else (self._of_axes(table, len(at)) for table in tables)
            return cos, sin, factors

        tables = of_each_kind(of_tokens, self._rotary)
        assert isinstance(cache, TritonKVCache | MixedTritonKVCache), type(cache)
        if isinstance(requests, StateRows):
            requests = device_states(requests, self.device)
        return TritonStep(slots, tables, work, cache, positions, requests)

    def _of_axes(self, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return a table [T, 1, D] from one of all axes [T * 3, 1, D]: each pair has its axis."""
        assert self._axes is not None, "tokens of this model have one position"
        axes = self._axes.expand(num_tokens, 1, -1)
        return table.view(num_tokens, -1, table.shape[-1]).gather(1, axes)

    def of_head(self, config: ModelConfig) -> "tuple[TritonOperations, TritonHeadPlace]":
        """Return operations like these for a head whose layer is that of this config, and where it computes."""
        own = TritonOperations(config, self._dtype, self.device, self._form, is_exact=self.is_exact)
        return own, TritonHeadPlace(DTYPES[self._dtype], self.device, own.allocate_swap_cache)

    def pack_adapter(
        self, shapes: Sequence[ProductShape], products: Sequence[Sequence[LowRank | None]]
    ) -> TritonAdapter:
        """Return an adapter in the device's memory. Errors: OutOfMemoryError."""
        try:
            return TritonAdapter(shapes, products, self._dtype, self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the adapter does not fit the GPU: unload others, or lower gpu_memory_utilization: {error}"
            ) from error

    def multiply_adapted(self, product: Product, x: torch.Tensor, adapters: TokenAdapters, number: int) -> torch.Tensor:
        """Return the product plus what the tokens' adapters add, after the product is rounded, like PEFT."""
        if self._lora is None or self._lora[0] is not adapters:  # all products of a step have the same work
            self._lora = adapters, lora_work(adapters.packed, adapters.of_token, self.device)
        gated = product if isinstance(product, GatedLinear) else None
        y: torch.Tensor = product(x) if gated is None else gated.gate_and_up(x)
        add_adapters(x, y, self._lora[1], number)
        return y if gated is None else GATES[gated.function](y)

    def add(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """Add x times the residual multiplier to hidden, in place."""
        hidden.add_(x, alpha=self._config.residual_multiplier)

    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap * tanh(logits / cap), in place."""
        return capped(logits, cap)

    def put(self, target: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to these places of target."""
        put_rows(target, places, rows)

    def pick(self, hidden: torch.Tensor, rows: Tensor) -> torch.Tensor:
        """Return these rows of hidden."""
        return hidden.index_select(0, torch.as_tensor(rows, device=hidden.device))

    def to_host(self, numbers: torch.Tensor) -> Floats:
        """Return the numbers in host memory."""
        return to_array(numbers.cpu())

    def _send(self, numbers: Numbers) -> torch.Tensor:
        """Return a tensor with these numbers on the device, in its own memory."""
        return to_tensor(numbers).to(self.device, copy=True)

    def attention_work(
        self,
        num_tokens: AnyInts,
        context_lens: AnyInts,
        block_tables: AnyInts,
        cache: KVCache,
        window: int | None,
        generation: int,
        wholes: Ints | None = None,
    ) -> TritonWork:
        """Return the attention work of a step for one window."""
        if not self._config.is_causal:
            wholes = whole_prompts(num_tokens)
        work = triton_work(num_tokens, context_lens, block_tables, self.group_size, self.device, wholes=wholes)
        return self._of_kind(work, window)

    def of_kinds(self, work: TritonWork) -> tuple[TritonWork, ...]:
        """Return a step's work for each kind of layer."""
        return tuple(self._of_kind(work, window) for window in windows(self._config))

    def _of_kind(self, work: TritonWork, window: int | None) -> TritonWork:
        config, lasts = self._config, work.lasts
        if window is None:
            return work._replace(window=None, lasts=None if config.wholes_in_windows else lasts)
        if lasts is not None and not config.is_causal:
            # An encoder's window is as wide behind a token as before it.
            lasts = torch.minimum(lasts, work.positions + (window - 1))
        return work._replace(window=window, lasts=lasts)

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of KV cache for one block, all layers together."""
        return sum(
            self._cache_type.bytes_per_block(block_size, *heads, count, self._dtype)
            for heads, count in Counter(self._cached).items()
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> TritonKVCache | MixedTritonKVCache:
        """Allocate a KV cache. Errors: MemoryError."""
        cache = self._cache(num_blocks, block_size, self.device)
        for place, scales in enumerate(self._kv_scales[: len(self._cached)]):
            part, _ = cache.part(place)
            part.scales = (*part.scales, scales)  # places of a part ascend
        return cache

    def allocate_swap_cache(self, num_blocks: int, block_size: int) -> TritonKVCache | MixedTritonKVCache:
        """Allocate a cache in pinned host memory for blocks of preempted requests. Errors: MemoryError."""
        return self._cache(num_blocks, block_size, torch.device("cpu"), pinned=self.device.type == "cuda")

    @property
    def _cached(self) -> list[HeadSizes]:
        """Return the heads of the layers with K and V, by their places."""
        return [kind.heads for kind in cached_layers(self._config)]

    def _cache(
        self, num_blocks: int, block_size: int, device: torch.device, *, pinned: bool = False
    ) -> TritonKVCache | MixedTritonKVCache:
        own: dict[str, Any] = {"dtype": self._dtype, "device": device, "pinned": pinned}
        parts = [
            self._cache_type(count, num_blocks, block_size, kv_heads, head_dim=head_dim, **own)
            for (kv_heads, head_dim), count in Counter(self._cached).items()
        ]
        return parts[0] if len(parts) == 1 else MixedTritonKVCache(parts, places_of_parts(self._cached))


def _digest(scales: Sequence[float | Scales]) -> str:
    return f"{zlib.crc32(np.array(scales, '<f8').tobytes()):08x}"


# pack: a quantized weight matrix in the form that a GPU's products read. Imported for device=cuda only.


#: Packs a part, or returns None if it has no packed form.
_Packer = Callable[[StoredPart, torch.device], PackedRows | None]


def pack(weight: StoredMatrix, form: WeightForm, device: torch.device) -> list[PackedRows] | None:
    """Return the matrix's parts packed on the device, with parts of one kind joined; None: use its dense numbers.

    STORED packs only matrices that are quantized as a whole; INT8 packs others too. The parts' data is released.
    """
    packer = _PACKERS.get(form)
    if packer is None:
        return None
    parts = []
    for part in weight.parts:
        if (packed := packer(part, device)) is None:
            return None
        parts.append(packed)
    for part in weight.parts:
        part.let_go()
    return _joined(parts)


def _joined(parts: Iterable[PackedRows]) -> list[PackedRows]:
    groups: list[list[PackedRows]] = []
    for part in parts:
        if groups and groups[-1][0].joins(part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [join(group) for group in groups]


def _as_stored(part: StoredPart, device: torch.device) -> PackedRows | None:
    return None if part.type_name in PLAIN_TYPES else pack_blocks(part.data, part.type_name, device)


def _in_8_bits(part: StoredPart, device: torch.device) -> PackedRows | None:
    """Return a part whose codes are integers as stored, and any other part as Q8_0."""
    if part.type_name in FLOAT_CODES:
        return quantize_rows(to_tensor(StoredMatrix([part]).dense(FLOAT32)).to(device))
    dtype = PLAIN_TYPES.get(part.type_name)
    if dtype is None:
        return _as_stored(part, device)
    return quantize_rows(to_tensor(part.data.view(dtype)).to(device))


_PACKERS: dict[WeightForm, _Packer] = {WeightForm.STORED: _as_stored, WeightForm.INT8: _in_8_bits}
