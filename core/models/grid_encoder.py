"""GridEncoder: computes embeddings from the pixels of images of any size, on the C kernels.

Each image is computed alone and whole, so its rows are a function of its pixels only. The layers are the decoder's C
call (kernels/cpu/c/layers/decoder.h). Patches are the tokens, given by their embeddings. A patch has two positions, its
row and its column. Patches that become one row follow each other, and so do those of one window.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from core.models.grid_images import GridImages
from core.models.grid_parts import GridActivation, GridParts
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.stored_matrix import StoredMatrix, Weight
from core.models.parts.weight_parts import WeightParts
from core.models.vision_encoder import sizes_of
from ipc.tables.arrays import Floats, Ints, UInt8s
from kernels.cpu.attention_plan import AttentionPlan, AttentionPlanner
from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.decoder_parts import AttentionParts, DenseParts, LayerParts
from kernels.cpu.embedding import CpuEmbedding
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.norm import CpuNorm
from kernels.cpu.rope import RotaryTable
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats
from kernels.memory.kv_cache import MixedKVCache
from kernels.rotary import rotary_frequencies

BLOCK_TOKENS = 16  # tokens per KV block; each window has its own blocks
_MERGED_EPS = 1e-5  # of the norm of merged patches
_STRIP_PIXELS = 1 << 20  # of an image, whose patches are embedded at once


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


class Runs(NamedTuple):
    """Runs of patches that see each other: a whole image, or its windows. Each has its own blocks."""

    lengths: Ints  # [n]
    slots: Ints  # [patches]
    blocks: Ints  # [n, most blocks] int32


class GridEncoder(GridImages):
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
        self._decoder = self._make_decoder(files)
        self._merger = self._make_merger(files, "merger")
        count = len(parts.deep_layers)
        self._deep = [
            (self._norm(files, f"deep.{index}.norm", dtype), self._make_merger(files, f"deep.{index}"))
            for index in range(count)
        ]
        self._break = files.take("break.weight") if parts.breaks_rows else None
        if count:
            self._decoder.tap([layer + 1 for layer in parts.deep_layers])
        heads = parts.num_attention_heads
        self._planners = [AttentionPlanner(library, heads, heads, is_causal=False) for _ in self._kinds]
        self._cache: CpuKVCache | MixedKVCache = operations.allocate_cache(2, BLOCK_TOKENS)

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Return, for each kind of layer, whether it sees windows."""
        return (False, True) if self.parts.window else (False,)

    def _make_decoder(self, files: WeightParts) -> CpuDecoder:
        parts = self.parts
        layers = [self._layer(files, index) for index in range(parts.num_hidden_layers)]
        head_dim = parts.hidden_size // parts.num_attention_heads
        every = np.zeros(head_dim // 2, np.float32)  # no rotation
        if parts.rope_theta:
            every = rotary_frequencies(head_dim, parts.rope_theta)
        frequencies = every[::2]
        table = RotaryTable(np.concatenate((frequencies, every[1::2] if parts.alternates else frequencies)))
        norm = CpuNorm(self._library, None, parts.norm_eps, self._dtype)
        if not parts.plain_merger:
            norm = self._norm(files, "norm", self._dtype)
        merger_eps = parts.norm_eps if parts.merger_eps is None else parts.merger_eps
        return CpuDecoder(
            self._library,
            layers,
            CpuEmbedding(self._library, rounded(np.zeros((1, parts.hidden_size), np.float32), self._dtype)),
            norm,
            float_norm=CpuNorm(
                self._library, norm.weight, merger_eps, FLOAT32, bias=norm.bias, is_centred=parts.is_centred
            ),
            head=None,
            tables=[table] * len(self._kinds),
            num_heads=parts.num_attention_heads,
            axes=np.repeat(np.arange(2), len(frequencies)),
        )

    def _norm(self, files: WeightParts, name: str, dtype: Dtype) -> CpuNorm:
        weight, is_centred = files.take(f"{name}.weight"), self.parts.is_centred
        bias = files.take(f"{name}.bias") if is_centred else None
        return CpuNorm(self._library, weight, self.parts.norm_eps, dtype, bias=bias, is_centred=is_centred)

    def _layer(self, files: WeightParts, index: int) -> LayerParts:
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
        return LayerParts(
            input_norm=before,
            qkv=qkv,
            mix=AttentionParts(None, (parts.hidden_size // parts.num_attention_heads) ** -0.5),
            o=o,
            attention_out_norm=None,
            mlp_norm=mlp_norm,
            mlp=DenseParts(up, product("down")),
            mlp_out_norm=None,
            kind=int(is_windowed),
        )

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

    def encode(self, pixels: UInt8s) -> Floats:
        """Return the rows [n, width] float32 of an image [height, width, 3] whose sides are multiples of the unit."""
        parts, merge = self.parts, self.parts.merge_size
        places, (height, width) = self.places_of(pixels)
        order = np.arange(len(places) // merge**2)
        runs = [runs_of(np.array([len(places)]))]
        if parts.window:
            order, lengths = _windows(height // merge, width // merge, parts.window)
            runs.append(runs_of(lengths * merge**2))
        patches = (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)
        places = places[patches]
        given = self._embedded(pixels)[patches] if parts.window else self._embedded(pixels)
        if self._patch_norm is not None:
            given = to_floats(self._patch_norm(given))
        if self._table is not None:
            given = given + self._positions(self._table, places, (height, width))
        rows = np.empty((len(order), self.width), np.float32)
        rows[order] = self._run(np.ascontiguousarray(given), places, runs)
        return rows if self._break is None else _with_breaks(rows, width // merge, self._break)

    def _embedded(self, pixels: UInt8s) -> Floats:
        """Return the embeddings [patches, hidden] of an image's patches.

        They are computed strip by strip, because the numbers of all patches of a large image take a GB.
        """
        unit = self.parts.unit
        height = max(1, _STRIP_PIXELS // (unit * pixels.shape[1])) * unit
        strips = [pixels[top : top + height] for top in range(0, len(pixels), height)]
        return np.concatenate([to_floats(self._patches(rounded(self.cut(strip), self._dtype))) for strip in strips])

    def _run(self, given: Floats, places: Ints, runs: Sequence[Runs]) -> Floats:
        """Return the rows [n, width] of patches [patches, hidden] at these places [patches, 2]."""
        count, joined = len(given), self.parts.joined_size
        self._reserve(max(int(run.blocks.max()) for run in runs) + 1)
        work: list[AttentionPlan] = []
        for planner, run in zip(self._planners, runs, strict=True):
            work.append(planner(run.lengths, run.lengths, run.blocks, BLOCK_TOKENS))
        if len(work) > 1:
            work[1].has_window_slots = True
        index, nothing = np.arange(count), np.zeros(0, np.int64)
        result = self._decoder(
            -1 - index,
            index,
            runs[0].slots,
            work,
            self._cache,
            nothing,
            0,
            None,
            given,
            None,
            runs[-1].slots,
            places,
        )
        merged = rounded(result.hidden_of(index), self._dtype).reshape(-1, joined)
        rows = [self._merger(merged)]
        if self._deep:
            states = result.states_of(index)
            for tap, (norm, merger) in enumerate(self._deep):
                rows.append(merger(norm(np.ascontiguousarray(states[:, tap]).reshape(-1, joined))))
        return np.concatenate(rows, 1)

    def _reserve(self, num_blocks: int) -> None:
        """Have a cache of at least this many blocks, for the K and V of one layer."""
        if self._cache.num_blocks_of_all < num_blocks:
            self._cache = self._operations.allocate_cache(num_blocks, BLOCK_TOKENS)


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


def runs_of(lengths: Ints) -> Runs:
    """Return runs of these lengths, one after the other, each in blocks of its own; block 0 stays free."""
    counts = -(-lengths // BLOCK_TOKENS)
    firsts = counts.cumsum() - counts + 1
    blocks = firsts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
    within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return Runs(lengths, np.repeat(firsts * BLOCK_TOKENS, lengths) + within, blocks.astype(np.int32))


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
