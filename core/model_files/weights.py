"""A model's weights: from its files to tensors with Hugging Face names.

The headers are checked completely before the first tensor is made. Then the files are mapped and the tensors made one
at a time, so that there is never a second copy of a whole file.
"""

import mmap
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from core.model_files.encoder_weights import encoder_shapes, with_our_names
from core.models.architectures import ARCHITECTURES
from core.models.config import ModelConfig
from core.models.stored_matrix import StoredMatrix, StoredPart, Weight
from ipc.arrays import UInt8s
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf import read_gguf
from ipc.files.mapped_file import map_file
from ipc.files.safetensors import read_safetensors_folder
from ipc.rounding import round_up
from kernels.cpu.library import CpuLibrary
from kernels.dequantize import BLOCK_SIZES
from kernels.elements import FLOAT32, Dtype

#: safetensors dtype -> type name of kernels.dequantize, which converts both formats.
_SAFETENSORS_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Names of norms in models with post_norms; they replace those above.
_GGUF_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
#: Tables of rotary embedding in files; the config contains their information already.
_HARMLESS = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight"
)


class _Stored(msgspec.Struct, frozen=True):
    """The location and format of one tensor."""

    path: Path
    source_name: str  # the tensor's name in its file
    type: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int
    interleaved_heads: int = 0  # number of heads whose rows are in llama.cpp's rotary order; 0 = in transformers'


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by name, in the order of use; matrices are [out, in]."""
    if config.encoder is not None:
        return encoder_shapes(config)
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.num_labels:
        shapes["score.weight"] = (config.num_labels, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, size in (("q", query_size), ("k", kv_size), ("v", kv_size)):
        shapes[f"self_attn.{name}_proj.weight"] = (size, hidden)
    if config.qkv_bias:
        for name, size in (("q", query_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"self_attn.{name}_proj.bias"] = (size,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    shapes["self_attn.o_proj.weight"] = (hidden, query_size)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    norms = ["post_attention_layernorm"]
    if config.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return shapes | {
        **{f"{name}.weight": (hidden,) for name in norms},
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }


def load_weights(
    path: Path, config: ModelConfig, dtype: Dtype, library: CpuLibrary | None = None
) -> Iterator[tuple[str, Weight]]:
    """Return an iterator over (name, weight) for every name of expected_shapes, in its order.

    Matrices of a GGUF file stay as they are stored; other matrices are in dtype. Vectors are in float32, the dtype in
    which norms and biases are computed. All checks are done when this function returns.

    A weight that needs no conversion is a view of a private mapping of its file. Reading it reads the file, and the
    mapping exists as long as the weight. A file's pages are released as its weights are taken or converted, so data
    that the caller writes into a view is lost when the next weight is taken. library: the C kernels that dequantize;
    None = NumPy dequantizes.

    Errors: ModelFileError naming file and tensor for a missing, unexpected or misshapen tensor; UnsupportedModelError
    for a type that cannot be converted.
    """
    plan = _plan_gguf(path, config) if path.suffix == ".gguf" else _plan_folder(path, config)
    return _convert(plan, dtype, library)


def _plan_gguf(path: Path, config: ModelConfig) -> dict[str, _Stored]:
    found = {
        name: _Stored(path, name, tensor.type, tensor.shape, tensor.offset, tensor.offset + tensor.num_bytes)
        for name, tensor in read_gguf(path).tensors.items()
    }
    # For some architectures llama.cpp's converter interleaves the two halves of each head's rows in these matrices.
    interleaved: dict[str, int] = {}
    if ARCHITECTURES[config.architecture].gguf_interleaves_heads:
        interleaved = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    plan: dict[str, _Stored] = {}
    for name, shape in expected_shapes(config).items():
        stored = _take(found, _gguf_name(name, config), shape, path)
        heads = interleaved.get(name.split(".")[-2], 0)
        plan[name] = msgspec.structs.replace(stored, interleaved_heads=heads)
    _check_rest(found, config)
    return plan


def _plan_folder(folder: Path, config: ModelConfig) -> dict[str, _Stored]:
    found = {
        name: _Stored(path, name, _SAFETENSORS_TYPES.get(t.dtype, t.dtype), t.shape, t.begin, t.end)
        for path, tensors in read_safetensors_folder(folder).items()
        for name, t in tensors.items()
    }
    if config.encoder is not None:
        found = with_our_names(found, config)
    elif "model.embed_tokens.weight" not in found:  # saved from a model without a head
        found = {name if name.startswith(("lm_head.", "score.")) else f"model.{name}": t for name, t in found.items()}
    plan = {name: _take(found, name, shape, folder) for name, shape in expected_shapes(config).items()}
    _check_rest(found, config)
    return plan


def _gguf_name(name: str, config: ModelConfig) -> str:
    stem, kind = name.rsplit(".", 1)  # kind: weight or bias
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    names = _GGUF_LAYER_NAMES | _GGUF_POST_NORM_NAMES if config.post_norms else _GGUF_LAYER_NAMES
    return f"blk.{layer}.{names[part]}.{kind}"


def _take(found: dict[str, _Stored], name: str, shape: tuple[int, ...], where: Path) -> _Stored:
    """Remove a tensor from `found`, check it and return it. Errors: ModelFileError, UnsupportedModelError."""
    stored = found.pop(name, None)
    if stored is None:
        raise ModelFileError(f"{where}: tensor {name} is missing; expected shape {shape}")
    if stored.shape != shape:
        raise ModelFileError(f"{stored.path}: tensor {name} has shape {stored.shape}; the config says {shape}")
    if stored.type not in BLOCK_SIZES:
        raise UnsupportedModelError(
            f"{stored.path}: tensor {name} has type {stored.type}; supported are {', '.join(BLOCK_SIZES)}"
        )
    return stored


def _check_rest(found: dict[str, _Stored], config: ModelConfig) -> None:
    """Refuse unused tensors, except for a few harmless ones: ignoring them would change the model's output.

    Errors: UnsupportedModelError.
    """
    for name, stored in found.items():
        if _HARMLESS.fullmatch(name) or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        raise UnsupportedModelError(
            f"{stored.path}: unexpected tensor {name!r:.80} of shape {stored.shape}; "
            f"a {config.architecture} of {config.num_hidden_layers} layers has none of that name"
        )


def _convert(plan: dict[str, _Stored], dtype: Dtype, library: CpuLibrary | None) -> Iterator[tuple[str, Weight]]:
    files: dict[Path, mmap.mmap] = {}
    for name, stored in plan.items():
        file = files.get(stored.path)
        if file is None:
            file = files[stored.path] = map_file(stored.path, mmap.ACCESS_COPY)
        if len(file) < stored.end:
            raise ModelFileError(f"{stored.path}: the file became shorter while it was read: {len(file)} bytes")
        data = np.frombuffer(file, np.uint8, stored.end - stored.begin, stored.begin)
        weight = _to_weight(data, stored, library, partial(_release, file, stored))
        if len(stored.shape) == 1:
            yield name, weight.dense(FLOAT32).reshape(stored.shape)
        elif stored.path.suffix == ".gguf":
            yield name, weight
        else:
            yield name, weight.dense(dtype)
        del data, weight
        _release(file, stored)


def _release(file: mmap.mmap, stored: _Stored) -> None:
    """Release the mapping's pages that hold only this tensor. A later access reads them from the file again."""
    begin, end = round_up(stored.begin, mmap.PAGESIZE), stored.end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        file.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _to_weight(data: UInt8s, stored: _Stored, library: CpuLibrary | None, release: Callable[[], None]) -> StoredMatrix:
    """Return the stored tensor as a matrix; a vector becomes a matrix of one row."""
    if stored.begin % 4:
        data = data.copy()  # no type is wider than 4 bytes, and a safetensors header may have any length
    if stored.interleaved_heads:
        data = _halve_heads(data, stored.shape[0], stored.interleaved_heads)
    rows = stored.shape[0] if len(stored.shape) > 1 else 1
    return StoredMatrix([StoredPart(stored.type, data.reshape(rows, -1), stored.shape[-1], library, release)])


def _halve_heads(data: UInt8s, rows: int, heads: int) -> UInt8s:
    """Undo llama.cpp's order of the rows of q and k; return the data in transformers' order.

    Within a head, rows 0, 2, 4, ... become the first half and rows 1, 3, 5, ... the second. Rows consist of whole
    blocks, so their bytes can be moved.
    """
    pairs = data.reshape(heads, rows // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(-1)
