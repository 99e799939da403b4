"""PooledEncoder: computes embeddings from the pixels of images of any size; a row is the mean of its patches (Gemma 4).

Each image is computed alone, so its rows are a function of its pixels only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from core.models.config import HeadSizes, ModelConfig
from core.models.encoder_run import EncoderInParts, LayersInBlocks, Pieces, runs_of
from core.models.grid_images import GridImages
from core.models.grid_parts import BOUNDS, GridParts
from core.models.layers.layer import Layer
from core.models.layers.mixers import Mixer
from core.models.layers.mlp import DenseMlp, Mlp
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.operations import Product
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.weight_parts import WeightParts
from core.models.vision_encoder import sizes_of
from ipc.tables.arrays import Floats, Ints, UInt8s
from kernels.cpu.elementwise import open_gates
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.cpu.rope import RotaryTable
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.rotary import rotary_frequencies

_ROWS_AT_ONCE = 64  # of a gate and what it multiplies: they stay in the CPU's caches


class PooledEncoder(GridImages, EncoderInParts):
    """The weights and the forward pass of one encoder; an ImageEncoder (core/features/store.py)."""

    def __init__(
        self,
        parts: GridParts,
        hidden_size: int,
        weights: Iterable[tuple[str, Weight]],
        dtype: Dtype,
        *,
        library: CpuLibrary,
    ) -> None:
        """Pack the weights. hidden_size: the text model's. weights: as in grid_shapes(), preferably in its order."""
        super().__init__(parts)
        assert parts.pooled is not None, parts
        self.width, self._dtype, self._pooled = hidden_size, dtype, parts.pooled
        quarter = self._pooled.head_dim // 4
        frequencies = rotary_frequencies(2 * quarter, parts.rope_theta)
        self._rotation = RotaryTable(np.concatenate((frequencies, frequencies)))
        self._axes = np.repeat(np.arange(2), quarter)
        files = WeightParts(_turned(weights, _half_by_half(quarter), dtype))
        self._operations = operations = CpuOperations(self._sizes(), dtype, library)
        self._patches = operations.linear(files.take_matrix("patches.weight"), out_dtype=FLOAT32)
        tables = to_floats(files.take_matrix("positions.weight").dense(dtype))
        self._positions = tables.reshape(2, self._pooled.positions_per_axis, parts.hidden_size).copy()
        layers = [self._layer(files, f"layers.{index}.") for index in range(parts.num_hidden_layers)]
        heads = parts.num_attention_heads, self._pooled.num_key_value_heads
        self._layers = LayersInBlocks(layers, operations, num_heads=heads[0], num_kv_heads=heads[1])
        self._standard: tuple[Floats, Floats] | None = None
        if self._pooled.standardizes:
            self._standard = files.take("standard.bias"), files.take("standard.weight")
        self._norm = operations.norm(np.ones(parts.hidden_size, np.float32), parts.norm_eps, dtype)
        self._projection = operations.linear(files.take_matrix("projection.weight"), out_dtype=FLOAT32)

    def _sizes(self) -> ModelConfig:
        parts, pooled = self.parts, self._pooled
        return sizes_of(
            parts,
            eps=parts.norm_eps,
            num_tokens=parts.max_rows * parts.merge_size**2,
            num_positions=1,
            rope_theta=parts.rope_theta,
            heads=HeadSizes(pooled.num_key_value_heads, pooled.head_dim),
            scores_scalar=1.0,
        )

    def _layer(self, files: WeightParts, stem: str) -> Layer:
        """Take a layer's weights in their order."""
        operations, pooled, eps = self._operations, self._pooled, self.parts.norm_eps

        def norm(name: str, dtype: Dtype) -> CpuNorm:
            return operations.norm(files.take(f"{stem}{name}.weight"), eps, dtype)

        input_norm = norm("input_layernorm", self._dtype)
        qkv = self._product(files, *(f"{stem}self_attn.{name}_proj" for name in "qkv"))
        o = self._product(files, f"{stem}self_attn.o_proj")
        mlp = self._mlp(files, f"{stem}mlp.")
        counts = {"q": self.parts.num_attention_heads, "k": pooled.num_key_value_heads}
        norms = [np.tile(files.take(f"{stem}self_attn.{name}_norm.weight"), (n, 1)) for name, n in counts.items()]
        attend = operations.attention(0, np.concatenate([*norms, np.ones_like(norms[1])]), values="normalised")
        return Layer(
            kind=0,
            input_norm=input_norm,
            mixer=Mixer(qkv, attend, o, 0),  # all layers use the K and V of one
            attention_out=norm("post_attention_layernorm", FLOAT32),
            mlp_norm=norm("pre_feedforward_layernorm", self._dtype),
            mlp=mlp,
            mlp_out=norm("post_feedforward_layernorm", FLOAT32),
        )

    def _product(self, files: WeightParts, *names: str) -> Product:
        """Return the product with the rows of these matrices."""
        if not self._pooled.clips:
            return self._operations.linear(files.take_matrix(*(f"{name}.weight" for name in names)))
        return _Side([self._clipped(files, name) for name in names])

    def _clipped(self, files: WeightParts, name: str) -> "_Clipped":
        product = self._operations.linear(files.take_matrix(f"{name}.weight"))
        low, high, least, most = files.take(*(f"{name}.{bound}" for bound in BOUNDS))
        return _Clipped(product, (low, high), (least, most))

    def _mlp(self, files: WeightParts, stem: str) -> Mlp:
        names, act = (f"{stem}gate_proj", f"{stem}up_proj"), self.parts.hidden_act
        if self._pooled.clips:
            gate, up = (self._clipped(files, name) for name in names)
            return _ClippedMlp(self._operations.library, gate, up, self._clipped(files, f"{stem}down_proj"))
        gate_up, activation = self._operations.gate_up(files.take_matrix(*(f"{name}.weight" for name in names)), act)
        return DenseMlp(gate_up, activation, self._product(files, f"{stem}down_proj"))

    @property
    def variant(self) -> str:
        """Return the names of the kernels in use; part of the fingerprint."""
        return f"vision={self._patches.variant} {self._operations.variant}"

    def work(self, num_rows: int) -> int:
        """Return about how many multiplications an image with so many rows takes."""
        run = runs_of(np.array([num_rows * self.parts.merge_size**2]))
        width = self.parts.num_attention_heads * self._pooled.head_dim
        return self._layers.work(self.parts.layer_products, width, [run])

    def pieces(self, pixels: UInt8s) -> Pieces:
        """Compute the rows [n, width] float32 of an image [height, width, 3] whose sides are multiples of the unit."""
        parts = self.parts
        places, _ = self.places_of(pixels)
        hidden = to_floats(self._patches(rounded(self.cut(pixels), self._dtype)))
        hidden = np.ascontiguousarray(hidden + (self._positions[0, places[:, 1]] + self._positions[1, places[:, 0]]))
        table = RotaryTable(np.zeros(self._pooled.head_dim // 2, np.float32))  # row i: the rotation of patch i
        turned = self._rotation.rows_at(places[:, ::-1], self._axes)
        table.cos, table.sin, table.query_cos, table.query_sin = turned
        yield from self._layers.run(hidden, [runs_of(np.array([len(hidden)]))], table)
        rows = _means(hidden, parts.merge_size**2) * np.float32(parts.hidden_size**0.5)
        if self._standard is not None:
            bias, scale = self._standard
            rows = (rows - bias) * scale
        result: Floats = to_floats(self._projection(self._norm(np.ascontiguousarray(rows))))
        return result


@dataclass(frozen=True)
class _Clipped:
    """A product that reads numbers within bounds, and yields such."""

    product: PackedMatrix
    inputs: tuple[float, float]
    outputs: tuple[float, float]

    @property
    def variant(self) -> str:
        return f"{self.product.variant} clipped"

    def __call__(self, x: Numbers) -> Numbers:
        return _clip(self.product(_clip(x, *self.inputs)), *self.outputs)


@dataclass(frozen=True)
class _Side:
    """The results of products, side by side."""

    products: list[_Clipped]

    @property
    def variant(self) -> str:
        return self.products[0].variant

    def __call__(self, x: Numbers) -> Numbers:
        return np.concatenate([product(x) for product in self.products], 1)


@dataclass(frozen=True)
class _ClippedMlp:
    """down(gelu(gate(x)) * up(x)). gelu's tanh form is x times the sigmoid of 2 u (kernels/cpu/c/layers/gate.h)."""

    library: CpuLibrary
    gate: _Clipped
    up: _Clipped
    down: _Clipped

    @property
    def products(self) -> dict[str, Product]:
        """Return the products by name."""
        return {"gate": self.gate, "up": self.up, "down": self.down}

    def __call__(self, x: Numbers) -> Numbers:
        gates, values = self.gate(x), self.up(x)
        for first in range(0, len(gates), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            gate = to_floats(gates[part])
            made = gate * to_floats(values[part])
            inner = np.float32(2 * (2 / np.pi) ** 0.5) * (gate + np.float32(0.044715) * gate * gate * gate)
            open_gates(self.library, made, inner)
            values[part] = rounded(made, values.dtype)
        return self.down(values)


def _clip(numbers: Numbers, low: float, high: float) -> Numbers:
    return rounded(np.clip(to_floats(numbers), np.float32(low), np.float32(high)), numbers.dtype)


def _half_by_half(quarter: int) -> Ints:
    """Return the order of a head's numbers in which the kernels' pairs, half a head apart, are those of the files.

    In files each half of a head is turned by itself, its pairs a quarter apart.
    """
    return np.arange(4 * quarter).reshape(2, 2, quarter).transpose(1, 0, 2).reshape(-1)


def _turned(weights: Iterable[tuple[str, Weight]], order: Ints, dtype: Dtype) -> Iterator[tuple[str, Weight]]:
    """Yield the weights, with the numbers of Q's and K's heads in this order. dtype: of the model."""
    for name, weight in weights:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            matrix = StoredMatrix.of(weight) if isinstance(weight, np.ndarray) else weight
            rows = matrix.dense(dtype)
            yield name, np.ascontiguousarray(rows.reshape(-1, len(order), rows.shape[1])[:, order]).reshape(rows.shape)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            assert isinstance(weight, np.ndarray), name
            yield name, weight[order]
        else:
            yield name, weight


def _means(hidden: Floats, count: int) -> Floats:
    """Return the means [n / count, width] of `count` rows each, summed in order."""
    parts = hidden.reshape(-1, count, hidden.shape[1])
    total = np.zeros((len(parts), hidden.shape[1]), np.float32)
    for index in range(count):
        total += parts[:, index]
    total *= np.float32(1 / count)
    return total
