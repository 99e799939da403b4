"""The tensors of packed matrices: which ones a quantized folder has for a matrix, and their shapes.

A weight is scale * (code - zero). Codes of fewer than 8 bits are packed into int32 words without gaps, from their low
ends. The tensors of a matrix [out, in] with codes of b bits:

    gptq, gptq_v2       qweight int32 [in * b / 32, out], packed along in; scales [groups, out]; qzeros int32
                        [groups, out * b / 32], in gptq less one; g_idx int32 [in]: the group of each column
                        (AutoGPTQ, GPTQModel)
    awq                 qweight int32 [in, out / 8] of 4 bits, eight columns in the order 0, 2, 4, 6, 1,
                        3, 5, 7; qzeros [groups, out / 8] likewise; scales [groups, out] (AutoAWQ, version GEMM)
    compressed-tensors  weight_packed int32 [out, in * b / 32], codes plus 2^(b-1); weight_scale [out, groups];
                        weight_zero_point int32 [out * b / 32, groups], if any; weight_g_idx. Or weight int8 or
                        F8_E4M3 [out, in], with weight_scale [out, groups] or [out / rows, in / columns] of blocks
    mxfp4               blocks uint8 [out, in / 32, 16] of two codes, the low one first; exponents uint8 [out, in / 32]
                        (gpt-oss, under other names: core/model_files/tensors/stacked_experts.py)
    fp8                 weight F8_E4M3 [out, in]; weight_scale_inv [out / rows, in / columns], or weight_scale
                        (DeepSeek V3, Qwen3-FP8)
"""

from collections.abc import Mapping
from typing import Any

from core.models.config import Packing
from ipc.tables.rounding import ceil_div

Shape = tuple[int, ...]

#: Kind of tensor -> its dtypes in safetensors files. The kind is the last part of a tensor's name.
_DTYPES = {
    "qweight": ("I32",),
    "qzeros": ("I32",),
    "g_idx": ("I32",),
    "scales": ("F16", "BF16", "F32"),
    "weight_packed": ("I32",),
    "weight_g_idx": ("I32",),
    "weight_scale": ("F16", "BF16", "F32"),
    "weight_scale_inv": ("F16", "BF16", "F32"),
    "weight_zero_point": ("I32", "I8"),
    "weight": ("I8", "F8_E4M3"),
    "blocks": ("U8",),
    "exponents": ("U8",),
}
#: The kinds of tensors that a matrix is stored as, by packing. Those after "" are optional.
_KINDS: dict[Packing, tuple[tuple[str, ...], ...]] = {
    "none": (),
    "gptq": (("qweight", "scales", "qzeros", "", "g_idx"),),
    "gptq_v2": (("qweight", "scales", "qzeros", "", "g_idx"),),
    "awq": (("qweight", "scales", "qzeros"),),
    "compressed-tensors": (
        ("weight_packed", "weight_scale", "", "weight_zero_point", "weight_g_idx"),
        ("weight", "weight_scale", "", "weight_zero_point"),
    ),
    "mxfp4": (("blocks", "exponents"),),
    "fp8": (("weight", "weight_scale_inv"), ("weight", "weight_scale")),
}
#: Kinds that do not change a weight: scales of activations and of the cache, and the shape, which the config also has.
UNUSED_KINDS = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale", "weight_shape")
BLOCK_ROWS = (32, 64, 128, 256)  # rows and columns of a block with one scale
_WORD_BITS = 32


def kinds_of(names: Mapping[str, Any], stem: str, packing: Packing) -> tuple[str, ...]:
    """Return the kinds of tensors among `names` that the matrix `stem` is stored as; () if it is not packed."""
    for wanted in _KINDS[packing]:
        needed = wanted[: wanted.index("")] if "" in wanted else wanted
        if all(f"{stem}.{kind}" in names for kind in needed):
            return tuple(kind for kind in wanted if kind and f"{stem}.{kind}" in names)
    return ()


def fault_of(tensors: Mapping[str, tuple[str, Shape]], shape: Shape, packing: Packing) -> str:
    """Return what is wrong with the tensors of a matrix with this shape, or "".

    tensors: kind -> (dtype, shape).
    """
    for kind, (dtype, found) in tensors.items():
        if dtype not in _DTYPES[kind]:
            return f"{kind} has type {dtype}; {packing} has {' or '.join(_DTYPES[kind])}"
        expected = _expected(kind, {name: shape for name, (_, shape) in tensors.items()}, shape, packing)
        if found not in expected:
            return f"{kind} has shape {found}; a matrix {shape} of {packing} has {' or '.join(map(str, expected))}"
    return ""


def _expected(kind: str, found: Mapping[str, Shape], shape: Shape, packing: Packing) -> tuple[Shape, ...]:
    """Return the shapes that a tensor of this kind may have."""
    rows, columns = shape
    groups = _num_groups(found)
    match kind:
        case "weight":
            return (shape,)
        case "blocks":
            return ((rows, columns // 32, 16),)
        case "exponents":
            return ((rows, columns // 32),)
        case "g_idx" | "weight_g_idx":
            return ((columns,),)
        case "qweight" if packing == "awq":
            return ((columns, ceil_div(rows, 8)),)
        case "qweight":
            return tuple((words, rows) for bits in range(2, 9) if (words := _words(columns, bits)))
        case "weight_packed":
            return tuple((rows, words) for bits in range(2, 9) if (words := _words(columns, bits)))
        case "qzeros":
            words = ceil_div(rows, 8) if packing == "awq" else _words(rows, bits_of(found["qweight"][0], columns))
            return ((groups, words),)
        case "scales":
            return tuple((count, rows) for count in _group_counts(columns))
        case "weight_zero_point" if "weight_packed" in found:
            return ((_words(rows, bits_of(found["weight_packed"][1], columns)), groups),)
        case "weight_zero_point":
            return ((rows, 1), (rows,), (1,))
        case _:
            return _scale_shapes(found, shape)


def _scale_shapes(found: Mapping[str, Shape], shape: Shape) -> tuple[Shape, ...]:
    """Return the shapes that a matrix's weight_scale may have: one scale, rows of scales, or blocks."""
    rows, columns = shape
    by_group = tuple((rows, count) for count in _group_counts(columns))
    if "weight_packed" in found:
        return by_group
    blocks = tuple((ceil_div(rows, size), ceil_div(columns, size)) for size in BLOCK_ROWS)
    return ((), (1,), (1, 1), (rows,), *by_group, *blocks)


def _group_counts(columns: int) -> tuple[int, ...]:
    """Return the numbers of equally long groups that columns can be split into."""
    return tuple(count for count in range(1, columns + 1) if columns % count == 0)


def _num_groups(found: Mapping[str, Shape]) -> int:
    if "scales" in found:
        return found["scales"][0] if found["scales"] else 1
    scale = found.get("weight_scale", ())
    return scale[1] if len(scale) == 2 else 1


def _words(count: int, bits: int) -> int:
    """Return the number of words that hold `count` codes."""
    return ceil_div(count * bits, _WORD_BITS)


def bits_of(words: int, count: int) -> int:
    """Return the bits per code, from the number of words that hold `count` codes."""
    return words * _WORD_BITS // count
