"""ModelConfig from a GGUF file's metadata and tensor names, as written by llama.cpp's converter.

Unimplemented settings that would change the arithmetic are refused by name.
"""

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from core.model_files.gguf.encoder_gguf import gguf_encoder_config
from core.model_files.gguf.file_layers_gguf import dense_layers, gguf_file_layers, gguf_xielu
from core.model_files.gguf.gguf_experts import gguf_experts
from core.model_files.gguf.layers_gguf import (
    as_proportional,
    gguf_layer_settings,
    gguf_stream_settings,
    without_lists,
)
from core.model_files.settings.architecture_settings import (
    every,
    residuals,
    unrotated_beside,
    within_chunks,
)
from core.model_files.settings.config_json import pattern_layers
from core.model_files.settings.latent_settings import as_one_head, checked_latent, scalar_of
from core.model_files.settings.layer_settings import alike_mlps
from core.model_files.settings.recurrent_settings import gguf_recurrent_parts, spread_heads
from core.model_files.settings.rope_scaling import yarn_attention_factor
from core.model_files.settings.values import Values, model_sizes
from core.models.architectures.by_name import GGUF_ARCHITECTURES, GGUF_ROUTED, Architecture
from core.models.architectures.encoder_architectures import GGUF_ENCODERS
from core.models.config import LatentParts, ModelConfig
from core.models.layers.rope_scaling import FrequencyDivisors, LinearScaling, LongropeScaling, RopeScaling, YarnScaling
from ipc.errors import UnsupportedModelError
from ipc.files.gguf import GgufHeader, gguf_tokens, read_gguf
from ipc.files.gguf_vocabulary import GGUF_ENDS, gguf_end_ids
from ipc.files.mapped_file import map_file

#: Setting -> its key, without the architecture's prefix.
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
    "query_growth": "attention.temperature_scale",
    "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "expert_gating": "expert_gating_func",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "key_length_mla": "attention.key_length_mla",
    "v_head_dim": "attention.value_length_mla",
    "value_length": "attention.value_length",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "attention_factor": "rope.scaling.attn_factor",
    "rotary_dim": "rope.dimension_count",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "conv_L_cache": "shortconv.l_cache",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "mamba_inner_size": "ssm.inner_size",
    "full_attention_interval": "full_attention_interval",
    "is_rotated": "rope.scaling.finetuned",
    "use_parallel_residual": "use_parallel_residual",
    "head_dim_swa": "attention.key_length_swa",
    "value_length_swa": "attention.value_length_swa",
    "rotary_dim_swa": "rope.dimension_count_swa",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "altup_num_inputs": "altup.num_inputs",
    "altup_active_idx": "altup.active_idx",
    "activation_sparsity_scale": "activation_sparsity_scale",
}
_EPS_OF_CENTRED = "attention.layer_norm_epsilon"
#: Keys of features that are not implemented -> the value without effect.
_WITHOUT_EFFECT: dict[str, Any] = {
    "attention.clamp_kqv": 0.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
#: Settings of only some architectures -> the value without effect. Other architectures refuse them.
_CAPS = {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0}
_MULTIPLIERS = {
    "attention_multiplier": 0.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_WITHOUT_KEYS = ("none", "falcon")  # the latter's are in the files' matrices
_GROWTH = {"query_growth": 0.0, "yarn_log_multiplier": 0.0}
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}

#: Every fourth layer of SmolLM3 and Llama 4 is not rotated. No key says so, and llama.cpp also hard-codes it.
_UNROTATED_INTERVAL = 4


def read_gguf_config(path: Path) -> ModelConfig:
    """Return the configuration of a model from its GGUF file.

    Errors: ModelFileError naming the key for a missing or invalid value; UnsupportedModelError naming an unsupported
    feature.
    """
    header = read_gguf(path)
    if (encoder := header.metadata.get("general.architecture")) in GGUF_ENCODERS:
        return gguf_encoder_config(path, header, str(encoder))
    return gguf_decoder_config(path, header)


def gguf_decoder_config(path: Path, header: GgufHeader) -> ModelConfig:
    """Return the configuration of a decoder from the header of its GGUF file. Errors: those of read_gguf_config()."""
    values, architecture, file_layers = _named(header, path)
    tokens = gguf_tokens(header.metadata)
    vocab_size = values.integer("vocab_size", None if tokens is None else len(tokens))
    window = _window(values, architecture, _num_layers(values, architecture))
    sliding, full = window.get("sliding_layers", ()), None
    if architecture.full_heads:
        full = without_lists(values, sliding)
    if architecture.has_streams:
        alike_mlps(values)
    sizes, latent = model_sizes(values), gguf_latent(values, header, architecture)
    sizes |= _own_sizes(values, architecture, sizes, latent)
    rotated_from = sizes["head_dim"] if latent is None else latent.rotated_dim
    width = _rotary_dim(values, architecture, rotated_from)
    scaled = width if full is None else full.head_dim
    most = sizes["max_position_embeddings"]
    scaling = as_proportional(gguf_rope_scaling(values, header, path, architecture, most, scaled), architecture)
    eos: tuple[int, ...] = ()
    for name in GGUF_ENDS:
        eos += values.token_ids(f"tokenizer.ggml.{name}_token_id", vocab_size)
    eos += tuple(token for token in gguf_end_ids(header.metadata) if token < vocab_size)
    bos = values.token_ids("tokenizer.ggml.bos_token_id", vocab_size)
    features = _features(header, values, architecture, sizes)
    first = "attn_qkv" if features["fused_qkv"] else "attn_kv_a_mqa" if architecture.latent else "attn_q"
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=vocab_size,
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=_dtype(header, first),
        rope_theta=values.number("rope_theta", 1.0, 1e12, architecture.rope_theta),
        rope_scaling=scaling,
        query_growth=_query_growth(values, architecture),
        rotary_dim=width if width != rotated_from else None,
        unrotated_layers=_unrotated(values, architecture, window, sizes["num_hidden_layers"]),
        **sizes,
        **window,
        **({} if full is None else gguf_layer_settings(values, header, full, sizes, sliding)),
        **gguf_stream_settings(values, header, architecture, sizes["num_hidden_layers"], sliding),
        **(features | _multipliers(values, architecture) | scale_of(values, latent)),
        **_caps(values, architecture),
        latent=latent,
        recurrent=gguf_recurrent_parts(values, architecture, sizes, header.tensors),
        experts=gguf_experts(
            values, header, architecture, dense_layers(header, architecture, file_layers, sizes["num_hidden_layers"])
        ),
        file_layers=file_layers,
        xielu=gguf_xielu(values, architecture, sizes["num_hidden_layers"]),
    )


def _named(header: GgufHeader, path: Path) -> tuple[Values, Architecture, tuple[tuple[int, int], ...]]:
    """Return the file's settings by their names in config.json, its architecture, and ModelConfig.file_layers.

    Errors: ModelFileError, UnsupportedModelError.
    """
    values = Values(header.metadata, str(path))
    name = header.metadata.get("general.architecture")
    known = ", ".join(map(repr, (*GGUF_ARCHITECTURES, *GGUF_ENCODERS)))
    if name is None:
        values.fail("general.architecture", f"is missing; supported are {known}")
    if name not in GGUF_ARCHITECTURES:
        values.refuse("general.architecture", f"supported are {known}")
    is_routed = header.metadata.get(f"{name}.{_KEYS['num_experts']}") not in (None, 0) and str(name) in GGUF_ROUTED
    architecture = (GGUF_ROUTED if is_routed else GGUF_ARCHITECTURES)[str(name)]
    own = _KEYS | ({"rms_norm_eps": _EPS_OF_CENTRED} if architecture.centred_norms else {})
    values = Values(header.metadata, str(path), {key: f"{name}.{rest}" for key, rest in own.items()})
    layers = gguf_file_layers(values, header, architecture)
    spread_heads(values, architecture)
    _refuse_features(values, str(name), architecture)
    within_chunks(values, architecture)
    return values, architecture, layers


def _own_sizes(
    values: Values, architecture: Architecture, sizes: dict[str, Any], latent: LatentParts | None
) -> dict[str, int]:
    """Return the sizes that differ from those of model_sizes(): without layers that are not read, with one head."""
    changed = {} if latent is None else as_one_head(latent)
    if latent is None and values.get("value_length") not in (None, sizes["head_dim"]):
        values.refuse("value_length", f"only the head dimension {sizes['head_dim']} is")
    return changed | {"num_hidden_layers": _num_layers(values, architecture)}


def _num_layers(values: Values, architecture: Architecture) -> int:
    """Return the number of layers without those for multi-token prediction, which come last."""
    count = values.integer("num_hidden_layers")
    if not architecture.may_predict or values.get("num_nextn_predict_layers") in (None, 0):
        return count
    further = values.integer("num_nextn_predict_layers")
    if further >= count:
        values.fail("num_nextn_predict_layers", f"must be less than {values.key('num_hidden_layers')}={count}")
    return count - further


def _dtype(header: GgufHeader, part: str) -> str:
    """Return the type name of the first layer's matrix for this part."""
    name = next((name for name in header.tensors if name.endswith(f".{part}.weight")), None)
    return "float32" if name is None else _DTYPES.get(header.tensors[name].type, "float32")


def _refuse_features(values: Values, name: str, architecture: Architecture) -> None:
    for key, plain in _WITHOUT_EFFECT.items():
        if values.values.get(f"{name}.{key}", plain) != plain:
            values.refuse(f"{name}.{key}", f"only {plain!r} is")
    if not _may_slide(architecture) and values.get("sliding_window") not in (None, 0):
        names = ", ".join(name for name, row in GGUF_ARCHITECTURES.items() if _may_slide(row))
        values.refuse("sliding_window", f"in a GGUF file only {names} have one; safetensors are the alternative")
    absent = {} if architecture.soft_caps else _CAPS
    if architecture.own_cap == "logits_cap":
        absent = {"attn_logit_softcapping": 0.0}
    absent = absent | ({} if architecture.query_growth or architecture.latent else _GROWTH)
    absent = absent | ({"num_experts": 0} if architecture.experts is None else {})
    absent = absent | ({} if architecture.may_predict else {"num_nextn_predict_layers": 0})
    absent = absent | (_MULTIPLIERS if architecture.multipliers in _WITHOUT_KEYS else {})
    for setting, plain in absent.items():
        if values.get(setting) not in (None, plain):
            values.refuse(setting, f"only {plain!r} is")
    listed = ["num_attention_heads"]
    listed += [] if architecture.full_heads else ["num_key_value_heads"]
    listed += [] if architecture.full_heads or architecture.has_streams else ["intermediate_size"]
    for setting in listed:
        if isinstance(values.get(setting), list):
            values.refuse(setting, "all layers must be alike")


def _features(header: GgufHeader, values: Values, architecture: Architecture, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the layer features by ModelConfig's names, except for rotation and window.

    A model has a bias if the file has its tensor. The file's norm weights already include the offset.
    """
    scalar = architecture.scores_scalar
    if architecture.query_pre_attn_scalar and sizes["num_hidden_layers"] == architecture.gguf_scalar_layers:
        scalar = sizes["hidden_size"] / sizes["num_attention_heads"]
    # Phi-2's files may have Q, K and V fused or separate. Recurrent layers also have a matrix of that name.
    is_fused = architecture.recurrent is None and "blk.0.attn_qkv.weight" in header.tensors
    biases = {name.split(".", 2)[2] for name in header.tensors if name.startswith("blk.") and name.endswith(".bias")}
    return {
        "hidden_act": architecture.activation,
        "qkv_bias": architecture.attention_bias == "qkv" or not biases.isdisjoint(("attn_q.bias", "attn_qkv.bias")),
        "output_bias": "attn_output.bias" in biases,
        "mlp_bias": architecture.mlp_bias_key is not None and "ffn_down.bias" in biases,
        "head_bias": architecture.head_bias,
        "is_gated": architecture.is_gated,
        "residual": residuals(values, architecture),
        "centred_norms": architecture.centred_norms,
        "norm_bias": architecture.norm_bias,
        "qk_norm": _has_qk_norm(header, values, architecture),
        "qk_norm_plain": architecture.qk_norm_plain,
        "qk_norm_of_rows": architecture.qk_norm_of_rows,
        "qk_norm_by_head": architecture.qk_norm_by_head,
        "qk_norm_after": architecture.qk_norm_after,
        "pre_norms": architecture.pre_norms,
        "post_norms": architecture.post_norms,
        "attention_sinks": architecture.attention_sinks,
        "output_gate": architecture.output_gate,
        "position_table": architecture.position_table,
        "scale_embeddings": architecture.scale_embeddings,
        "query_pre_attn_scalar": scalar,
        "fused_qkv": is_fused,
        "fused_gate_up": architecture.fused_gate_up and architecture.experts is None,
    }


def _has_qk_norm(header: GgufHeader, values: Values, architecture: Architecture) -> bool:
    if architecture.qk_norm_plain:
        return bool(values.get("num_experts") != architecture.gguf_unnormed_experts)
    is_stored = "blk.0.attn_q_norm.weight" in header.tensors
    return architecture.qk_norm or (architecture.qk_norm_key is not None and is_stored)


def _rotary_dim(values: Values, architecture: Architecture, head_dim: int) -> int:
    """Return how many numbers of a head are rotated."""
    width = values.integer("rotary_dim", head_dim)
    if width == head_dim:
        return width
    if not architecture.partial_rotary:
        values.refuse("rotary_dim", f"only the head dimension {head_dim} is")
    if width % 2 or width > head_dim:
        values.fail("rotary_dim", f"must be an even number of at most {head_dim}, got {width}")
    return width


def _query_growth(values: Values, architecture: Architecture) -> float | None:
    if not architecture.query_growth or values.get("query_growth") in (None, 0.0):
        return None
    return values.number("query_growth", 0.0, 1e6)


def _caps(values: Values, architecture: Architecture) -> dict[str, Any]:
    cap, default = values.get("final_logit_softcapping"), architecture.defaults.get("final_logit_softcapping")
    if architecture.own_cap == "logits_cap" and (default if cap is None else cap) not in (None, 0.0):
        return {"logits_cap": values.number("final_logit_softcapping", 1e-3, 1e6, default)}
    if not architecture.soft_caps:
        return {}
    return {  # llama.cpp's defaults
        "scores_cap": values.number("attn_logit_softcapping", 1e-3, 1e6, 50.0),
        "logits_cap": values.number("final_logit_softcapping", 1e-3, 1e6, 30.0),
    }


def _multipliers(values: Values, architecture: Architecture) -> dict[str, Any]:
    if architecture.multipliers in _WITHOUT_KEYS:
        return {}
    if architecture.multipliers == "cohere":
        return {"logits_multiplier": values.number("logits_scaling", 1e-6, 1e6)}
    fields = {name: values.number(name, 1e-6, 1e6) for name in ("embedding_multiplier", "residual_multiplier")}
    if values.get("attention_multiplier") not in (None, 0.0):
        fields["query_pre_attn_scalar"] = values.number("attention_multiplier", 1e-6, 1e6) ** -2
    return fields | {"logits_multiplier": 1 / values.number("logits_scaling", 1e-6, 1e6)}


def _unrotated(values: Values, architecture: Architecture, window: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    match architecture.unrotated:
        case "no_rope_layers":
            return every(_UNROTATED_INTERVAL, num_layers)
        case "all":
            return tuple(range(num_layers))
        case "by position_embedding_type" if not values.boolean("is_rotated", True):
            return tuple(range(num_layers))
        case "full beside sliding" if window:
            return unrotated_beside(window["sliding_layers"], num_layers)
        case _:
            return ()


def _may_slide(architecture: Architecture) -> bool:
    return architecture.gguf is not None and architecture.sliding in ("all", "by sliding_window_pattern")


def _window(values: Values, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Return the window settings by ModelConfig's names; empty for a model without sliding layers."""
    if values.get("sliding_window") in (None, 0):
        return {}
    fields: dict[str, Any] = {"sliding_window": values.integer("sliding_window")}
    if architecture.own_sliding_rope:
        own = architecture.sliding_rope_theta or values.number("rope_theta", 1.0, 1e12, architecture.rope_theta)
        fields["sliding_rope_theta"] = values.number("sliding_rope_theta", 1.0, 1e12, own)
    if architecture.sliding == "all":
        return fields | {"sliding_layers": tuple(range(num_layers))}
    return fields | {"sliding_layers": _sliding_layers(values, architecture, num_layers)}


def _sliding_layers(values: Values, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    """Return the sliding layers. The setting is a number as in config.json, or one boolean per layer.

    Layers for multi-token prediction may have booleans, too.
    """
    flags = values.get("sliding_window_pattern")
    if not isinstance(flags, list):
        return pattern_layers(
            values.integer("sliding_window_pattern", architecture.defaults["sliding_window_pattern"]), num_layers
        )
    counts = num_layers, values.integer("num_hidden_layers")
    if len(flags) not in counts or any(type(flag) is not bool for flag in flags):
        values.fail("sliding_window_pattern", f"must be a number or {num_layers} booleans, got {flags!r:.80}")
    return tuple(layer for layer, flag in enumerate(flags[:num_layers]) if flag)


# gguf_latent: the properties of latent attention in a GGUF file, as LatentParts.


def gguf_latent(values: Values, header: GgufHeader, architecture: Architecture) -> LatentParts | None:
    """Return the properties of latent attention; None for an architecture without it.

    Newer files state the size of the cached vector as key and value, and the heads' sizes separately. Errors:
    ModelFileError, UnsupportedModelError.
    """
    if not architecture.latent:
        return None
    rotated = values.integer("rotary_dim")
    width = values.integer("key_length_mla", values.integer("head_dim"))
    if width <= rotated:
        values.fail("rotary_dim", f"must be less than the width of a head, {width}; got {rotated}")
    return checked_latent(
        values,
        LatentParts(
            query_dim=None if values.get("q_lora_rank") in (None, 0) else values.integer("q_lora_rank"),
            latent_dim=values.integer("kv_lora_rank"),
            plain_dim=width - rotated,
            rotated_dim=rotated,
            value_dim=values.integer("v_head_dim", values.integer("value_length")),
            is_split="blk.0.attn_k_b.weight" in header.tensors,
        ),
    )


def scale_of(values: Values, latent: LatentParts | None) -> dict[str, Any]:
    """Return the scale of scores in ModelConfig's form; empty without latent attention.

    The file stores a tenth of DeepSeek's mscale_all_dim.
    """
    if latent is None:
        return {}
    multiplier, kind = 1.0, values.get("rope_type")
    if kind == "yarn" and values.get("factor") not in (None, 0, 1):
        tenth = values.number("yarn_log_multiplier", 0.0, 1e6, 0.0)
        multiplier += tenth * math.log(values.number("factor", 1e-6, 1e6))
    return {"query_pre_attn_scalar": scalar_of(latent, multiplier)}


# The rotary scaling in a GGUF file: from its metadata, or from a tensor with one divisor per frequency.


_DIVISORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"


def gguf_rope_scaling(
    values: Values, header: GgufHeader, path: Path, architecture: Architecture, max_positions: int, width: int
) -> RopeScaling | None:
    """Return the scaling, or None. width: number of rotated numbers per head. max_positions: in tokens.

    Errors: ModelFileError naming the key or tensor; UnsupportedModelError.
    """
    if architecture.longrope and (_SHORT in header.tensors or _LONG in header.tensors):
        return _longrope(values, header, path, max_positions, width // 2)
    if values.get("attention_factor") not in (None, 1.0):
        values.refuse("attention_factor", "only 1.0 is")
    if _DIVISORS in header.tensors:
        if values.get("rope_type") not in (None, "none"):
            values.refuse("rope_type", f"with the tensor {_DIVISORS} only 'none' is")
        return FrequencyDivisors(_divisors(values, header, path, _DIVISORS, width // 2))
    kind = values.values.get(values.key("rope_type"), "linear")  # llama.cpp's default
    if kind not in ("none", "linear", "yarn"):
        values.refuse("rope_type", "'none', 'linear' and 'yarn' are")
    if values.get("factor") in (None, 0, 1):
        return None
    factor = values.number("factor", 1e-6, 1e6)
    has_equal_scales = architecture.query_growth or architecture.latent
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=values.number(_LENGTH, 1, 2**24, max_positions),
            # Ministral 3's mscale and mscale_all_dim are equal, and so are DeepSeek's. llama.cpp supports no others.
            attention_factor=1.0 if has_equal_scales else yarn_attention_factor(factor),
            beta_fast=values.number("beta_fast", 1e-6, 1e6, 32.0),
            beta_slow=values.number("beta_slow", 1e-6, 1e6, 1.0),
            truncate=architecture.gguf_yarn_truncates,
        )
    return LinearScaling(factor) if kind == "linear" else None


_LENGTH = "original_max_position_embeddings"


def _longrope(values: Values, header: GgufHeader, path: Path, max_positions: int, expected: int) -> LongropeScaling:
    if values.get("rope_type") not in (None, "none", "longrope"):
        values.refuse("rope_type", f"with the tensor {_LONG} only 'none' and 'longrope' are")
    for name in (_SHORT, _LONG):
        if name not in header.tensors:
            values.fail(name, "is missing")
    return LongropeScaling(
        _divisors(values, header, path, _SHORT, expected),
        _divisors(values, header, path, _LONG, expected),
        values.number(_LENGTH, 1, 2**24, max_positions),
        values.number("attention_factor", 1e-6, 1e6, 1.0),
    )


def _divisors(values: Values, header: GgufHeader, path: Path, name: str, expected: int) -> tuple[float, ...]:
    """Read a tensor of frequency divisors.

    It is part of the configuration, and small. Errors: ModelFileError, UnsupportedModelError.
    """
    tensor = header.tensors[name]
    if tensor.type != "F32" or tensor.shape != (expected,):
        raise UnsupportedModelError(
            f"{path}: tensor {name} of type {tensor.type} and shape {tensor.shape} is not supported; "
            f"F32 of shape ({expected},) is"
        )
    with map_file(path, mmap.ACCESS_READ) as data:
        numbers = np.frombuffer(data[tensor.offset : tensor.offset + tensor.num_bytes], "<f4").tolist()
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        values.fail(name, "must hold finite numbers above 0")
    return tuple(numbers)
