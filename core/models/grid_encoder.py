"""GridEncoder: computes embeddings from the pixels of images of any size, on the C kernels.

Each image is computed alone, so its rows are a function of its pixels only. Patches are the tokens, given by their
embeddings. A patch has two positions, its row and its column. Patches that become one row follow each other, and so do
those of one window.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.models.encoder_run import EncoderInParts, LayersInBlocks, Pieces, Runs, plain_layer, runs_of
from core.models.grid_images import GridImages
from core.models.grid_parts import GridActivation, GridParts
from core.models.layers.layer import Layer
from core.models.layers.mixers import Mixer
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.weight_parts import WeightParts
from core.models.vision_encoder import sizes_of
from ipc.tables.arrays import Floats, Ints, UInt8s
from ipc.tables.rounding import ceil_div
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.cpu.rope import RotaryTable
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.rotary import rotary_frequencies

_MERGED_EPS = 1e-5  # of the norm of merged patches
_STRIP_PIXELS = 1 << 20  # of an image, whose patches are embedded at once
_PIECE_ROWS = 64  # made at once of merged patches


class Merger(NamedTuple):
    """The products that make rows of merged patches."""

    merge: PackedMatrix | None
    norm: CpuNorm | None
    first: PackedMatrix  # has the activation
    second: PackedMatrix

    def __call__(self, merged: Numbers) -> Floats:
        """Return rows [n, hidden] float32 of merged patches [n, joined]."""
        if self.merge is not None:
            merged = self.merge(merged)
        if self.norm is not None:
            merged = self.norm(merged)
        rows: Floats = to_floats(self.second(self.first(merged)))
        return rows


class Grid(NamedTuple):
    """An image's patches in the order of the layers: that of windows if there are any."""

    order: Ints  # [rows] of each row in this order: its place in the image
    patches: Ints  # [patches] of each patch in this order: its place in the image's order
    places: Ints  # [patches, 2] row and column, in the image's order
    size: tuple[int, int]  # of the grid of patches
    runs: list[Runs]  # of each kind of layer


class GridEncoder(GridImages, EncoderInParts):
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
        self._dtype, self._library = dtype, library
        self.width = hidden_size * (1 + len(parts.deep_layers))
        files = WeightParts(weights)
        tokens = parts.max_rows * parts.merge_size**2
        sizes = sizes_of(parts, eps=parts.norm_eps, num_tokens=tokens, num_positions=1, rope_theta=parts.rope_theta)
        self._operations = operations = CpuOperations(sizes, dtype, library)
        patches = files.take_matrix("patches.weight")
        bias = files.take("patches.bias") if parts.patch_bias else None
        self._patches = operations.linear(patches, bias, out_dtype=FLOAT32)
        self._patch_norm = self._norm(files, "patch_norm", FLOAT32) if parts.patch_norm else None
        self._table, self._positions = None, averaged if parts.averages_positions else stretched
        if parts.positions_per_side:
            self._table = to_floats(files.take_matrix("positions.weight").dense(dtype))
        self._layers = self._make_layers(files)
        self._merger = self._make_merger(files, "merger")
        count = len(parts.deep_layers)
        self._deep = [
            (self._norm(files, f"deep.{index}.norm", dtype), self._make_merger(files, f"deep.{index}"))
            for index in range(count)
        ]
        self._break = files.take("break.weight") if parts.breaks_rows else None

    def _make_layers(self, files: WeightParts) -> LayersInBlocks:
        """Build the layers, and the norm of what they yield."""
        parts, heads = self.parts, self.parts.num_attention_heads
        layers = [self._layer(files, index) for index in range(parts.num_hidden_layers)]
        head_dim = parts.hidden_size // heads
        every = np.zeros(head_dim // 2, np.float32)  # no rotation
        if parts.rope_theta:
            every = rotary_frequencies(head_dim, parts.rope_theta)
        frequencies = every[::2]
        self._rotation = RotaryTable(np.concatenate((frequencies, every[1::2] if parts.alternates else frequencies)))
        self._axes = np.repeat(np.arange(2), len(frequencies))
        norm = CpuNorm(self._library, None, parts.norm_eps, FLOAT32)
        if not parts.plain_merger:
            norm = self._norm(files, "norm", FLOAT32, parts.merger_eps)
        self._last_norm = norm
        return LayersInBlocks(layers, self._operations, heads, heads)

    def _norm(self, files: WeightParts, name: str, dtype: Dtype, eps: float | None = None) -> CpuNorm:
        """Return a norm. eps: None = that of the layers."""
        weight, is_centred = files.take(f"{name}.weight"), self.parts.is_centred
        bias = files.take(f"{name}.bias") if is_centred else None
        eps = self.parts.norm_eps if eps is None else eps
        return CpuNorm(self._library, weight, eps, dtype, bias=bias, is_centred=is_centred)

    def _layer(self, files: WeightParts, index: int) -> Layer:
        parts, operations, stem = self.parts, self._operations, f"layers.{index}."

        def product(*names: str, activation: GridActivation | None = None) -> PackedMatrix:
            weight = files.take_matrix(*(f"{stem}{name}.weight" for name in names))
            return operations.linear(weight, self._bias(files, *(stem + name for name in names)), activation=activation)

        before = self._norm(files, f"{stem}attention_norm", self._dtype)
        mlp_norm = self._norm(files, f"{stem}mlp_norm", self._dtype)
        qkv, o = product(*("qkv" if parts.split_qkv else ("qkv",))), product("o")
        if parts.is_gated:
            matrix = files.take_matrix(f"{stem}gate.weight", f"{stem}up.weight")
            up, _ = operations.gate_up(matrix, parts.hidden_act, self._bias(files, f"{stem}gate", f"{stem}up"))
        else:
            up = product("up", activation=parts.hidden_act)
        is_windowed = bool(parts.window) and index not in parts.full_layers
        mixer = Mixer(qkv, operations.attention(int(is_windowed), None), o, 0)
        return plain_layer(int(is_windowed), (before, mlp_norm), mixer, up, product("down"))

    def _bias(self, files: WeightParts, *names: str) -> Floats | None:
        return files.take(*(f"{name}.bias" for name in names)) if self.parts.has_biases else None

    def _make_merger(self, files: WeightParts, stem: str) -> Merger:
        linear, merge = self._operations.linear, None
        if self.parts.merge_first:  # files have the numbers of all patches that are merged next to each other
            matrix = files.take_matrix(f"{stem}.merge.weight").dense(self._dtype)
            apart = matrix.reshape(len(matrix), self.parts.hidden_size, -1).transpose(0, 2, 1)
            merge = linear(StoredMatrix.of(np.ascontiguousarray(apart).reshape(matrix.shape)))
        has_biases = self.parts.has_biases or self.parts.plain_merger

        def product(name: str, **options: Any) -> PackedMatrix:
            weight = files.take_matrix(f"{stem}.{name}.weight")
            return linear(weight, files.take(f"{stem}.{name}.bias") if has_biases else None, **options)

        norm = None
        if self.parts.normalizes_merged:
            weight, bias = files.take(f"{stem}.norm.weight"), files.take(f"{stem}.norm.bias")
            norm = CpuNorm(self._library, weight, _MERGED_EPS, self._dtype, bias=bias, is_centred=True)
        first, second = product("first", activation="gelu"), product("second", out_dtype=FLOAT32)
        return Merger(merge, norm, first, second)

    @property
    def variant(self) -> str:
        """Return the names of the kernels in use; part of the fingerprint."""
        return f"vision={self._patches.variant} {self._operations.variant}"

    def work(self, num_rows: int) -> int:
        """Return about how many multiplications an image with so many rows takes."""
        parts, count = self.parts, num_rows * self.parts.merge_size**2
        of_windows = parts.window**2 * parts.merge_size**2
        runs = [runs_of(np.array([count]))]
        if parts.window:
            runs.append(runs_of(np.full(ceil_div(count, of_windows), of_windows)))
        return self._layer_work(runs) + self._merger_work(count)

    def _layer_work(self, runs: Sequence[Runs]) -> int:
        """Return the multiplications of the layers."""
        return self._layers.work(self.parts.layer_products, self.parts.hidden_size, runs)

    def _merger_work(self, num_patches: int) -> int:
        """Return the multiplications of what makes rows of so many patches, for all that a row has."""
        return num_patches * self.parts.joined_size * (1 + len(self._deep)) * self.parts.hidden_size

    def pieces(self, pixels: UInt8s) -> Pieces:
        """Compute the rows [n, width] float32 of an image [height, width, 3] whose sides are multiples of the unit."""
        parts, grid, first = self.parts, self._grid_of(pixels), 0
        count, joined = len(grid.places), parts.joined_size
        inverse, hidden = np.empty(count, np.int64), np.empty((count, parts.hidden_size), np.float32)
        inverse[grid.patches] = np.arange(count)
        work, last = self._layer_work(grid.runs), self._merger_work(count)
        for strip in self._strips(pixels, grid):
            hidden[inverse[first : first + len(strip)]] = strip
            first += len(strip)
            yield 0.0
        places = grid.places[grid.patches]
        taps = [np.empty_like(hidden) for _ in self._deep]

        def tap(num_layers: int, block: slice) -> None:
            for layer, states in zip(parts.deep_layers, taps, strict=True):
                if layer + 1 == num_layers:
                    states[block] = hidden[block]

        for done in self._layers.run(hidden, grid.runs, self._turned(places), tap):
            yield done * work / (work + last)
        rows, step = np.empty((len(grid.order), self.width), np.float32), _PIECE_ROWS * parts.merge_size**2
        for begin in range(0, count, step):
            part = slice(begin, begin + step)
            merged = rounded(to_floats(self._last_norm(hidden[part])), self._dtype).reshape(-1, joined)
            made = [self._merger(merged)]
            for (norm, merger), states in zip(self._deep, taps, strict=True):
                made.append(merger(norm(states[part].reshape(-1, joined))))
            rows[begin // parts.merge_size**2 :][: len(merged)] = np.concatenate(made, 1)
            yield (work + last * min(1.0, (begin + step) / count)) / (work + last)
        return self._in_order(rows, grid)

    def _turned(self, places: Ints) -> RotaryTable:
        """Return the rotations of patches at places [patches, 2]; row i has that of patch i."""
        table = RotaryTable(np.zeros(len(self._axes), np.float32))
        table.cos, table.sin, table.query_cos, table.query_sin = self._rotation.rows_at(places, self._axes)
        return table

    def _grid_of(self, pixels: UInt8s) -> Grid:
        parts, merge = self.parts, self.parts.merge_size
        places, (height, width) = self.places_of(pixels)
        order = np.arange(len(places) // merge**2)
        runs = [runs_of(np.array([len(places)]))]
        if parts.window:
            order, lengths = _windows(height // merge, width // merge, parts.window)
            runs.append(runs_of(lengths * merge**2))
        patches = (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
        return Grid(order, patches, places, (height, width), runs)

    def _in_order(self, made: Floats, grid: Grid) -> Floats:
        """Return rows that were made in the order of the layers, in the image's order and with breaks."""
        rows = np.empty_like(made)
        rows[grid.order] = made
        return rows if self._break is None else _with_breaks(rows, grid.size[1] // self.parts.merge_size, self._break)

    def _strips(self, pixels: UInt8s, grid: Grid) -> Iterator[Floats]:
        """Yield the embeddings [n, hidden] of an image's patches, strip by strip: the numbers of all take a GB."""
        unit, first = self.parts.unit, 0
        height = max(1, _STRIP_PIXELS // (unit * pixels.shape[1])) * unit
        for top in range(0, len(pixels), height):
            given = to_floats(self._patches(rounded(self.cut(pixels[top : top + height]), self._dtype)))
            if self._patch_norm is not None:
                given = to_floats(self._patch_norm(given))
            if self._table is not None:
                given = given + self._positions(self._table, grid.places[first : first + len(given)], grid.size)
            first += len(given)
            yield given


def _with_breaks(rows: Floats, columns: int, end: Floats) -> Floats:
    """Return the rows of a grid of so many columns, with `end` after each of its rows but the last one."""
    grid = rows.reshape(-1, columns, rows.shape[1])
    ended = np.concatenate((grid, np.broadcast_to(end, (len(grid), 1, len(end)))), 1)
    return np.ascontiguousarray(ended.reshape(-1, len(end))[:-1])


def _windows(height: int, width: int, window: int) -> tuple[Ints, Ints]:
    """Return the order [height * width] of rows by windows, and the number of rows of each window."""
    index = np.arange(height * width).reshape(height, width)
    cut = [
        index[row : row + window, column : column + window].reshape(-1)
        for row in range(0, height, window)
        for column in range(0, width, window)
    ]
    return np.concatenate(cut), np.array([len(one) for one in cut])


def averaged(table: Floats, places: Ints, size: tuple[int, int]) -> Floats:
    """Return the positions [n, width] float32 of patches at places [n, 2] of a grid of this size.

    The table [side * side, width] is resized to the grid by the bilinear filter, with wider taps if it shrinks.
    """
    side, one = math.isqrt(len(table)), np.float32(1)
    grid = table.reshape(side, side, -1)
    for axis in range(2):
        scale = np.float32(side) / np.float32(size[axis])
        centres = (np.arange(size[axis], dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
        far = np.abs(np.arange(side, dtype=np.float32) - centres[:, None]) / max(scale, one)
        shares = np.maximum(one - far, np.float32(0))
        shares /= shares.sum(1, keepdims=True)
        total = np.zeros((size[axis], *grid.shape[1:]), np.float32)
        for source in range(side):
            total += shares[:, source, None, None] * grid[source]
        grid = total.swapaxes(0, 1)
    return np.ascontiguousarray(grid)[places[:, 0], places[:, 1]]


def stretched(table: Floats, places: Ints, size: tuple[int, int]) -> Floats:
    """Return the positions [n, width] float32 of patches at places [n, 2] of a grid of this size.

    The table [side * side, width] is stretched over the grid, corners on corners, and read by linear interpolation.
    """
    side, one, taps, shares = math.isqrt(len(table)), np.float32(1), list[Ints](), list[Floats]()
    for axis in range(2):
        wide = places[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size[axis] - 1, 1))
        low = np.floor(wide)
        taps.append(np.minimum(low.astype(np.int64)[:, None] + np.arange(2), side - 1))
        distance = wide - low
        shares.append(np.stack((one - distance, one - np.abs(distance - one)), 1))
    total = np.zeros((len(places), table.shape[1]), np.float32)
    for row in range(2):
        for column in range(2):
            share = shares[0][:, row] * shares[1][:, column]
            total += table[taps[0][:, row] * side + taps[1][:, column]] * share[:, None]
    return total
