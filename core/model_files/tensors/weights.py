"""A model's weights: from its files to tensors with Hugging Face names.

The headers are checked completely before the first tensor is created. Then the files are mapped and tensors are created
one at a time, so that there is never a second copy of a whole file.
"""

import hashlib
import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.model_files.settings.text_part import without_images
from core.model_files.tensors.encoder_weights import with_our_names
from core.model_files.tensors.kv_scales import read_scale
from core.model_files.tensors.latent_tensors import latent_orders
from core.model_files.tensors.packed_layout import INPUT_SCALES, UNUSED_KINDS, all_kinds, fault_of, kinds_of
from core.model_files.tensors.packed_matrix import ELEMENT_DTYPES, unpack
from core.model_files.tensors.recurrent_tensors import input_order, like_others
from core.model_files.tensors.stacked_experts import by_expert, by_halves, unstacked, unturned, with_turned_products
from core.model_files.tensors.stored_tensor import PackedTensor, StoredTensor
from core.model_files.tensors.tensor_names import (
    gates_last,
    gguf_name,
    head_order,
    is_of_further_layer,
    is_of_shared_layer,
    json_name,
    parts_in_turn,
)
from core.model_files.tensors.torchao_types import refuse_other_types
from core.model_files.tensors.weight_shapes import expected_shapes
from core.models.architectures.by_name import ARCHITECTURES
from core.models.architectures.vision_architectures import text_name
from core.models.config import XIELU_NAMES, ModelConfig, Packing
from core.models.layers.rope_scaling import LongropeScaling
from core.models.operations.stored_matrix import StoredMatrix, StoredPart, Weight
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import read_gguf_tensors
from ipc.files.mapped_file import map_file
from ipc.files.safetensors import read_safetensors, read_safetensors_folder
from ipc.tables.arrays import Ints, UInt8s
from ipc.tables.rounding import round_up
from kernels.cpu.library import CpuLibrary
from kernels.dequantize import FILE_TYPES
from kernels.elements import FLOAT32, Dtype, Numbers, rounded, to_floats

#: safetensors dtype -> type name in kernels.dequantize, which converts both formats.
_SAFETENSORS_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_INTEGER_TYPES = {"I64": "<i8", "I32": "<i4"}

#: Ends of names of vectors without .weight: of attention sinks, of Gemma's scales, in GGUF files too, and of
#: Falcon-H1's norms there.
_VECTORS: tuple[str, ...] = (".sinks", ".layer_scalar", ".router.scale", ".per_expert_scale", ".correct_output_scale")
_VECTORS += (".ffn_gate_inp.scale", ".ffn_down_exps.scale", ".ffn_norm")
_VECTORS += tuple(f".act_fn.{name}" for name in XIELU_NAMES)

#: Tables of rotary embedding in files; the config contains their information already.
_HARMLESS = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight"
    r"|transformer\.h\.\d+\.attn\.(masked_)?bias"  # causal masks in old files
)


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: Dtype,
    library: CpuLibrary | None = None,
    reads: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) for every name in expected_shapes that `reads` accepts, in that order.

    path: a folder, a .gguf file, or another file, in safetensors' format.

    Matrices in a GGUF file are returned as stored; other matrices are in dtype, and packed ones in a quantized folder
    are blocks or in dtype. Vectors are in float32, the dtype in which norms and biases are computed. All checks are
    finished when this function returns.

    A weight that needs no conversion is a view of a private mapping of its file. Reading it reads the file, and the
    mapping exists as long as the weight. A file's pages are released as its weights are taken or converted, so anything
    the caller writes into a view is lost when the next weight is taken. library: the C kernels for dequantizing; None =
    NumPy is used.

    Errors: ModelFileError naming file and tensor for a missing, unexpected or misshapen tensor; UnsupportedModelError
    for a type that cannot be converted.
    """
    plan = plan_weights(path, config)
    return _convert({name: stored for name, stored in plan.items() if reads(name)}, dtype, library)


def plan_weights(path: Path, config: ModelConfig) -> Mapping[str, StoredTensor | PackedTensor]:
    """Return where each weight is in a model's files, from their headers. Errors: those of load_weights()."""
    return _plan_gguf(path, config) if path.suffix == ".gguf" else _plan_folder(path, config)


def load_tensors(
    folder: Path,
    files: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    unused: re.Pattern[str] | None,
    dtype: Dtype,
) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) for every name in shapes, like load_weights() for a whole model.

    folder: or a GGUF file. files: the names in the files. unused: matches further tensors that they may have. Errors:
    those of load_weights(). A tensor of more than two dimensions becomes a matrix [first, others].
    """
    found = _gguf_tensors(folder) if folder.suffix == ".gguf" else _folder_tensors(folder)
    plan = {name: _as_matrix(_take(found, files[name], shape, folder)) for name, shape in shapes.items()}
    for name, stored in found.items():
        if unused is None or not unused.fullmatch(name):
            raise UnsupportedModelError(f"{stored.path}: unexpected tensor {name!r:.80} of shape {stored.shape}")
    return _convert(plan, dtype, None)


def load_further_layer(
    folder: Path,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    our_name: Callable[[str], str],
    dtype: Dtype,
) -> Iterator[tuple[str, Weight]] | None:
    """Return an iterator over (name, weight) for every name in shapes, like load_weights(); None without such tensors.

    folder: or a GGUF file. config: of a model of one layer like this one. our_name: returns the name that a tensor
    would have in this model's folder or file, and "" for those that do not belong to the layer. Errors: those of
    load_weights().
    """
    is_gguf = folder.suffix == ".gguf"
    tensors = _gguf_tensors(folder) if is_gguf else _folder_tensors(folder)
    found = {ours: stored for name, stored in tensors.items() if (ours := our_name(name))}
    if not found:
        return None
    plan, rest = (_plan_gguf_tensors if is_gguf else _plan_tensors)(found, config, shapes, folder)
    for name, stored in rest.items():
        if not _HARMLESS.fullmatch(name) and not (config.packing != "none" and name.endswith(UNUSED_KINDS)):
            raise UnsupportedModelError(
                f"{stored.path}: unexpected tensor {stored.source_name!r:.80} of shape {stored.shape}"
            )
    return _convert(plan, dtype, None)


def _as_matrix(stored: StoredTensor) -> StoredTensor:
    shape = stored.shape
    return msgspec.structs.replace(stored, shape=(shape[0], math.prod(shape[1:]))) if len(shape) > 2 else stored


def read_integers(folder: Path, name: str) -> Ints | None:
    """Return a tensor of integers as int64 with its shape, or None if there is none of that name.

    Errors: ModelFileError, UnsupportedModelError for other types.
    """
    stored = _folder_tensors(folder).get(name)
    if stored is None:
        return None
    if stored.type not in _INTEGER_TYPES:
        types = ", ".join(_INTEGER_TYPES)
        raise UnsupportedModelError(f"{stored.path}: tensor {name} has type {stored.type}; supported are {types}")
    with map_file(stored.path) as file:
        return np.frombuffer(file[stored.begin : stored.end], _INTEGER_TYPES[stored.type]).astype(np.int64)


def _plan_gguf(path: Path, config: ModelConfig) -> Mapping[str, StoredTensor | PackedTensor]:
    plan, rest = _plan_gguf_tensors(_gguf_tensors(path), config, expected_shapes(config), path)
    _check_rest(rest, config)
    return plan


def _plan_gguf_tensors(
    tensors: Mapping[str, StoredTensor], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: Path
) -> tuple[Mapping[str, StoredTensor | PackedTensor], dict[str, StoredTensor]]:
    """Return the weights with these shapes from a GGUF file's tensors, in the kernels' order, and the other tensors."""
    found = unstacked(by_halves(like_others(tensors, config)), by_head=config.qk_norm_by_head)
    plan: dict[str, StoredTensor | PackedTensor] = {}
    first: dict[str, str] = {}
    for name, shape in shapes.items():
        theirs = gguf_name(name, config)
        plan[name] = plan.get(first.setdefault(theirs, name)) or _take(found, theirs, shape, path)
    if config.encoder is not None:
        return plan, found
    row = ARCHITECTURES[config.architecture]
    return _in_our_order(plan, config, row.interleaves_heads or row.gguf_interleaves_heads), found


def _gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    tensors = read_gguf_tensors(path).items()
    return {ended_name(n): StoredTensor(path, n, t.type, t.shape, t.offset, t.offset + t.num_bytes) for n, t in tensors}


def _folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    return {
        ended_name(name): StoredTensor(
            path, name, _SAFETENSORS_TYPES.get(t.dtype, t.dtype), t.shape or (1,), t.begin, t.end
        )
        for path, tensors in (
            read_safetensors_folder(folder) if folder.is_dir() else {folder: read_safetensors(folder)}
        ).items()
        for name, t in tensors.items()
    }


def ended_name(name: str) -> str:
    """Return the name with .bias or .weight at the end where a file has neither."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("expert_bias", "expert.bias")
    return f"{name}.weight" if name.endswith(_VECTORS) else name


def _plan_folder(folder: Path, config: ModelConfig) -> Mapping[str, StoredTensor | PackedTensor]:
    if config.packing == "torchao":
        refuse_other_types(folder)
    found = without_images(_folder_tensors(folder), config.architecture)
    if config.encoder is not None:
        found = with_our_names(found, config)
    elif config.vision is not None:
        found = {ours: stored for name, stored in found.items() if (ours := text_name(name)) is not None}
    elif not _has_embedding(found, config):  # saved from a model without a head
        stem = f"{json_name('model.embed_tokens.weight', config).split('.')[0]}."
        found = {name if name.startswith(("lm_head.", "score.")) else stem + name: t for name, t in found.items()}
    plan, rest = _plan_tensors(found, config, expected_shapes(config), folder)
    _check_rest(rest, config)
    return _with_factors(plan, config)


def _with_factors(
    plan: Mapping[str, StoredTensor | PackedTensor], config: ModelConfig
) -> Mapping[str, StoredTensor | PackedTensor]:
    """Return the plan with the factors of products, which llama.cpp's converter has applied in GGUF files."""
    changed = dict(plan)
    for part, runs in config.factors:
        for name, stored in plan.items():
            if name.endswith(f".{part}.weight"):
                changed[name] = msgspec.structs.replace(stored, factors=runs)
    return changed


def _has_embedding(found: Mapping[str, StoredTensor], config: ModelConfig) -> bool:
    stem = json_name("model.embed_tokens.weight", config).removesuffix("weight")
    return any(f"{stem}{kind}" in found for kind in ("weight", *all_kinds(config.packing)))


def _plan_tensors(
    found: Mapping[str, StoredTensor], config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> tuple[Mapping[str, StoredTensor | PackedTensor], dict[str, StoredTensor]]:
    """Return the weights with these shapes from a folder's tensors, in the kernels' order, and the other tensors."""
    found = like_others(found, config)
    turns = config.encoder is None and (experts := ARCHITECTURES[config.architecture].experts) and experts.is_turned
    found = unturned(found) if turns else unstacked(by_expert(found, config), by_head=config.qk_norm_by_head)
    if config.encoder is None and ARCHITECTURES[config.architecture].turned_products:
        found = with_turned_products(found, ARCHITECTURES[config.architecture].layers_name)
    plan: dict[str, StoredTensor | PackedTensor] = {}
    first: dict[str, str] = {}
    for name, shape in shapes.items():
        theirs = json_name(name, config)
        same = plan.get(first.setdefault(theirs, name))  # two of our layers may have a norm of one of the file's
        plan[name] = same or _take_packed(found, theirs, shape, config.packing) or _take(found, theirs, shape, folder)
    if config.encoder is not None:
        return plan, found
    row = ARCHITECTURES[config.architecture]
    return _in_our_order(plan, config, row.interleaves_heads, by_kv_heads=row.qkv_by_kv_heads), found


def _in_our_order(
    plan: Mapping[str, StoredTensor | PackedTensor],
    config: ModelConfig,
    interleaves: bool,
    *,
    by_kv_heads: bool = False,
) -> Mapping[str, StoredTensor | PackedTensor]:
    """Apply the order of the heads' rows of Q and K to the plan. interleaves: see head_order().

    by_kv_heads: the rows of a fused matrix are in the order of KV heads.
    """
    if config.latent is not None:
        heads = latent_orders(config, config.latent, interleaves)
    else:
        order = head_order(config.head_dim, config.rotary_dim or config.head_dim, interleaves=interleaves)
        query, kv = config.num_attention_heads, config.num_key_value_heads
        counts = {"q_proj": query, "k_proj": kv, "qkv_proj": query + kv}
        counts |= {"q_norm": query, "k_norm": kv} if config.qk_norm_of_rows else {"q_norm": 1, "k_norm": 1}
        heads = {name: (count, order) for name, count in counts.items() if order != tuple(range(len(order)))}
        if by_kv_heads:
            heads["qkv_proj"] = 1, parts_in_turn(order, query, kv)
        if config.output_gate:
            heads["q_proj"] = 1, gates_last(order, query)
    ordered = dict(plan)
    for name, stored in plan.items():
        count, order = input_order(name, config) or heads.get(name.split(".")[-2], (0, ()))
        if count:
            ordered[name] = msgspec.structs.replace(stored, heads=count, order=order)
    return ordered


def _take(found: dict[str, StoredTensor], name: str, shape: tuple[int, ...], where: Path) -> StoredTensor:
    """Remove a tensor from `found`, check it and return it. Errors: ModelFileError, UnsupportedModelError."""
    stored = found.pop(name, None)
    if stored is None:
        raise ModelFileError(f"{where}: tensor {name} is missing; expected shape {shape}")
    if stored.shape != shape and stored.shape in ((1, *shape), shape[1:]) and 1 in (*shape[:1], *stored.shape[:1]):
        stored = msgspec.structs.replace(stored, shape=shape)  # one row, as a matrix or as a vector
    if stored.shape != shape:
        raise ModelFileError(f"{stored.path}: tensor {name} has shape {stored.shape}; the config says {shape}")
    if stored.type not in FILE_TYPES:
        raise UnsupportedModelError(
            f"{stored.path}: tensor {name} has type {stored.type}; supported are {', '.join(FILE_TYPES)}"
        )
    return stored


def _take_packed(
    found: dict[str, StoredTensor], name: str, shape: tuple[int, ...], packing: Packing
) -> PackedTensor | None:
    """Remove the tensors of a packed matrix from `found` and check them; None if the weight is not packed.

    Errors: ModelFileError.
    """
    stem = name.removesuffix(".weight")
    types = {kind: found[key].type for kind in all_kinds(packing) if (key := f"{stem}.{kind}") in found}
    kinds = kinds_of(types, packing) if len(shape) > 1 else ()
    if not kinds:
        return None
    parts = {kind: found.pop(f"{stem}.{kind}") for kind in kinds}
    fault = fault_of({kind: (part.type, part.shape) for kind, part in parts.items()}, shape, packing)
    if fault:
        raise ModelFileError(f"{parts[kinds[0]].path}: matrix {stem}: {fault}")
    scale = None
    if "weight" in parts and parts["weight"].type == "F8_E4M3":
        scale = next((found.pop(key) for kind in INPUT_SCALES if (key := f"{stem}.{kind}") in found), None)
    return PackedTensor(stem, parts, shape, packing, input_scale=scale)


def _check_rest(found: dict[str, StoredTensor], config: ModelConfig) -> None:
    """Refuse unused tensors, except for a few harmless ones, because ignoring them would change the model's output.

    Errors: UnsupportedModelError.
    """
    for name, stored in found.items():
        if _HARMLESS.fullmatch(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if name.startswith("rope_factors_") and isinstance(config.rope_scaling, LongropeScaling):
            continue
        if config.packing != "none" and (name.rpartition(".")[2] in UNUSED_KINDS or _is_zero_bias(stored)):
            continue
        mtp = None if config.encoder is not None else ARCHITECTURES[config.architecture].mtp
        if mtp is not None and mtp.prefix and name.startswith(mtp.prefix):
            continue
        if is_of_further_layer(name, config) or is_of_shared_layer(name, config):
            continue
        raise UnsupportedModelError(
            f"{stored.path}: unexpected tensor {name!r:.80} of shape {stored.shape}; "
            f"a {config.architecture} of {config.num_hidden_layers} layers has none of that name"
        )


def _is_zero_bias(stored: StoredTensor) -> bool:
    """Return whether a tensor is a bias of zeros. AutoGPTQ adds one to each matrix that has none."""
    if not stored.source_name.endswith("_proj.bias"):
        return False
    with map_file(stored.path) as data:
        return not any(data[stored.begin : stored.end])


def _convert(
    plan: Mapping[str, StoredTensor | PackedTensor], dtype: Dtype, library: CpuLibrary | None
) -> Iterator[tuple[str, Weight]]:
    reading = _Reading(dtype, library)
    for (name, stored), after in zip_longest(plan.items(), [*plan.values()][1:]):
        if len(stored.shape) == 1:
            assert isinstance(stored, StoredTensor), name
            yield name, reading.read(stored, None).dense(FLOAT32).reshape(stored.shape)
            continue
        rows, depth = stored.shape
        yield name, StoredMatrix.unread((rows, depth), partial(reading.parts, stored, after), _source(stored, dtype))


def _source(stored: StoredTensor | PackedTensor, dtype: Dtype) -> str:
    """Return a text that says where a matrix is in the model's files, and how its numbers are read from there."""
    if isinstance(stored, PackedTensor):
        parts = {kind: _without_folder(part) for kind, part in stored.parts.items()}
        text = repr(msgspec.structs.replace(stored, parts=parts, input_scale=None))
    else:
        text = repr(_without_folder(stored))
    return hashlib.sha256(f"{text} {dtype}".encode()).hexdigest()


def _without_folder(stored: StoredTensor) -> StoredTensor:
    """Return the place within the model's files. A GGUF file is the only one, and may be opened by several names."""
    name = "" if stored.path.suffix == ".gguf" else stored.path.name
    return msgspec.structs.replace(stored, path=Path(name))


class _Reading:
    """The files of a model's weights, mapped when the first of their tensors is read."""

    def __init__(self, dtype: Dtype, library: CpuLibrary | None) -> None:
        self._dtype, self._library = dtype, library
        self._files: dict[Path, mmap.mmap] = {}
        self._last: StoredTensor | None = None

    def parts(
        self, stored: StoredTensor | PackedTensor, after: StoredTensor | PackedTensor | None
    ) -> tuple[StoredPart, ...]:
        """Read a matrix. after: the weight that will probably be read next."""
        if isinstance(stored, PackedTensor):
            parts, scale = _unpack(stored, self._files, self._dtype).parts, stored.input_scale
            read = None if scale is None else partial(read_scale, scale)
            return tuple(part._replace(library=self._library, input_scale=read) for part in parts)
        matrix = self.read(stored, after)
        if stored.factors:
            return StoredMatrix.of(_multiplied(matrix, stored.factors, self._dtype)).parts
        return (matrix if stored.path.suffix == ".gguf" else StoredMatrix.of(matrix.dense(self._dtype))).parts

    def read(self, stored: StoredTensor, after: StoredTensor | PackedTensor | None) -> StoredMatrix:
        """Return a tensor as it is stored; a vector becomes a matrix of one row. The one read before is released."""
        if self._last is not None:
            _release(self._files[self._last.path], self._last)
        if isinstance(after, StoredTensor) and after.end > after.begin:
            _ask_for(_data_of(after, self._files)[0], after)
        file, data = _data_of(stored, self._files)
        self._last = stored
        return _to_weight(data, stored, self._library, partial(_release, file, stored))


def _multiplied(matrix: StoredMatrix, runs: tuple[tuple[int, float], ...], dtype: Dtype) -> Numbers:
    """Return the matrix in dtype, rounded once, with its rows multiplied by their factors."""
    counts, factors = zip(*runs, strict=True)
    numbers = to_floats(matrix.own(FLOAT32)) * np.repeat(np.array(factors, np.float32), counts)[:, None]
    return rounded(numbers, dtype)


def _data_of(stored: StoredTensor, files: dict[Path, mmap.mmap]) -> tuple[mmap.mmap, UInt8s]:
    """Return the mapped file of a tensor, and the tensor's bytes in it. files: those mapped so far."""
    file = files.get(stored.path)
    if file is None:
        file = files[stored.path] = map_file(stored.path, mmap.ACCESS_COPY)
    if len(file) < stored.end:
        raise ModelFileError(f"{stored.path}: the file became shorter while it was read: {len(file)} bytes")
    return file, np.frombuffer(file, np.uint8, stored.end - stored.begin, stored.begin)


def _unpack(packed: PackedTensor, files: dict[Path, mmap.mmap], dtype: Dtype) -> StoredMatrix:
    tensors: dict[str, NDArray[Any]] = {}
    for kind, stored in packed.parts.items():
        _, data = _data_of(stored, files)
        tensor = np.array(data).view(ELEMENT_DTYPES[stored.type]).reshape(stored.shape)
        tensors[kind] = tensor[list(stored.order)] if stored.order else tensor
        _release(files[stored.path], stored)
    try:
        matrix = unpack(tensors, packed.shape, packed.packing, dtype)
    except ValueError as error:
        raise ModelFileError(f"{next(iter(packed.parts.values())).path}: matrix {packed.stem}: {error}") from None
    if packed.heads:
        parts = [part._replace(data=_reordered(part.data, packed.heads, packed.order)) for part in matrix.parts]
        assert len(parts) == 1, packed.stem
        matrix = StoredMatrix(parts)
    return matrix


def _ask_for(file: mmap.mmap, stored: StoredTensor) -> None:
    """Have the system read the tensor while others are packed.

    Packing alone reads several places alternately, which is slow.
    """
    begin = stored.begin // mmap.PAGESIZE * mmap.PAGESIZE
    file.madvise(mmap.MADV_WILLNEED, begin, stored.end - begin)


def _release(file: mmap.mmap, stored: StoredTensor) -> None:
    """Release the mapping's pages that hold only this tensor. A later access reads them from the file again."""
    begin, end = round_up(stored.begin, mmap.PAGESIZE), stored.end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        file.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _to_weight(
    data: UInt8s, stored: StoredTensor, library: CpuLibrary | None, release: Callable[[], None]
) -> StoredMatrix:
    """Return the stored tensor as a matrix; a vector becomes a matrix of one row."""
    if stored.begin % 4:
        data = data.copy()  # no type is wider than 4 bytes, and a safetensors header may have any length
    if stored.is_turned:
        rows, columns = stored.shape
        turned = data.reshape(columns, stored.num_rows or rows, -1).swapaxes(0, 1)
        data = turned[stored.first_row : stored.first_row + rows].reshape(-1)
    if stored.heads:
        data = _reordered(data.reshape(stored.shape[0], -1), stored.heads, stored.order).reshape(-1)
    rows = stored.shape[0] if len(stored.shape) > 1 else 1
    return StoredMatrix([StoredPart(stored.type, data.reshape(rows, -1), stored.shape[-1], library, release)])


def _reordered(rows: UInt8s, heads: int, order: tuple[int, ...]) -> UInt8s:
    """Return rows of bytes with the leading heads in this order. Rows consist of whole blocks."""
    count = heads * len(order)
    leading = rows[:count].reshape(heads, len(order), -1)[:, list(order)]
    return np.concatenate((leading.reshape(count, -1), rows[count:]))
