"""The codes of packed matrices in quantized safetensors folders: reads them from the tensors that a matrix consists of.

core/model_files/tensors/packed_layout.py lists the tensors. Errors of all readers: ValueError for contents that the
tensors' types and shapes do not show, such as groups that do not exist.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.model_files.tensors.packed_layout import BLOCK_ROWS, QUANT_STATE, Shape, bits_of
from core.models.config import Packing
from ipc.tables.arrays import Floats, UInt8s
from ipc.tables.rounding import ceil_div, round_up
from kernels.dequantize import E4M3, FLOAT_LEVELS
from kernels.elements import to_floats

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each four bits of a word, starting at its low end
_WORD_BITS = 32
#: What bitsandbytes multiplies int8 codes by after their scale; a 127th of one.
_SCB_UNIT = np.float32(7.874015718698502e-3)


#: What codes of floats of four bits stand for.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Codes(NamedTuple):
    """A matrix as codes: weight [o, i] is scales[o, group_of[i]] * codes[o, i].

    Each product and sum is rounded to float32.
    """

    codes: NDArray[Any]  # integers [out, in]
    scales: Floats  # float32 [out, groups]
    group_of: NDArray[np.intp]  # [in]
    values: Floats | None = None  # float32: what each code stands for; None: for itself
    minima: Floats | None = None  # float32 [out, groups]: added to products
    unit: np.float32 | None = None  # multiplies products

    def numbers(self, rows: slice) -> Floats:
        """Return the weights of some rows in float32."""
        codes = self.codes[rows]
        numbers: Floats = codes.astype(np.float32) if self.values is None else self.values[codes]
        with np.errstate(over="ignore", invalid="ignore"):  # scales may be any numbers
            numbers *= self.scales[rows][:, self.group_of]
            if self.unit is not None:
                numbers *= self.unit
            if self.minima is not None:
                numbers += self.minima[rows][:, self.group_of]
        return numbers


def read_codes(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    """Return the codes of a matrix [out, in]. tensors: kind -> contents, already checked by fault_of()."""
    return _READERS[packing](tensors, shape, packing)


def _read_gptq(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    rows, columns = shape
    words = tensors["qweight"]
    bits = bits_of(len(words), columns)
    codes = _codes(words.T, bits, columns)
    zeros = _gptq_zeros(tensors["qzeros"], bits, rows, is_less_one=packing == "gptq").T
    groups = zeros.shape[1]
    group_of = _checked_groups(tensors["g_idx"], groups) if "g_idx" in tensors else _even_groups(columns, groups)
    return Codes(_less_zeros(codes, zeros, group_of), to_floats(tensors["scales"]).T, group_of)


def _gptq_zeros(words: NDArray[Any], bits: int, rows: int, *, is_less_one: bool) -> UInt8s:
    """Return the zeros uint8 [groups, rows].

    Zeros that are stored minus one were made by subtracting one from each code of a word at once, with borrows; the sum
    of words undoes that. For codes that cross words, for example of 3 bits, one is added to each.
    """
    if is_less_one and _WORD_BITS % bits == 0:
        ones = np.uint32(sum(1 << place for place in range(0, _WORD_BITS, bits)))
        words = words.view(np.uint32) + ones
    zeros = _codes(words, bits, rows)
    if is_less_one and _WORD_BITS % bits:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
    return zeros


def _read_awq(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    rows, columns = shape
    padded = round_up(rows, 8)
    codes, zeros = (_in_order(_codes(tensors[kind], 4, padded))[:, :rows].T for kind in ("qweight", "qzeros"))
    group_of = _even_groups(columns, zeros.shape[1])
    return Codes(_less_zeros(codes, zeros, group_of), to_floats(tensors["scales"]).T, group_of)


def _in_order(codes: UInt8s) -> UInt8s:
    """Return codes uint8 [n, columns], with the eight codes of each word in column order."""
    words = codes.reshape(len(codes), -1, 8)
    return words[:, :, np.argsort(_AWQ_ORDER)].reshape(len(codes), -1)


def _read_scaled(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    """Return the codes of compressed-tensors and of fp8."""
    rows, columns = shape
    if "weight_global_scale" in tensors:
        return _read_nvfp4(tensors)
    scales, group_of = _spread(
        _as_scales(tensors["weight_scale" if "weight_scale" in tensors else "weight_scale_inv"]), shape
    )
    if "weight_g_idx" in tensors:
        group_of = _checked_groups(tensors["weight_g_idx"], scales.shape[1])
    if "weight_packed" in tensors:
        bits = bits_of(tensors["weight_packed"].shape[1], columns)
        zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
        if "weight_zero_point" in tensors:
            zeros = _codes(tensors["weight_zero_point"].T, bits, rows).T
        return Codes(_less_zeros(_codes(tensors["weight_packed"], bits, columns), zeros, group_of), scales, group_of)
    if tensors["weight"].dtype == np.uint8:
        return Codes(tensors["weight"], scales, group_of, E4M3)
    codes = tensors["weight"].astype(np.int16)
    if "weight_zero_point" in tensors:
        codes -= tensors["weight_zero_point"].astype(np.int16).reshape(-1, 1)
    return Codes(codes, scales, group_of)


def _as_scales(stored: NDArray[Any]) -> Floats:
    """Return scales as float32. Bytes are exponents of two, plus 127."""
    return np.ldexp(np.float32(1), stored.astype(np.int32) - 127) if stored.dtype == np.uint8 else to_floats(stored)


def _read_nvfp4(tensors: Mapping[str, NDArray[Any]]) -> Codes:
    """Return codes of floats of four bits. A scale is one in E4M3, divided by one for the whole matrix."""
    packed, global_scale = tensors["weight_packed"], tensors["weight_global_scale"].reshape(())
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scales = E4M3[tensors["weight_scale"]] / global_scale
    codes = _codes(packed, 4, packed.shape[1] * 2)
    return Codes(codes, scales, _even_groups(codes.shape[1], scales.shape[1]), _E2M1)


def _read_bitsandbytes(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    """Return int8 codes with the largest number of each row, or codes of four bits with those of blocks.

    Blocks are of consecutive numbers of all rows, so they may begin anywhere in a row.
    """
    rows, columns = shape
    if "SCB" in tensors:
        if "weight_format" in tensors and tensors["weight_format"].any():
            raise ValueError(f"weight_format is {int(tensors['weight_format'].reshape(-1)[0])}; only 0, rows, is read")
        return Codes(tensors["weight"], tensors["SCB"].reshape(-1, 1), np.zeros(columns, np.intp), unit=_SCB_UNIT)
    kind = next(kind for kind in QUANT_STATE if kind in tensors)
    values = np.array(FLOAT_LEVELS["NF4" if kind.endswith("nf4") else "BNB_FP4"], np.float32)
    if not np.array_equal(tensors["weight.quant_map"], values):  # bitsandbytes does not read it
        raise ValueError(f"quant_map has other values than those of {kind.rpartition('_')[2]}")
    state = _quant_state(tensors[kind])
    size = _size_in(state, "blocksize", rows * columns, len(tensors["weight.absmax"]))
    if state.get("shape") != [rows, columns]:
        raise ValueError(f"quant_state has shape {state.get('shape')!r:.80}; expected {[rows, columns]}")
    largest = tensors["weight.absmax"]
    if largest.dtype == np.uint8:
        largest = _nested_scales(tensors, state)
    packed = np.ascontiguousarray(tensors["weight"]).view(np.uint8).reshape(-1)
    codes = np.stack((packed >> np.uint8(4), packed & np.uint8(15)), 1).reshape(shape)
    width = math.gcd(columns, size)  # columns of a row that are certainly in one block
    scales = largest[np.arange(0, rows * columns, width) // size].reshape(rows, -1)
    return Codes(codes, scales, _even_groups(columns, columns // width), values)


def _nested_scales(tensors: Mapping[str, NDArray[Any]], state: dict[str, Any]) -> Floats:
    """Return the scales of blocks, which are stored as codes with scales of their own, less an offset."""
    codes = tensors["weight.absmax"]
    if not all(f"weight.nested_{kind}" in tensors for kind in ("absmax", "quant_map")):
        raise ValueError("absmax has type U8, but nested_absmax and nested_quant_map are missing")
    size = _size_in(state, "nested_blocksize", len(codes), len(tensors["weight.nested_absmax"]))
    offset = state.get("nested_offset")
    if not isinstance(offset, float | int):
        raise ValueError(f"quant_state: nested_offset is {offset!r:.80}; a number is expected")
    scales = tensors["weight.nested_absmax"][np.arange(len(codes)) // size]
    nested: Floats = tensors["weight.nested_quant_map"][codes] * scales + np.float32(offset)
    return nested


def _quant_state(data: UInt8s) -> dict[str, Any]:
    try:
        state = json.loads(data.tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"quant_state is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise ValueError(f"quant_state: an object is expected, got {type(state).__name__}")
    return state


def _size_in(state: dict[str, Any], key: str, count: int, blocks: int) -> int:
    """Return the size of blocks that the quant_state says. `count` numbers must be in that many blocks."""
    size = state.get(key)
    if type(size) is not int or size < 1 or ceil_div(count, size) != blocks:
        raise ValueError(f"quant_state: {key} is {size!r:.80}, but {count} numbers have {blocks} scales")
    return size


def _read_torchao(tensors: Mapping[str, NDArray[Any]], shape: Shape, packing: Packing) -> Codes:
    """Return the codes of torchao's Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor or Int4Tensor.

    The zero of an Int4Tensor is what the code 0 stands for.
    """
    codes, stored = tensors["_weight_qdata"], to_floats(tensors["_weight_scale"])
    if codes.shape != shape:
        signed = _codes(codes, 4, shape[1]).astype(np.int8)
        signed = (signed ^ np.int8(8)) - np.int8(8)
        return Codes(signed, stored.T, _even_groups(shape[1], len(stored)), minima=_zeros_of(tensors).T)
    scales, group_of = _spread(stored, shape)
    if codes.dtype == np.uint8:
        return Codes(codes, scales, group_of, E4M3)
    zeros, _ = _spread(_zeros_of(tensors), shape) if "_weight_zero_point" in tensors else (np.zeros(scales.shape), None)
    return Codes(codes.astype(np.int16) - zeros.astype(np.int16)[:, group_of], scales, group_of)


def _zeros_of(tensors: Mapping[str, NDArray[Any]]) -> Floats:
    zeros = tensors["_weight_zero_point"]
    return zeros.astype(np.float32) if zeros.dtype == np.int8 else to_floats(zeros)


def _spread(scales: Floats, shape: Shape) -> tuple[Floats, NDArray[np.intp]]:
    """Return the scales as float32 [out, groups], and the group of each column.

    There may be one scale for all weights, one per row, [out, groups], or one for each block of some rows and columns.
    """
    rows, columns = shape
    if scales.ndim < 2 or scales.shape in ((1, 1), (rows, 1)):
        return np.broadcast_to(scales.reshape(-1, 1), (rows, 1)), np.zeros(columns, np.intp)
    if len(scales) == rows:
        return scales, _even_groups(columns, scales.shape[1])
    size = next(size for size in BLOCK_ROWS if scales.shape == (ceil_div(rows, size), ceil_div(columns, size)))
    return np.repeat(scales, size, axis=0)[:rows], np.arange(columns) // size


def _even_groups(columns: int, groups: int) -> NDArray[np.intp]:
    """Return the group of each column for groups of equal length."""
    return np.arange(columns) // (columns // groups)


def _checked_groups(group_of: NDArray[Any], groups: int) -> NDArray[np.intp]:
    """Return g_idx as indices. Errors: ValueError for an index that is not a group."""
    if group_of.size and not (group_of.min() >= 0 and group_of.max() < groups):
        raise ValueError(f"g_idx has groups from {group_of.min()} to {group_of.max()}; there are {groups}")
    return group_of.astype(np.intp)


def _codes(words: NDArray[Any], bits: int, count: int) -> UInt8s:
    """Return the codes uint8 [n, count] in int32 words [n, words], packed without gaps from their low ends."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[:, :count]
    if 8 % bits:
        places = np.unpackbits(octets, axis=1, bitorder="little")[:, : count * bits].reshape(len(octets), count, bits)
        return np.packbits(places, axis=2, bitorder="little")[:, :, 0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((octets[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(octets), -1)[:, :count]


def _less_zeros(codes: UInt8s, zeros: UInt8s, group_of: NDArray[np.intp]) -> NDArray[np.int16]:
    """Return int16 [out, in]: the codes minus their groups' zeros uint8 [out, groups]."""
    return codes.astype(np.int16) - zeros.astype(np.int16)[:, group_of]


_READERS: dict[Packing, Callable[[Mapping[str, NDArray[Any]], Shape, Packing], Codes]] = {
    "gptq": _read_gptq,
    "gptq_v2": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_scaled,
    "fp8": _read_scaled,
    "bitsandbytes": _read_bitsandbytes,
    "torchao": _read_torchao,
}
