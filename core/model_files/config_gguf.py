"""ModelConfig from a GGUF file's metadata and tensor names, as llama.cpp's converter writes them.

Settings that would change the arithmetic and are not implemented are refused by name.
"""

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from core.model_files.config_json import pattern_layers
from core.model_files.rope_scaling import yarn_attention_factor
from core.model_files.values import Values, model_sizes
from core.models.architectures import GGUF_ARCHITECTURES, Architecture
from core.models.config import ModelConfig
from core.models.rope_scaling import FrequencyDivisors, LinearScaling, RopeScaling, YarnScaling
from ipc.errors import UnsupportedModelError
from ipc.files.gguf import GgufHeader, read_gguf
from ipc.files.mapped_file import map_file

#: Setting -> its key, without the architecture's name in front.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_rope_theta": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "vocab_size": "vocab_size",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
#: Keys of features that are not implemented -> their value without effect.
_WITHOUT_EFFECT: dict[str, Any] = {
    "expert_count": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_DIVISORS = "rope_freqs.weight"

#: Number of layers of Gemma 3 27B, the only one whose queries are not scaled by the head dimension. llama.cpp
#: recognizes it by this number, too.
_GEMMA3_27B_LAYERS = 62


def read_gguf_config(path: Path) -> ModelConfig:
    """Return the configuration of a model from its GGUF file.

    Errors: ModelFileError naming the key for a missing or invalid value; UnsupportedModelError naming what this version
    cannot run.
    """
    header = read_gguf(path)
    values = Values(header.metadata, str(path))
    name = header.metadata.get("general.architecture")
    known = ", ".join(map(repr, GGUF_ARCHITECTURES))
    if name is None:
        values.fail("general.architecture", f"is missing; supported are {known}")
    if name not in GGUF_ARCHITECTURES:
        values.refuse("general.architecture", f"supported are {known}")
    architecture = GGUF_ARCHITECTURES[str(name)]
    values = Values(header.metadata, str(path), {key: f"{name}.{rest}" for key, rest in _KEYS.items()})
    _refuse_features(values, str(name), architecture)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    vocab_size = values.integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    sizes = model_sizes(values)
    for key in (f"{name}.rope.dimension_count", f"{name}.attention.value_length"):
        if header.metadata.get(key, sizes["head_dim"]) != sizes["head_dim"]:
            values.refuse(key, f"only the head dimension {sizes['head_dim']} is")
    eos: tuple[int, ...] = ()
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        eos += values.token_ids(key, vocab_size)
    bos = values.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    matrix = header.tensors.get("blk.0.attn_q.weight")
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=vocab_size,
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=_DTYPES.get(matrix.type, "float32") if matrix else "float32",
        rope_theta=values.number("rope_theta", 1.0, 1e12, architecture.rope_theta),
        rope_scaling=_rope_scaling(values, header, path, sizes),
        **sizes,
        **_window(values, architecture, sizes["num_hidden_layers"]),
        **_features(header, architecture, sizes),
    )


def _refuse_features(values: Values, name: str, architecture: Architecture) -> None:
    for key, plain in _WITHOUT_EFFECT.items():
        if values.values.get(f"{name}.{key}", plain) != plain:
            values.refuse(f"{name}.{key}", f"only {plain!r} is")
    if architecture.sliding != "by sliding_window_pattern" and values.get("sliding_window") not in (None, 0):
        values.refuse("sliding_window", "in a GGUF file only gemma3 has one; safetensors are the alternative")
    for setting in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(values.get(setting), list):
            values.refuse(setting, "all layers must be alike")


def _features(header: GgufHeader, architecture: Architecture, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the layer features by ModelConfig's names, without rotation and window.

    A model has a bias if the file has its tensor. The norms' offset is included in the file's numbers already.
    """
    scalar = None
    if architecture.query_pre_attn_scalar and sizes["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        scalar = sizes["hidden_size"] / sizes["num_attention_heads"]
    return {
        "hidden_act": architecture.activation,
        "qkv_bias": architecture.attention_bias == "qkv" or "blk.0.attn_q.bias" in header.tensors,
        "output_bias": "blk.0.attn_output.bias" in header.tensors,
        "qk_norm": architecture.qk_norm,
        "post_norms": architecture.post_norms,
        "scale_embeddings": architecture.scale_embeddings,
        "query_pre_attn_scalar": scalar,
    }


def _window(values: Values, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Return the window's settings by ModelConfig's names; empty for a model without sliding layers."""
    own = architecture.sliding_rope_theta
    if own is None or values.get("sliding_window") in (None, 0):
        return {}
    return {
        "sliding_window": values.integer("sliding_window"),
        "sliding_layers": _sliding_layers(values, architecture, num_layers),
        "sliding_rope_theta": values.number("sliding_rope_theta", 1.0, 1e12, own),
    }


def _sliding_layers(values: Values, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    """Return the sliding layers. The setting is a number as in config.json, or one boolean for each layer."""
    flags = values.get("sliding_window_pattern")
    if not isinstance(flags, list):
        return pattern_layers(
            values.integer("sliding_window_pattern", architecture.defaults["sliding_window_pattern"]), num_layers
        )
    if len(flags) != num_layers or any(type(flag) is not bool for flag in flags):
        values.fail("sliding_window_pattern", f"must be a number or {num_layers} booleans, got {flags!r:.80}")
    return tuple(layer for layer, flag in enumerate(flags) if flag)


def _rope_scaling(values: Values, header: GgufHeader, path: Path, sizes: dict[str, Any]) -> RopeScaling | None:
    if _DIVISORS in header.tensors:
        return _divisors(values, header, path, sizes["head_dim"] // 2)
    kind = values.values.get(values.key("rope_type"), "linear")  # llama.cpp's default
    if kind not in ("none", "linear", "yarn"):
        values.refuse("rope_type", "'none', 'linear' and 'yarn' are")
    if values.get("factor") in (None, 0, 1):
        return None
    factor = values.number("factor", 1e-6, 1e6)
    if kind == "yarn":
        length = "original_max_position_embeddings"
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=values.number(length, 1, 2**24, sizes["max_position_embeddings"]),
            attention_factor=yarn_attention_factor(factor),
            beta_fast=values.number("beta_fast", 1e-6, 1e6, 32.0),
            beta_slow=values.number("beta_slow", 1e-6, 1e6, 1.0),
        )
    return LinearScaling(factor) if kind == "linear" else None


def _divisors(values: Values, header: GgufHeader, path: Path, expected: int) -> FrequencyDivisors:
    """Read the tensor of frequency divisors.

    It belongs to the configuration, and has only a few numbers. Errors: ModelFileError, UnsupportedModelError.
    """
    tensor = header.tensors[_DIVISORS]
    if tensor.type != "F32" or tensor.shape != (expected,):
        raise UnsupportedModelError(
            f"{path}: tensor {_DIVISORS} of type {tensor.type} and shape {tensor.shape} is not supported; "
            f"F32 of shape ({expected},) is"
        )
    if values.get("rope_type") not in (None, "none"):
        values.refuse("rope_type", f"beside the tensor {_DIVISORS} only 'none' is")
    with map_file(path, mmap.ACCESS_READ) as data:
        numbers = np.frombuffer(data[tensor.offset : tensor.offset + tensor.num_bytes], "<f4").tolist()
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        values.fail(_DIVISORS, "must hold finite numbers above 0")
    return FrequencyDivisors(tuple(numbers))
