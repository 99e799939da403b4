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
                        F8_E4M3 [out, in], with weight_scale [out, groups] or [out / rows, in / columns] of blocks; or
                        with exponents of two plus 127 (MXFP8). Or weight_packed uint8 [out, in / 2] of two floats of
                        four bits, the low one first, with such exponents for 32 (MXFP4); or (NVFP4) with weight_scale
                        F8_E4M3 [out, in / 16], divided by weight_global_scale [1]
    mxfp4               blocks uint8 [out, in / 32, 16] of two codes, the low one first; exponents uint8 [out, in / 32]
                        (gpt-oss, under other names: core/model_files/tensors/stacked_experts.py)
    fp8                 weight F8_E4M3 [out, in]; weight_scale_inv [out / rows, in / columns], or weight_scale
                        (DeepSeek V3, Qwen3-FP8)
    bitsandbytes        weight int8 [out, in], SCB [out]: the largest number of a row, 127. Or weight uint8
                        [out * in / 2, 1] of two codes, the high one first; weight.quant_map [16]: their values;
                        weight.absmax: a scale for each block of blocksize; weight.quant_state.bitsandbytes__nf4: JSON.
                        If absmax is uint8, it is codes of weight.nested_quant_map [256] with weight.nested_absmax,
                        and nested_offset of the JSON is added
    torchao             _weight_qdata int8 or F8_E4M3 [out, in], _weight_scale as in compressed-tensors,
                        _weight_zero_point; or int8 [out, in / 2] of two codes with a sign, the low one first, with
                        _weight_scale and _weight_zero_point [groups, out]: weight = scale * code + zero
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from core.models.config import Packing
from ipc.tables.rounding import ceil_div

Shape = tuple[int, ...]
#: Kinds of tensors -> their dtypes in safetensors files. A kind is what follows the name of the matrix.
_Kinds = Mapping[str, tuple[str, ...]]
#: Kind -> the shapes that its tensor may have.
_Shapes = dict[str, tuple[Shape, ...]]


class _Form(NamedTuple):
    """The tensors that a matrix is stored as."""

    needed: _Kinds
    optional: _Kinds
    shapes: Callable[[Mapping[str, Shape], Shape], _Shapes]  # those that are there, and the matrix's -> expected ones


_FLOATS = ("F16", "BF16", "F32")
#: The scale that activations in FP8 are divided by, as compressed-tensors, Model Optimizer and vLLM name it, and
#: transformers.
INPUT_SCALES = ("input_scale", "activation_scale")
#: Kinds that do not change a weight: scales of activations and of the cache, and the shape, which the config also has.
UNUSED_KINDS = (
    *(*INPUT_SCALES, "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale"),
    *("weight_shape", "_weight_act_quant_scale", "_weight_act_quant_zero_point"),
)
BLOCK_ROWS = (32, 64, 128, 256)  # rows and columns of a block with one scale
#: bitsandbytes' kinds with JSON, by the type of codes.
QUANT_STATE = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # of bitsandbytes
_MOST_JSON_BYTES = 1 << 16
_WORD_BITS = 32


def kinds_of(types: Mapping[str, str], packing: Packing) -> tuple[str, ...]:
    """Return the kinds of tensors that a matrix is stored as; () if it is not packed.

    types: kind -> dtype of the tensors whose names begin with the matrix's; "weight" for one that is not packed.
    """
    form = _form_of(types, packing)
    return () if form is None else tuple(kind for kind in (*form.needed, *form.optional) if kind in types)


def all_kinds(packing: Packing) -> tuple[str, ...]:
    """Return all kinds of tensors that a packed matrix may be stored as."""
    return tuple(dict.fromkeys(kind for form in _FORMS[packing] for kind in (*form.needed, *form.optional)))


def fault_of(tensors: Mapping[str, tuple[str, Shape]], shape: Shape, packing: Packing) -> str:
    """Return what is wrong with the tensors of a matrix with this shape, or "".

    tensors: kind -> (dtype, shape).
    """
    form = _form_of({kind: dtype for kind, (dtype, _) in tensors.items()}, packing)
    assert form is not None, tensors
    dtypes = {**form.needed, **form.optional}
    for kind, (dtype, _) in tensors.items():
        if dtype not in dtypes[kind]:
            return f"{kind} has type {dtype}; {packing} has {' or '.join(dtypes[kind])}"
    expected = form.shapes({kind: shape for kind, (_, shape) in tensors.items()}, shape)
    for kind, (_, found) in tensors.items():
        if found not in expected[kind]:
            return (
                f"{kind} has shape {found}; a matrix {shape} of {packing} has {' or '.join(map(str, expected[kind]))}"
            )
    return ""


def _form_of(types: Mapping[str, str], packing: Packing) -> _Form | None:
    """Return the form whose tensors are all there; of several the one that most dtypes fit."""
    forms = [form for form in _FORMS[packing] if all(kind in types for kind in form.needed)]

    def fit(form: _Form) -> tuple[int, int]:
        fitting = sum(types[kind] in dtypes for kind, dtypes in form.needed.items())
        return fitting - len(form.needed), fitting

    return max(forms, key=fit, default=None)


# --- shapes -------------------------------------------------------------------------------------------------------


def _gptq_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    rows, columns = shape
    words = _words(rows, bits_of(found["qweight"][0], columns))
    return {
        "qweight": tuple((count, rows) for bits in range(2, 9) if (count := _words(columns, bits))),
        "scales": tuple((count, rows) for count in _group_counts(columns)),
        "qzeros": ((found["scales"][0], words),),
        "g_idx": ((columns,),),
    }


def _awq_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    rows, columns = shape
    words = ceil_div(rows, 8)
    scales = tuple((count, rows) for count in _group_counts(columns))
    return {"qweight": ((columns, words),), "scales": scales, "qzeros": ((found["scales"][0], words),)}


def _int_packed_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    rows, columns = shape
    scale, packed = found["weight_scale"], found["weight_packed"]
    words = _words(rows, bits_of(packed[1] if len(packed) == 2 else 0, columns))
    return {
        "weight_packed": tuple((rows, count) for bits in range(2, 9) if (count := _words(columns, bits))),
        "weight_scale": _by_group(shape),
        "weight_zero_point": ((words, scale[1] if len(scale) == 2 else 1),),
        "weight_g_idx": ((columns,),),
    }


def _scaled_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    scales = _scale_shapes(shape)
    zeros: tuple[Shape, ...] = ((shape[0], 1), (shape[0],), (1,))
    return {"weight": (shape,), "weight_scale": scales, "weight_scale_inv": scales, "weight_zero_point": zeros}


def _fp4_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    rows, columns = shape
    group = 16 if "weight_global_scale" in found else 32
    scales: tuple[Shape, ...] = ((rows, columns // group),) if columns % group == 0 else ()
    return {"weight_packed": ((rows, columns // 2),), "weight_scale": scales, "weight_global_scale": ((1,),)}


def _mxfp4_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    rows, columns = shape
    return {"blocks": ((rows, columns // 32, 16),), "exponents": ((rows, columns // 32),)}


def _llm_int8_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    return {"weight": (shape,), "SCB": (shape[:1],), "weight_format": ((1,),)}


def _four_bits_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    """Return the shapes of bitsandbytes' tensors. What the JSON says decides which of several."""
    num_bytes = ceil_div(shape[0] * shape[1], 2)
    counts = dict.fromkeys(ceil_div(shape[0] * shape[1], size) for size in _BLOCK_SIZES)
    nested = dict.fromkeys(ceil_div(count, size) for count in counts for size in _BLOCK_SIZES)
    return {
        "weight": tuple((num_bytes // size, 1) for size in (1, 2, 4) if num_bytes % size == 0),
        "weight.absmax": tuple((count,) for count in counts),
        "weight.quant_map": ((16,),),
        "weight.nested_absmax": tuple((count,) for count in nested),
        "weight.nested_quant_map": ((256,),),
        **{kind: ((min(found[kind][0], _MOST_JSON_BYTES),),) for kind in QUANT_STATE if kind in found},
    }


def _torchao_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    scales = _scale_shapes(shape)
    return {"_weight_qdata": (shape,), "_weight_scale": scales, "_weight_zero_point": (found["_weight_scale"],)}


def _torchao_int4_shapes(found: Mapping[str, Shape], shape: Shape) -> _Shapes:
    rows, columns = shape
    scales = tuple((count, rows) for count in _group_counts(columns))
    codes: tuple[Shape, ...] = ((rows, columns // 2),) if columns % 2 == 0 else ()
    return {"_weight_qdata": codes, "_weight_scale": scales, "_weight_zero_point": (found["_weight_scale"],)}


def _scale_shapes(shape: Shape) -> tuple[Shape, ...]:
    """Return the shapes that the scales of whole codes may have: one scale, rows of scales, or blocks."""
    rows, columns = shape
    blocks = tuple((ceil_div(rows, size), ceil_div(columns, size)) for size in BLOCK_ROWS)
    return ((), (1,), (1, 1), (rows,), *_by_group(shape), *blocks)


def _by_group(shape: Shape) -> tuple[Shape, ...]:
    return tuple((shape[0], count) for count in _group_counts(shape[1]))


def _group_counts(columns: int) -> tuple[int, ...]:
    """Return the numbers of equally long groups that columns can be split into."""
    return tuple(count for count in range(1, columns + 1) if columns % count == 0)


def _words(count: int, bits: int) -> int:
    """Return the number of words that hold `count` codes."""
    return ceil_div(count * bits, _WORD_BITS)


def bits_of(words: int, count: int) -> int:
    """Return the bits per code, from the number of words that hold `count` codes."""
    return words * _WORD_BITS // count


# --- forms --------------------------------------------------------------------------------------------------------


def _four_bits(quant_state: str) -> _Form:
    """Return bitsandbytes' form with that JSON. Its codes may be declared as any type (bnb_4bit_quant_storage)."""
    stored = {"weight": ("U8", *_FLOATS), "weight.absmax": ("F32", "U8"), "weight.quant_map": ("F32",)}
    nested = {"weight.nested_absmax": ("F32",), "weight.nested_quant_map": ("F32",)}
    return _Form({**stored, quant_state: ("U8",)}, nested, _four_bits_shapes)


_GPTQ = _Form({"qweight": ("I32",), "scales": _FLOATS, "qzeros": ("I32",)}, {"g_idx": ("I32",)}, _gptq_shapes)
_FP8 = _Form({"weight": ("F8_E4M3",), "weight_scale": _FLOATS}, {}, _scaled_shapes)
_NVFP4 = {"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",), "weight_global_scale": ("F32",)}
_ZEROS_OF_WORDS = {"weight_zero_point": ("I32",), "weight_g_idx": ("I32",)}
_TORCHAO_INT4 = {"_weight_qdata": ("I8",), "_weight_scale": _FLOATS, "_weight_zero_point": _FLOATS}
_TORCHAO_INT8 = {"_weight_qdata": ("I8",), "_weight_scale": _FLOATS}

#: Packing -> the forms that matrices may have. If several have the tensors of a matrix, dtypes decide.
_FORMS: dict[Packing, tuple[_Form, ...]] = {
    "none": (),
    "gptq": (_GPTQ,),
    "gptq_v2": (_GPTQ,),
    "awq": (_Form({"qweight": ("I32",), "scales": _FLOATS, "qzeros": ("I32",)}, {}, _awq_shapes),),
    "compressed-tensors": (
        _Form(_NVFP4, {}, _fp4_shapes),
        _Form({"weight_packed": ("U8",), "weight_scale": ("U8",)}, {}, _fp4_shapes),
        _Form({"weight_packed": ("I32",), "weight_scale": _FLOATS}, _ZEROS_OF_WORDS, _int_packed_shapes),
        _Form({"weight": ("F8_E4M3",), "weight_scale": ("U8",)}, {}, _scaled_shapes),
        _FP8,
        _Form({"weight": ("I8",), "weight_scale": _FLOATS}, {"weight_zero_point": ("I8",)}, _scaled_shapes),
    ),
    "mxfp4": (_Form({"blocks": ("U8",), "exponents": ("U8",)}, {}, _mxfp4_shapes),),
    "fp8": (_Form({"weight": ("F8_E4M3",), "weight_scale_inv": _FLOATS}, {}, _scaled_shapes), _FP8),
    "bitsandbytes": (
        _Form({"weight": ("I8",), "SCB": ("F32",)}, {"weight_format": ("U8",)}, _llm_int8_shapes),
        *map(_four_bits, QUANT_STATE),
    ),
    "torchao": (
        _Form(_TORCHAO_INT4, {}, _torchao_int4_shapes),
        _Form({"_weight_qdata": ("F8_E4M3",), "_weight_scale": _FLOATS}, {}, _torchao_shapes),
        _Form(_TORCHAO_INT8, {"_weight_zero_point": ("I8",)}, _torchao_shapes),
    ),
}
