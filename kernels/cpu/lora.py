"""CpuAdapter: a low-rank adapter (LoRA) packed for the C kernels, which apply it to single rows (c/products/lora.h)."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.arrays import Floats, Ints
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import ELEMENT_NUMBERS, CpuLibrary
from kernels.cpu.structs import LoraArguments, LoraProduct, LoraStrip, LowerArguments
from kernels.elements import Dtype, Numbers, rounded
from kernels.low_rank import LowRank, ProductShape
from kernels.memory.aligned import aligned_empty
from kernels.rounding import ceil_div

_STRIP, _STRIPS_OF_PANEL = 16, 2  # enum in lora.h
_STRIP_DTYPE = np.dtype([("offset", "<i8"), ("first", "<i4"), ("rank", "<i4")])
assert ctypes.sizeof(LoraStrip) == _STRIP_DTYPE.itemsize


class LoraRows(NamedTuple):
    """The adapters of a step's rows, and the largest number of elements of t in one of their products."""

    adapters: Ints  # [T] CpuAdapter.address of each row's adapter; 0 = none
    width: int


class CpuAdapter:
    """The matrices of one adapter for all products of a model, in the order of `shapes`, with a model's dtype.

    products: for each product, the parts that the adapter changes; None = not this one. The scale is applied to a @ x
    in float32, so that it rounds no weight.
    """

    def __init__(
        self, shapes: Sequence[ProductShape], products: Sequence[Sequence[LowRank | None]], dtype: Dtype
    ) -> None:
        self._arguments = (LoraProduct * len(shapes))()
        self._kept: list[Numbers] = []  # the structs point into these
        self.num_bytes = self.width = 0
        for arguments, shape, parts in zip(self._arguments, shapes, products, strict=True):
            if any(part is not None for part in parts):
                self._pack(arguments, shape, parts, dtype)
        #: Address of the products' structs, for LoraRows.
        self.address = ctypes.addressof(self._arguments)

    def _pack(self, arguments: LoraProduct, shape: ProductShape, parts: Sequence[LowRank | None], dtype: Dtype) -> None:
        ranks = [0 if part is None else len(part.a) for part in parts]
        rank, firsts = sum(ranks), np.cumsum(ranks) - ranks
        a = aligned_empty((rank, shape.depth), dtype)
        scales = aligned_empty((rank,), np.dtype(np.float32))
        for part, first, size in zip(parts, firsts, shape.parts, strict=True):
            if part is None:
                continue
            assert part.a.shape[1] == shape.depth, (part.a.shape, shape)
            assert part.b.shape == (size, len(part.a)), (part.b.shape, part.a.shape, shape)
            a[first : first + len(part.a)] = rounded(part.a, dtype)
            scales[first : first + len(part.a)] = part.scale
        columns = _columns_of(shape, parts, firsts.tolist())
        strips, b = _strips(columns, dtype, is_gated=shape.is_gated)
        self._kept += [a, b, strips, scales]
        arguments.a, arguments.b = a.ctypes.data, b.ctypes.data
        arguments.strips, arguments.scales, arguments.rank = strips.ctypes.data, scales.ctypes.data, rank
        self.num_bytes += a.nbytes + b.nbytes + strips.nbytes + scales.nbytes
        self.width = max(self.width, rank)


class _Columns(NamedTuple):
    """Consecutive columns of a product that are multiplied with the same elements of t."""

    size: int
    first: int  # first of these elements
    b: Numbers | None  # [size, rank]; None: no adapter


def _columns_of(shape: ProductShape, parts: Sequence[LowRank | None], firsts: Sequence[int]) -> list[_Columns]:
    """Return the parts unchanged, or merged with zeros in B if a strip would have columns of two parts."""
    if shape.is_gated or all(size % _STRIP == 0 for size in shape.parts):
        return [
            _Columns(size, first, None if part is None else part.b)
            for size, first, part in zip(shape.parts, firsts, parts, strict=True)
        ]
    whole = np.zeros((sum(shape.parts), sum(len(part.a) for part in parts if part is not None)), np.float32)
    begin = 0
    for size, first, part in zip(shape.parts, firsts, parts, strict=True):
        if part is not None:
            whole[begin : begin + size, first : first + len(part.a)] = rounded(part.b, whole.dtype)
        begin += size
    return [_Columns(len(whole), 0, whole)]


def _strips(columns: Sequence[_Columns], dtype: Dtype, *, is_gated: bool) -> tuple[Numbers, Numbers]:
    """Return the strips' table, two per panel, and their numbers, strip after strip."""
    counts = [ceil_div(one.size, _STRIP) for one in columns]
    ranks = [0 if one.b is None else one.b.shape[1] for one in columns]
    num_numbers = sum(count * rank for count, rank in zip(counts, ranks, strict=True)) * _STRIP
    b = aligned_empty((num_numbers,), dtype)
    num_strips = ceil_div(sum(counts), _STRIPS_OF_PANEL) * _STRIPS_OF_PANEL
    table, offset, begin = np.zeros(num_strips, _STRIP_DTYPE), 0, 0
    for index, (one, count, rank) in enumerate(zip(columns, counts, ranks, strict=True)):
        places = slice(index, None, 2) if is_gated else slice(begin, begin + count)
        begin += count
        if one.b is None:
            continue
        size = count * rank * _STRIP
        padded = np.zeros((count * _STRIP, rank), dtype)
        padded[: one.size] = rounded(one.b, dtype)
        b[offset : offset + size] = padded.reshape(count, _STRIP, rank).transpose(0, 2, 1).reshape(-1)
        table["offset"][places] = offset + np.arange(count) * rank * _STRIP
        table["first"][places], table["rank"][places] = one.first, rank
        offset += size
    return table, b


def multiply_adapted(library: CpuLibrary, matrix: PackedMatrix, x: Numbers, rows: LoraRows, product: int) -> Numbers:
    """Return matrix(x) plus what the rows' adapters add. `product` is the matrix's index in an adapter.

    It has the same bits as in the C decoder's step.
    """
    lowered: Floats = aligned_empty((len(x), max(1, rows.width)), np.dtype(np.float32))
    adapters = np.ascontiguousarray(rows.adapters, np.int64)
    lora = LoraArguments(
        adapters=adapters.ctypes.data, lowered=lowered.ctypes.data, stride=lowered.shape[1], product=product
    )
    lower = LowerArguments(
        lora=ctypes.addressof(lora),
        x=x.ctypes.data,
        num_rows=len(x),
        depth=matrix.in_features,
        x_stride=x.strides[0] // x.itemsize,
        dtype=ELEMENT_NUMBERS[matrix.dtype],
        by_rows=0,
    )
    library.function("lora_lower", ctypes.POINTER(LowerArguments))(lower)
    matrix.arguments.lora = ctypes.addressof(lora)
    try:
        return matrix(x)
    finally:
        matrix.arguments.lora = None
