"""unpacked: computes a tile of weights from codes, scales and minima; see kernels/torch/packed_rows.py."""

import triton
import triton.language as tl

from kernels.torch.packed_rows import PackedRows
from kernels.triton.device import INTERPRETED
from kernels.triton.e4m3 import of_e4m3

#: The most bytes of codes per tile row; it may have half as many. A tile is within one block of 256 weights, so it has
#: one coarse scale per row.
TILE_BYTES = 128


# fmt: off
@triton.jit
def unpacked(
    codes, row, first, group, num_groups, depth, scales, fine, minima, fine_minima,
    BIT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, FINE: tl.constexpr,
    MINIMA: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Return the weights float32 [N, K] whose codes have BITS bits, starting at bit BIT, in codes [N, K] int32.

    ZERO: None = codes are floats (e4m3.py), from bit 0 on.

    row [N] int64: their rows; first, group: the first column, and its group; num_groups: per row; EVEN: no tile extends
    beyond the rows' ends. The compiler sees whether group and num_groups are multiples of two or four; only then does
    it load scales ahead, which needs at least four bytes.

    A float32 whose last 23 bits have a code from BIT on is code + 2 ** (23 - BIT), without a conversion. Subtracting
    that power and zero, and multiplying by the scale, is one fused multiply-add. It rounds once and need not round at
    all: a scale has 11 bits, or 17 or 19 with a fine one, so the multiple of the power and zero fits in 24 bits at the
    position that constants() chooses for the code. The interpreter rounds twice, so it subtracts the zero first. depth
    >> 31 is 0, which the compiler does not know: if an operation has two constants, it copies one into a register for
    each weight.
    """
    ROWS: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = WIDTH // GROUP
    factors = _factors(scales, fine, row, first, group, num_groups, depth, GROUPS, FINE, EVEN)
    if ZERO is None:
        numbers = tl.reshape(of_e4m3(codes), (ROWS, GROUPS, GROUP)) * factors[:, :, None]
    else:
        OFFSET: tl.constexpr = (1 << (23 - BIT)) + ZERO
        bits = (codes & (((1 << BITS) - 1) << BIT)) | (((150 - BIT) << 23) + (depth >> 31))
        numbers = tl.reshape(bits.to(tl.float32, bitcast=True), (ROWS, GROUPS, GROUP))
        if INTERPRETED:
            numbers = (numbers - OFFSET) * factors[:, :, None]
        else:
            numbers = tl.fma(numbers, factors[:, :, None], (factors * -OFFSET)[:, :, None])
        if MINIMA:
            shifts = _factors(minima, fine_minima, row, first, group, num_groups, depth, GROUPS, FINE, EVEN)
            numbers -= shifts[:, :, None]
    return tl.reshape(numbers, (ROWS, WIDTH))


@triton.jit
def _factors(
    scales, fine, row, first, group, num_groups, depth,
    GROUPS: tl.constexpr, FINE: tl.constexpr, EVEN: tl.constexpr,
):
    """Return the scales float32 [N, GROUPS], or the minima."""
    column = group + tl.arange(0, GROUPS)
    places = row[:, None] * num_groups + column[None, :]
    table = fine if FINE else scales
    if EVEN:
        factors = tl.load(table + places).to(tl.float32)
    else:
        factors = tl.load(table + places, mask=(column < num_groups)[None, :], other=0).to(tl.float32)
    if FINE:
        factors *= tl.load(scales + row * (depth // 256) + first // 256)[:, None]
    return factors
# fmt: on


def constants(packed: PackedRows) -> dict[str, int | None]:
    """Return the constants for a kernel that unpacks these rows.

    BIT: where a byte of codes is placed in a word before it is unpacked; see unpacked().
    """
    if packed.zero is None:
        bit, bits = 0, 8
    else:
        bit = 16 if not packed.in_4_bits and packed.zero < 128 else 8
        bits = 4 if packed.in_4_bits else 8 if packed.zero == 128 else 7
    return {
        "BIT": bit,
        "ZERO": packed.zero,
        "GROUP": packed.group,
        "FINE": packed.fine is not None,
        "MINIMA": packed.minima is not None,
        "BITS": bits,
        "INTERPRETED": INTERPRETED,
    }
