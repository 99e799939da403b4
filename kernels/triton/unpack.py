"""unpack: packed rows as a dense matrix, for products with many rows; see kernels/torch/packed_rows.py."""

import torch
import triton
import triton.language as tl

from kernels.rounding import ceil_div
from kernels.torch.packed_rows import PackedRows
from kernels.triton.packed_tile import TILE_BYTES, constants, unpacked

_TILE_ROWS = 64


# fmt: off
@triton.jit(do_not_specialize=["num_rows"])
def _unpack(
    codes, scales, fine, minima, fine_minima, out, num_rows, depth, width, num_groups, half_groups,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, FINE: tl.constexpr,
    MINIMA: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Unpack BLOCK_K bytes of codes of BLOCK_N rows in each program. width: bytes of codes in a row.

    half_groups: num_groups, or half of them where a row's halves share bytes.
    """
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(place, num_rows - 1).to(tl.int64)
    first, group = tl.program_id(0) * BLOCK_K, tl.program_id(0) * (BLOCK_K // GROUP)
    at = first + tl.arange(0, BLOCK_K)
    inside = (place < num_rows)[:, None] & (at < width)[None, :]
    packed = tl.load(codes + row[:, None] * width + at[None, :], mask=inside, other=0).to(tl.int32) << BIT
    target = out + row[:, None] * depth + at[None, :]
    weights = unpacked(
        packed, row, first, group, num_groups, depth, scales, fine, minima, fine_minima,
        BIT, BITS, ZERO, GROUP, FINE, MINIMA, EVEN, INTERPRETED,
    )
    tl.store(target, weights.to(out.dtype.element_ty), mask=inside)
    if BITS == 4:
        weights = unpacked(
            packed, row, first + width, group + half_groups, num_groups, depth, scales, fine, minima, fine_minima,
            BIT + 4, BITS, ZERO, GROUP, FINE, MINIMA, EVEN, INTERPRETED,
        )
        tl.store(target + width, weights.to(out.dtype.element_ty), mask=inside)
# fmt: on


def unpack(packed: PackedRows, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [rows, depth], rounded once to dtype."""
    num_rows, width = packed.codes.shape
    out = torch.empty(num_rows, packed.depth, dtype=dtype, device=packed.codes.device)
    fields = (packed.scales if one is None else one for one in (packed.fine, packed.minima, packed.fine_minima))
    _unpack[ceil_div(width, TILE_BYTES), ceil_div(num_rows, _TILE_ROWS)](
        packed.codes,
        packed.scales,
        *fields,
        out,
        num_rows,
        packed.depth,
        width,
        packed.depth // packed.group,
        width // packed.group,
        BLOCK_N=_TILE_ROWS,
        BLOCK_K=TILE_BYTES,
        EVEN=width % TILE_BYTES == 0,
        **constants(packed),
    )
    return out
