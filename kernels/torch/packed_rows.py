"""PackedRows: rows of a quantized matrix in the form that GPU products read, from blocks of kernels/dequantize.py.

A weight is (code - zero) * scale - minimum, each operation rounded in float32: the same number as from dequantize(),
bit for bit. Codes have four bits, or eight if the type has more than four: so a product supports two layouts, not nine.
Codes of FP8 are floats, E4M3, and a weight is code * scale.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernels.arrays import UInt8s
from kernels.dequantize import BLOCK, BLOCK_SIZES, LEVELS

#: Bytes in whose high bits the weights that follow are, if codes have four bits. A product takes the low bits of so
#: many bytes, then the high ones, and so all weights in their order.
HALF = 64
_CHUNK = 1 << 24  # weights converted at a time; temporary tensors take about ten bytes per weight
_WIDE_BLOCK = BLOCK_SIZES["FP8"][0]
_LARGEST_CODE = 127  # for Q8_0
_MOST_INVERSE = 2.0**127


class PackedRows(NamedTuple):
    """Rows of `depth` weights, in groups with one scale each."""

    #: uint8 [rows, depth]; with four bits [rows, depth / 2]: byte j of each HALF bytes has weight j of 2 * HALF, with
    #: weight j + HALF in the high bits.
    codes: torch.Tensor
    #: float16 [rows, depth / group]; with fine scales float32 [rows, depth / 256], multiplied by each group's fine
    #: scale. With float codes float32 [rows, depth / group].
    scales: torch.Tensor
    fine: torch.Tensor | None  # int8 [rows, depth / group]
    minima: torch.Tensor | None  # like scales, or float32; None = all are 0
    fine_minima: torch.Tensor | None
    depth: int
    zero: int | None  # None: codes are floats
    group: int  # weights

    @property
    def in_4_bits(self) -> bool:
        """Return whether a byte holds two codes."""
        return self.codes.shape[1] < self.depth

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a product reads."""
        return sum(field.nbytes for field in self if isinstance(field, torch.Tensor))

    def rows(self, first: int, last: int) -> "PackedRows":
        """Return the rows from `first` to before `last`, as views of the same tensors."""
        return self._replace(**{name: getattr(self, name)[first:last] for name in self._tensors})

    def joins(self, other: "PackedRows") -> bool:
        """Return whether both can follow each other in one PackedRows."""
        return self._kind == other._kind

    @property
    def _tensors(self) -> list[str]:
        return [name for name in self._fields if isinstance(getattr(self, name), torch.Tensor)]

    @property
    def _kind(self) -> tuple[object, ...]:
        shapes = (None if field is None else (field.shape[1], field.dtype) for field in self[:5])
        return *shapes, self.depth, self.zero, self.group


def join(parts: Sequence[PackedRows]) -> PackedRows:
    """Return the rows of all parts, one part after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    fields: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in first._tensors}
    return first._replace(**fields)


def pack_blocks(data: UInt8s, type_name: str, device: torch.device) -> PackedRows | None:
    """Return rows uint8 [rows, bytes] of a quantized type of kernels.dequantize, on the device.

    None: use the dense numbers, because PackedRows has no layout for this type, or because a scale is no float16.
    """
    if type_name not in _READERS:
        return None
    weights, num_bytes = BLOCK_SIZES[type_name]
    depth = data.shape[1] // num_bytes * weights
    step, parts = max(1, _CHUNK // depth), []
    for begin in range(0, len(data), step):
        blocks = torch.tensor(data[begin : begin + step], device=device).view(-1, data.shape[1] // num_bytes, num_bytes)
        if (part := _READERS[type_name](blocks, depth)) is None:
            return None
        parts.append(part)
    packed = join(parts)
    return _narrowed(packed) if type_name == "Q5_0" else packed


def _narrowed(packed: PackedRows) -> PackedRows:
    """Pack rows into four bits if no group has codes more than 15 apart, as in AWQ, whose groups have their own zeros.

    The value of a group's smallest code becomes its minimum, which float32 holds exactly. Other rows are unchanged.
    """
    if packed.depth % (2 * HALF):
        return packed
    codes = packed.codes.view(len(packed.codes), -1, packed.group)
    least = codes.amin(2)
    if int((codes.amax(2) - least).max()) > 15:
        return packed
    assert packed.zero is not None, "codes are integers"
    minima = (packed.zero - least.float()) * packed.scales.float()
    return packed._replace(codes=_in_bits(codes - least[:, :, None], packed.depth, 4), minima=minima, zero=0)


def quantize_rows(numbers: torch.Tensor) -> PackedRows | None:
    """Return numbers [rows, depth] of any floating type as Q8_0, with the bits of kernels/cpu/c/blocks/make_blocks.c.

    None: the depth is not a multiple of 32, or a scale would not be a finite float16.
    """
    rows, depth = numbers.shape
    if depth % BLOCK:
        return None
    step, parts = max(1, _CHUNK // depth), []
    for begin in range(0, rows, step):
        blocks = numbers[begin : begin + step].float().view(-1, depth // BLOCK, BLOCK)
        scales = blocks.abs().amax(2) / _LARGEST_CODE
        inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
        halves = scales.half()
        if not bool((halves.isfinite() & (inverse <= _MOST_INVERSE)).all()):
            return None
        scaled = blocks * inverse[:, :, None]
        sizes = scaled.abs().floor()
        sizes += scaled.abs() - sizes >= 0.5  # halves are rounded away from zero
        codes = (sizes.copysign(scaled) + 128).to(torch.uint8).view(-1, depth)
        parts.append(PackedRows(codes, halves, None, None, None, depth, 128, BLOCK))
    return join(parts)


def unpack(packed: PackedRows) -> torch.Tensor:
    """Return the weights float32 [rows, depth]."""
    codes = packed.codes
    if packed.in_4_bits:
        halves = codes.view(len(codes), -1, HALF)
        codes = torch.cat((halves & 15, halves >> 4), 2).flatten(1)
    floats = codes.view(torch.float8_e4m3fn).float() if packed.zero is None else codes.float() - packed.zero
    numbers = floats.view(len(codes), -1, packed.group)
    numbers *= _factors(packed.scales, packed.fine)
    if packed.minima is not None:
        numbers -= _factors(packed.minima, packed.fine_minima)
    return numbers.flatten(1)


def _factors(scales: torch.Tensor, fine: torch.Tensor | None) -> torch.Tensor:
    """Return float32 [rows, groups, 1]."""
    if fine is None:
        return scales.float()[:, :, None]
    return fine.float().view(*scales.shape, -1).mul(scales[:, :, None]).flatten(1)[:, :, None]


# --- blocks [rows, blocks, bytes] ------------------------------------------------------------------------------------


def _q8_0(blocks: torch.Tensor, depth: int) -> PackedRows:
    return _packed(blocks[:, :, 2:] ^ 128, depth, 128, 8, _halves(blocks, 0))


def _q4_0(blocks: torch.Tensor, depth: int) -> PackedRows:
    return _packed(_nibbles(blocks[:, :, 2:], 16), depth, 8, 4, _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor, depth: int) -> PackedRows:
    return _packed(_nibbles(blocks[:, :, 4:], 16), depth, 0, 4, _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: torch.Tensor, depth: int) -> PackedRows:
    return _packed(_five_bits(blocks[:, :, 2:]), depth, 16, 8, _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor, depth: int) -> PackedRows:
    return _packed(_five_bits(blocks[:, :, 4:]), depth, 0, 8, _halves(blocks, 0), -_halves(blocks, 2))


def _q4_k(blocks: torch.Tensor, depth: int) -> PackedRows:
    return _packed_k(_nibbles(blocks[:, :, 16:], 32), depth, 4, blocks)


def _q5_k(blocks: torch.Tensor, depth: int) -> PackedRows:
    fifth = (blocks[:, :, None, 16:48] >> _shifts(1, blocks)[:, None]) & 1
    return _packed_k(_nibbles(blocks[:, :, 48:], 32) | fifth.flatten(2) << 4, depth, 8, blocks)


def _q6_k(blocks: torch.Tensor, depth: int) -> PackedRows:
    rows = len(blocks)
    high = (blocks[:, :, 128:192].reshape(rows, -1, 2, 1, 32) >> _shifts(2, blocks)[:, None]) & 3
    codes = _nibbles(blocks[:, :, :128], 64) | high.flatten(2) << 4
    fine = blocks[:, :, 192:208].contiguous().view(torch.int8).view(rows, -1)
    return PackedRows(codes.view(rows, depth), _halves(blocks, 208).float(), fine, None, None, depth, 32, 16)


def _mxfp4(blocks: torch.Tensor, depth: int) -> PackedRows | None:
    """Return rows of codes of eight bits, with 16 as their zero. The scale of a block of zeros does not count."""
    levels = torch.tensor(LEVELS["MXFP4"], dtype=torch.int16, device=blocks.device)
    numbers = levels[_nibbles(blocks[:, :, 1:], 16).long()]
    exponents = torch.where(numbers.any(2), blocks[:, :, 0], 128).int()
    if int(exponents.min()) < 128 - 24 or int(exponents.max()) > 128 + 15:  # float16 has 2^-24 to 2^15
        return None
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 128).half()
    return _packed((numbers + 16).to(torch.uint8), depth, 16, 8, scales)


def _fp8(blocks: torch.Tensor, depth: int) -> PackedRows:
    """Return rows of codes that are floats, with a scale for each 64."""
    scales = blocks[:, :, :4].contiguous().view(torch.float32)[:, :, 0].contiguous()
    return PackedRows(blocks[:, :, 4:].reshape(len(blocks), depth), scales, None, None, None, depth, None, _WIDE_BLOCK)


def _packed(
    codes: torch.Tensor, depth: int, zero: int, bits: int, scales: torch.Tensor, minima: torch.Tensor | None = None
) -> PackedRows:
    return PackedRows(_in_bits(codes, depth, bits), scales, None, minima, None, depth, zero, BLOCK)


def _packed_k(codes: torch.Tensor, depth: int, bits: int, blocks: torch.Tensor) -> PackedRows:
    """Return the rows of codes with the scales and minima of Q4_K and Q5_K; see kernels.dequantize."""
    first, last = blocks[:, :, 4:12], blocks[:, :, 12:16]
    high = (first >> 2) & 0x30
    fine = torch.cat((first[:, :, :4] & 63, (last & 15) | high[:, :, :4]), 2)
    fine_minima = torch.cat((first[:, :, 4:] & 63, (last >> 4) | high[:, :, 4:]), 2)
    scales, minima = (_halves(blocks, place).float() for place in (0, 2))
    of_groups = (one.flatten(1).to(torch.int8) for one in (fine, fine_minima))
    fine, fine_minima = of_groups
    return PackedRows(_in_bits(codes, depth, bits), scales, fine, minima, fine_minima, depth, 0, BLOCK)


def _in_bits(codes: torch.Tensor, depth: int, bits: int) -> torch.Tensor:
    """Return codes [rows, blocks, weights] in PackedRows' layout."""
    codes = codes.reshape(len(codes), depth)
    if bits == 8 or depth % (2 * HALF):
        return codes
    halves = codes.view(len(codes), -1, 2, HALF)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _halves(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return float16 [rows, blocks]: the value at this byte of each block."""
    return blocks[:, :, offset : offset + 2].contiguous().view(torch.float16)[:, :, 0].contiguous()


def _shifts(width: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return uint8 [8 / width]: 0, width, 2 * width, ..."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=blocks.device)


def _nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """Return the half-bytes [rows, blocks, 2n] of [rows, blocks, n]: for each group of bytes, the low ones first."""
    groups = packed.reshape(*packed.shape[:2], -1, group)
    return torch.stack((groups & 15, groups >> 4), 3).flatten(2)


def _five_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return codes [rows, blocks, 32] from 4 bytes of fifth bits, lowest bit first, and 16 bytes of half-bytes."""
    fifth = ((packed[:, :, :4, None] >> _shifts(1, packed)) & 1).flatten(2)
    return _nibbles(packed[:, :, 4:], 16) | fifth << 4


_READERS: dict[str, Callable[[torch.Tensor, int], PackedRows | None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "FP8": _fp8,
}
