"""packed_bits: the bits that a weight of a packed matrix takes in memory on the CPU, from the headers of its files."""

from collections.abc import Mapping

from core.model_files.tensors.packed_layout import BLOCK_ROWS, Shape, bits_of
from ipc.tables.rounding import ceil_div
from kernels.cpu.quantized import bits_in_memory
from kernels.dequantize import BLOCK_SIZES

_DENSE = 16.0  # bfloat16
#: Codes of at most so many bits, without zeros -> the type of blocks that they become.
_TYPES_OF_BITS = ((4, "Q4_0"), (5, "Q5_0"), (8, "Q8_0"))


def packed_bits(tensors: Mapping[str, tuple[str, Shape]], shape: Shape) -> float | None:
    """Return the bits of a weight in memory, as stored; None: the contents decide whether it stays packed.

    tensors: kind -> (dtype, shape), without a fault (packed_layout.fault_of).
    """
    types = {kind: dtype for kind, (dtype, _) in tensors.items()}
    scale = next((kind for kind in ("weight_scale", "weight_scale_inv", "_weight_scale") if kind in types), "")
    if "exponents" in types or (types.get("weight_packed") == "U8" and types[scale] == "U8"):
        return bits_in_memory("MXFP4")
    if "F8_E4M3" in (types.get("weight"), types.get("_weight_qdata")):
        stays = types[scale] != "U8" and _has_wide_groups(tensors[scale][1], shape)
        return bits_in_memory("FP8") if stays else _DENSE
    if types.get("weight_packed") == "I32" and types[scale] == "F16" and len(tensors) == len((scale, "weight_packed")):
        bits = bits_of(tensors["weight_packed"][1][1], shape[1])
        has_blocks = shape[1] // tensors[scale][1][1] % BLOCK_SIZES["Q8_0"][0] == 0
        return bits_in_memory(next(name for most, name in _TYPES_OF_BITS if bits <= most)) if has_blocks else _DENSE
    size = BLOCK_SIZES["FP8"][0]
    if "weight_global_scale" in types:
        return _DENSE if shape[1] % size else bits_in_memory("NVFP4_F32")
    if "weight.quant_map" in types and shape[1] % size == 0 and "weight.absmax" in types:
        is_wide = tensors["weight.absmax"][1][0] <= ceil_div(shape[0] * shape[1], size)
        return bits_in_memory("NF4") if is_wide else _DENSE
    if "weight.quant_map" in types or "SCB" in types:
        return _DENSE
    return None


def _has_wide_groups(scale: Shape, shape: Shape) -> bool:
    """Return whether each block of FP8 has one scale. scale: the scales' shape."""
    size, (rows, columns) = BLOCK_SIZES["FP8"][0], shape
    if columns % size:
        return False
    if len(scale) < 2 or scale == (1, 1) or scale[0] == rows:
        return len(scale) < 2 or columns // scale[1] % size == 0
    block = next(block for block in BLOCK_ROWS if scale == (ceil_div(rows, block), ceil_div(columns, block)))
    return block % size == 0
