"""CpuRope: rotary embedding, head norms and the cache write, with the C kernel (kernels/cpu/c/layers/rope.h)."""

import ctypes

import numpy as np

from kernels.arrays import Floats, Ints
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.library import CpuLibrary
from kernels.cpu.structs import RopeArguments, RowHeads
from kernels.elements import Numbers
from kernels.memory.aligned import aligned_empty
from kernels.rotary import query_factors, rotary_tables
from kernels.value_form import SIDES, ValueForm

MAX_HEAD_DIM = 4096  # of cache_codes.h: a head is rotated and quantized in stack buffers of this size
VALUE_NUMBERS = {form: number for number, form in enumerate(SIDES)}  # enum in rope.h
_LEAST_POSITIONS = 1024  # of a table that is not empty


class RotaryTable:
    """cos and sin [positions, head_dim] float32 of kernels.rotary.rotary_tables, extended on demand.

    query_cos and query_sin are for queries: the same, or with `growth` multiplied by kernels.rotary.query_factors.
    """

    def __init__(self, frequencies: Floats, factor: float = 1.0, growth: tuple[float, float] | None = None) -> None:
        self.settle(frequencies, factor, growth)

    def settle(self, frequencies: Floats, factor: float, growth: tuple[float, float] | None) -> None:
        """Replace the embedding and empty the table. No step may have used it."""
        self._frequencies, self._factor, self._growth = frequencies, factor, growth
        self.cos = self.sin = self.query_cos = self.query_sin = np.empty((0, 2 * len(frequencies)), np.float32)

    def reach(self, num_positions: int) -> None:
        """Extend the table to at least num_positions positions. Existing positions keep their bits."""
        have = len(self.cos)
        if num_positions <= have:
            return
        positions = np.arange(have, max(_LEAST_POSITIONS, 1 << (num_positions - 1).bit_length()))
        cos, sin = rotary_tables(positions, self._frequencies, self._factor)
        self.cos, self.sin = np.concatenate((self.cos, cos)), np.concatenate((self.sin, sin))
        self.query_cos, self.query_sin = self.cos, self.sin
        if self._growth is not None:
            factors = query_factors(np.arange(len(self.cos)), *self._growth)[:, None]
            self.query_cos, self.query_sin = self.cos * factors, self.sin * factors

    def rows_at(self, positions: Ints, axes: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """Return (cos, sin, query_cos, query_sin) [T, head_dim] of tokens with several positions [T, axes].

        axes [head_dim / 2]: which position turns each pair of a head.
        """
        self.reach(int(positions.max()) + 1)
        columns = np.arange(2 * len(axes))
        rows = positions[:, np.concatenate((axes, axes))]
        cos, sin = (np.ascontiguousarray(part[rows, columns]) for part in (self.cos, self.sin))
        if self._growth is None:
            return cos, sin, cos, sin
        return cos, sin, self.query_cos[rows, columns], self.query_sin[rows, columns]


class CpuRope:
    """Rotates one layer's Q and K, and writes K and V to the cache.

    norms [H + Hkv, D] float32: weights of the norms of Q's and K's heads; None = no norms. of_rows:
    Q's heads are normalised together, and so are K's; qkv is overwritten then. is_centred: the norms are layer
    normalisations; else of root mean squares. is_after: they follow the rotation; else they precede it. values: what V
    is (kernels/value_form.py); where it is normalised, norms has Hkv more rows. row: with of_rows, the heads of Q and K
    in a row of qkv and in norms, and the first of the H and Hkv that are used; None = they are these."""

    def __init__(
        self,
        library: CpuLibrary,
        num_heads: int,
        norms: Floats | None = None,
        eps: float = 0.0,
        *,
        of_rows: bool = False,
        is_centred: bool = False,
        is_after: bool = False,
        values: ValueForm = "own",
        row: tuple[int, int, int, int] | None = None,
    ) -> None:
        assert not (of_rows and is_after), "rows of heads are normalised before the rotation"
        self.num_heads, self.eps, self.of_rows, self.is_centred = num_heads, eps, of_rows, is_centred
        self.is_after, self.values, self.row = is_after, values, RowHeads(*(row or (0, 0, 0, 0)))
        self.norms = None if norms is None else np.ascontiguousarray(norms)
        self._run = library.function("rope_kv_write", ctypes.POINTER(RopeArguments))

    def __call__(
        self,
        qkv: Numbers,
        table: "RotaryTable | None",
        positions: Ints,
        cache: CpuKVCache,
        layer: int,
        slots: Ints,
    ) -> Numbers:
        """Write K and V to the cache, and return the rotated Q [T, H, D] with the cache's dtype.

        qkv is [T, (H + 2 * Hkv) * D] of the cache's dtype, or with fewer columns of K and V as `values` says; positions
        [T] int64 within the table, slots [T] int64 (-1 = do not store). table: None = heads are not rotated."""
        assert qkv.flags.c_contiguous, qkv.strides
        assert qkv.dtype == cache.dtype, (qkv.dtype, cache.dtype)
        assert cache.head_dim <= MAX_HEAD_DIM, cache.head_dim
        assert cache.head_dim % 2 == 0, cache.head_dim
        q = aligned_empty((len(qkv), self.num_heads, cache.head_dim), cache.dtype)
        rotations: list[int | None] = [None] * 4
        if table is not None:
            rotations = [one.ctypes.data for one in (table.cos, table.sin, table.query_cos, table.query_sin)]
        self._run(
            RopeArguments(
                qkv.ctypes.data,
                *rotations,
                positions.ctypes.data,
                None if self.norms is None else self.norms.ctypes.data,
                slots.ctypes.data,
                q.ctypes.data,
                cache.layers[layer].ctypes.data,
                cache.shape,
                self.num_heads,
                len(qkv),
                self.eps,
                self.of_rows,
                self.is_centred,
                self.is_after,
                VALUE_NUMBERS[self.values],
                self.row,
            )
        )
        return q
