"""PackedLinear: a linear layer whose weights stay quantized in device memory.

Its results are those of DeviceLinear with the dequantized weights: they are rounded to x's type as they would be when
loaded, and x is not quantized. At numerics level L2 the bits are equal too. At L0 the order of sums differs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.rounding import ceil_div
from kernels.torch.packed_rows import HALF, PackedRows
from kernels.triton.linear import DeviceProduct, torch_product
from kernels.triton.ordered_product import ordered_product
from kernels.triton.packed_product import packed_product
from kernels.triton.packed_tile import TILE_BYTES, constants, unpacked

#: Version of the arithmetic; part of the fingerprint.
ARITHMETIC = 2
#: The most rows that are multiplied while weights are unpacked. For more, a piece of the matrix is unpacked into a
#: buffer.
MOST_ROWS = 128
#: The same for float32, whose products have no tensor cores and whose larger tiles do not fit in registers.
MOST_FLOAT_ROWS = 16
#: Weights per piece: 32 MB in bfloat16, which an H100's L2 cache (50 MB) keeps until it is multiplied.
PIECE = 1 << 24
_ALIGNED = 64  # rows: pieces start at multiples of 16 bytes


class PackedLinear:
    """The layer y = x @ weight.T + bias; the rows of each part of the weight follow those of the previous one.

    bias [out] of any type; dtype: x's; out_dtype: the result's.
    """

    def __init__(
        self,
        parts: Sequence[PackedRows],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        name: str,
        product: DeviceProduct = ordered_product,
    ) -> None:
        """Keep the parts. name: of the weights' form, for `variant`. product: for many rows."""
        self.parts, self.dtype, self.out_dtype = tuple(parts), dtype, out_dtype
        self._product, self._in_parts, self._name = product, product is torch_product, name
        self._most_rows = MOST_FLOAT_ROWS if dtype == torch.float32 else MOST_ROWS
        self.bias = None if bias is None else bias.to(out_dtype)
        self.out_features = sum(len(part.codes) for part in parts)
        self.variant = f"triton-{name}.{ARITHMETIC}-rows.{self._most_rows}"

    def in_own_dtype(self) -> "PackedLinear":
        """Return the same layer with results of x's dtype."""
        return PackedLinear(self.parts, self.bias, self.dtype, self.dtype, name=self._name, product=self._product)

    def dense_weight(self) -> torch.Tensor:
        """Return the weights [out, in], rounded to x's dtype."""
        return torch.cat([unpack(part, self.dtype) for part in self.parts])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x [T, in] -> [T, out] with out_dtype."""
        y = torch.empty(len(x), self.out_features, dtype=self.out_dtype, device=x.device)
        if not len(x):
            return y
        first = 0
        for part in self.parts:
            if len(x) <= self._most_rows:
                packed_product(x.contiguous(), part, self.bias, y, first, in_parts=self._in_parts)
            else:
                self._by_pieces(x, part, y, first)
            first += len(part.codes)
        return y

    def _by_pieces(self, x: torch.Tensor, part: PackedRows, y: torch.Tensor, first: int) -> None:
        """Unpack the part piece by piece, and multiply each into y, starting at column `first`."""
        step = max(_ALIGNED, PIECE // part.depth // _ALIGNED * _ALIGNED)
        for begin in range(0, len(part.codes), step):
            weight = unpack(part.rows(begin, begin + step), self.dtype)
            columns = slice(first + begin, first + begin + len(weight))
            bias = None if self.bias is None else self.bias[columns]
            self._product(x.contiguous(), weight, bias, y[:, columns])


# unpack: packed rows as a dense matrix, for products with many rows; see kernels/torch/packed_rows.py.


_TILE_ROWS = 64


# fmt: off
@triton.jit(do_not_specialize=["num_rows"])
def unpack_kernel(
    codes, scales, fine, minima, fine_minima, out, used, num_rows, depth, width, num_groups, each,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHECKS: tl.constexpr,
    BIT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, FINE: tl.constexpr,
    MINIMA: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Unpack BLOCK_K bytes of codes for BLOCK_N rows per program. width: bytes of codes per row.

    CHECKS: only rows of parts of `each` rows that are used.
    """
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(place, num_rows - 1).to(tl.int64)
    there = place < num_rows
    if CHECKS:
        wanted = tl.load(used + row // each)
        if tl.max(wanted, 0) == 0:
            return
        there = there & (wanted != 0)
    WEIGHTS: tl.constexpr = BLOCK_K * 8 // (8 if BITS > 4 else 4)
    first, group = tl.program_id(0) * WEIGHTS, tl.program_id(0) * (WEIGHTS // GROUP)
    at = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = there[:, None] & (at < width)[None, :]
    packed = tl.load(codes + row[:, None] * width + at[None, :], mask=inside, other=0).to(tl.int32) << BIT
    target = out + row[:, None] * depth + (first + tl.arange(0, BLOCK_K))[None, :]
    weights = unpacked(
        packed, row, first, group, num_groups, depth, scales, fine, minima, fine_minima,
        BIT, BITS, ZERO, GROUP, FINE, MINIMA, EVEN, INTERPRETED,
    )
    tl.store(target, weights.to(out.dtype.element_ty), mask=inside)
    if BITS == 4:
        weights = unpacked(
            packed, row, first + BLOCK_K, group + BLOCK_K // GROUP, num_groups, depth, scales, fine, minima,
            fine_minima, BIT + 4, BITS, ZERO, GROUP, FINE, MINIMA, EVEN, INTERPRETED,
        )
        tl.store(target + BLOCK_K, weights.to(out.dtype.element_ty), mask=inside)
# fmt: on


def unpack(
    packed: PackedRows, dtype: torch.dtype, out: torch.Tensor | None = None, used: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weights [rows, depth], rounded once to dtype; in `out` if it is given.

    used [P] int32: of P equal parts of the rows, only those that are not 0 there are unpacked.
    """
    num_rows, width = packed.codes.shape
    if out is None:
        out = torch.empty(num_rows, packed.depth, dtype=dtype, device=packed.codes.device)
    fields = (packed.scales if one is None else one for one in (packed.fine, packed.minima, packed.fine_minima))
    tile_bytes = HALF if packed.in_4_bits else TILE_BYTES
    unpack_kernel[ceil_div(width, tile_bytes), ceil_div(num_rows, _TILE_ROWS)](
        packed.codes,
        packed.scales,
        *fields,
        out,
        packed.codes if used is None else used,
        num_rows,
        packed.depth,
        width,
        packed.depth // packed.group,
        num_rows if used is None else num_rows // len(used),
        BLOCK_N=_TILE_ROWS,
        BLOCK_K=tile_bytes,
        CHECKS=used is not None,
        EVEN=width % tile_bytes == 0,
        **constants(packed),
    )
    return out
