"""The C kernels' structs as ctypes classes, and check_structs(), which compares them with the loaded library.

Each class mirrors one struct of kernels/cpu/*.h, field by field; kernels/cpu/struct_fields.c exports the C side.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from kernels.cpu.build import CpuLibraryError

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(names: str, ctype: type) -> Iterator[tuple[str, type]]:
    """Return fields of one type, named by these words, in their order."""
    return ((name, ctype) for name in names.split())


class CStruct(ctypes.Structure):
    """A struct that Python fills for the C kernels."""

    c_name: ClassVar[str]  # its name in kernels/cpu/*.h


class CacheShape(CStruct):
    """Shape and dtype of the KV cache (cache_shape.h)."""

    c_name = "CacheShape"
    _fields_ = (*_fields("num_kv_heads head_dim block_size dtype", _INT32),)


class BlockTables(CStruct):
    """Block tables [requests, width] and their block size (shared_tiles.h)."""

    c_name = "BlockTables"
    _fields_ = (("blocks", _POINTER), *_fields("width block_size", _INT32))


class AttentionItem(CStruct):
    """Work of one thread: some rows of one KV head against a part of their context (attention.h)."""

    c_name = "AttentionItem"
    _fields_ = (*_fields("request kv_head token num_tokens position begin end partial members", _INT32),)


class AttentionMember(CStruct):
    """A token of an item that several requests share (attention.h)."""

    c_name = "AttentionMember"
    _fields_ = (*_fields("token partial", _INT32),)


class AttentionMerge(CStruct):
    """Partial results that belong to the same rows (attention.h)."""

    c_name = "AttentionMerge"
    _fields_ = (*_fields("kv_head token num_tokens partial num_partials", _INT32),)


class TileUser(CStruct):
    """A request with one token that sees a whole tile (shared_tiles.h)."""

    c_name = "TileUser"
    _fields_ = (*_fields("request token begin last_block partial head_stride first next count", _INT32),)


class AttentionArguments(CStruct):
    """Arguments of attention() (attention.h)."""

    c_name = "Attention"
    _fields_ = (
        *_fields("q layer out block_tables items members merges partials scratch", _POINTER),
        ("shape", CacheShape),
        *_fields("num_heads table_width num_items num_merges max_item_tokens window ahead", _INT32),
        ("scale", _FLOAT),
    )


class PlanArguments(CStruct):
    """Arguments and results of attention_plan() (attention_plan.h)."""

    c_name = "AttentionPlan"
    _anonymous_ = ("tables",)
    _fields_ = (
        *_fields("num_tokens context_lens items merges members tile_users places", _POINTER),
        *_fields("wanted_items wanted_merges", _POINTER),
        ("tables", BlockTables),
        *_fields("num_requests max_items", _INT64),
        *_fields("num_kv_heads group window ahead max_item_tokens max_split_rows max_members", _INT32),
        *_fields("num_items num_merges num_members num_partials num_tile_users num_rows longest", _INT64),
        *_fields("num_wanted_items num_wanted_merges", _INT64),
    )
    num_rows: int
    longest: int
    num_partials: int
    max_item_tokens: int


class GemmArguments(CStruct):
    """Arguments of gemm() (gemm.h)."""

    c_name = "Gemm"
    _fields_ = (
        *_fields("x weights bias y", _POINTER),
        *_fields("num_rows num_columns depth x_stride y_stride", _INT64),
        *_fields("dtype y_dtype gate streams packing activation", _INT32),
        *_fields("next quantized", _POINTER),
        ("quantized_stride", _INT64),
    )


class PackArguments(CStruct):
    """Arguments of gemm_pack() and of the functions of compact.h (gemm.h)."""

    c_name = "GemmPack"
    _fields_ = (
        *_fields("source packed", _POINTER),
        *_fields("num_columns depth source_stride", _INT64),
        *_fields("source_dtype dtype is_gated reserved", _INT32),
        ("plan", _POINTER),
    )


class QuantizedPartArguments(CStruct):
    """Rows of a matrix that are stored alike (quantized.h)."""

    c_name = "QuantizedPart"
    _fields_ = (("rows", _POINTER), *_fields("num_rows row_bytes", _INT64), *_fields("type reserved", _INT32))


class QuantizeArguments(CStruct):
    """Arguments of gemm_quantize() (quantized.h)."""

    c_name = "Quantize"
    _fields_ = (
        *_fields("parts packed must_be_whole", _POINTER),
        *_fields("num_parts num_columns depth", _INT64),
        *_fields("is_gated reserved", _INT32),
    )


class NormWeights(CStruct):
    """The constants of one normalisation (norm.h)."""

    c_name = "NormWeights"
    _fields_ = (*_fields("weight bias", _POINTER), *_fields("is_centred replaces", _INT32))


class LayerArguments(CStruct):
    """One layer's weights and constants (decoder.h)."""

    c_name = "DecoderLayer"
    _fields_ = (
        *_fields("qkv o gate_up down", GemmArguments),
        *_fields("input_norm mlp_norm attention_out_norm mlp_out_norm", NormWeights),
        ("head_norms", _POINTER),
        ("scale", _FLOAT),
        ("kind", _INT32),
    )


class BlockArguments(CStruct):
    """Arguments of make_blocks() (make_blocks.h)."""

    c_name = "MakeBlocks"
    _fields_ = (*_fields("numbers blocks", _POINTER), ("num_blocks", _INT64), *_fields("dtype reserved", _INT32))


class DecoderArguments(CStruct):
    """A model's weights and constants (decoder.h)."""

    c_name = "Decoder"
    _fields_ = (
        ("layers", _POINTER),
        ("head", GemmArguments),
        ("embeddings", _POINTER),
        ("norm", NormWeights),
        ("hidden_size", _INT64),
        *_fields("num_layers num_heads dtype", _INT32),
        *_fields("eps embedding_scale", _FLOAT),
        ("embeddings_packing", _INT32),
        *_fields("kinds places", _POINTER),
        ("num_words", _INT64),
    )


class KindArguments(CStruct):
    """A step's rotary tables, plan and attention memory for one kind of layer (decoder.h)."""

    c_name = "DecoderKind"
    _fields_ = (*_fields("cos sin plan", _POINTER), ("attention", AttentionArguments))


class StepArguments(CStruct):
    """Arguments of decoder_step() and decoder_logits() (decoder.h)."""

    c_name = "DecoderStep"
    _fields_ = (
        *_fields("decoder kinds cache token_ids positions slots logits_rows", _POINTER),
        *_fields("hidden x qkv q attended gated added normed last_hidden logits largest quantized", _POINTER),
        *_fields("quantized_stride num_tokens num_logits is_narrow", _INT64),
    )


class DequantizeArguments(CStruct):
    """Arguments of dequantize() (dequantize.h)."""

    c_name = "Dequantize"
    _fields_ = (*_fields("blocks out", _POINTER), ("num_blocks", _INT64), *_fields("type dtype", _INT32))


class EmbeddingArguments(CStruct):
    """Arguments of embedding() (embedding.h)."""

    c_name = "Embedding"
    _fields_ = (
        *_fields("ids table out", _POINTER),
        *_fields("num_rows width", _INT64),
        ("dtype", _INT32),
        ("scale", _FLOAT),
        ("packing", _INT32),
        *_fields("kinds places positions", _POINTER),
        ("num_words", _INT64),
    )


class NormArguments(CStruct):
    """Arguments of norm() (norm.h)."""

    c_name = "Norm"
    _fields_ = (
        *_fields("hidden x", _POINTER),
        ("norm", NormWeights),
        ("out", _POINTER),
        *_fields("num_rows width", _INT64),
        *_fields("x_dtype out_dtype", _INT32),
        ("eps", _FLOAT),
    )


class RopeArguments(CStruct):
    """Arguments of rope_kv_write() (rope.h)."""

    c_name = "RopeKvWrite"
    _fields_ = (
        *_fields("qkv cos sin positions head_norms slots q layer", _POINTER),
        ("shape", CacheShape),
        *_fields("num_heads num_tokens", _INT32),
        ("eps", _FLOAT),
    )


class SamplingArguments(CStruct):
    """Arguments of sample() (sampling.h)."""

    c_name = "Sampling"
    _fields_ = (
        *_fields("logits temperature top_k top_p min_p seed position choice largest tokens scratch", _POINTER),
        *_fields("num_rows vocab_size", _INT64),
    )


#: Every struct of this file.
STRUCTS: tuple[type[CStruct], ...] = tuple(CStruct.__subclasses__())


class _ExportedField(ctypes.Structure):
    """One exported field: struct StructField of struct_fields.c."""

    _fields_ = (
        *_fields("type field", ctypes.c_char_p),
        *_fields("offset size kind", _INT32),
    )


class _Place(NamedTuple):
    offset: int  # bytes
    size: int  # bytes
    kind: int  # a character code: see struct_fields.c

    def __str__(self) -> str:
        return f"{_KINDS.get(self.kind, 'pointer or struct')} of {self.size} bytes at {self.offset}"


_KINDS = {ord("i"): "integer", ord("f"): "float"}
_KIND_OF = {_INT32: ord("i"), _INT64: ord("i"), _FLOAT: ord("f")}
_OTHER = ord("o")


def check_structs(library: ctypes.CDLL, structs: Sequence[type[CStruct]] = STRUCTS) -> None:
    """Compare each field of these structs with the library's: name, offset, size and kind (integer, float or other).

    Errors: CpuLibraryError that names the struct and the field."""
    exported = _exported_structs(library)
    for struct in structs:
        ours, theirs = _places(struct), exported.pop(struct.c_name, {})
        if ours == theirs:
            continue
        for name in sorted({**ours, **theirs}, key=lambda name: name == ""):  # fields first, then the struct as a whole
            if (here := ours.get(name)) != (there := theirs.get(name)):
                what = f"field {name}" if name else "as a whole"
                raise CpuLibraryError(
                    f"struct {struct.c_name}, {what}: {here or 'missing'} in class {struct.__name__} of "
                    f"kernels/cpu/structs.py, {there or 'missing'} in kernels/cpu/struct_fields.c"
                )
    if exported and structs is STRUCTS:
        raise CpuLibraryError(
            f"struct {min(exported)} of kernels/cpu/struct_fields.c is missing in kernels/cpu/structs.py"
        )


def _places(struct: type[CStruct]) -> dict[str, _Place]:
    """Return the fields' places by name; "" is the struct as a whole."""
    places = {"": _Place(0, ctypes.sizeof(struct), _OTHER)}
    for name, ctype, *_ in struct._fields_:
        field = getattr(struct, name)
        places[name] = _Place(field.offset, field.size, _KIND_OF.get(ctype, _OTHER))
    return places


def _exported_structs(library: ctypes.CDLL) -> dict[str, dict[str, _Place]]:
    """Return the library's fields by C name and field name."""
    number = _INT32.in_dll(library, "num_struct_fields").value
    structs: dict[str, dict[str, _Place]] = {}
    for one in (_ExportedField * number).in_dll(library, "struct_fields"):
        places = structs.setdefault(one.type.decode(), {})
        places[one.field.decode()] = _Place(one.offset, one.size, one.kind)
    return structs
