"""Tiny random checkpoints of Gemma 4, and their GGUF files, laid out by hand as llama.cpp's converter does it."""

from typing import Any

import gguf
import torch

_KINDS = ["sliding_attention", "full_attention"]
_HEADS = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 100}
_KEYS = {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
#: Name -> transformers' model_type and settings beside checkpoints.SIZES.
GEMMA4_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-e2b": (
        "gemma4_text",
        {
            **_HEADS,
            "num_hidden_layers": 6,
            "layer_types": [*_KINDS, "sliding_attention", *_KINDS, "full_attention"],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 300,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-31b": ("gemma4_text", {**_HEADS, **_KEYS, "num_hidden_layers": 4, "layer_types": _KINDS * 2}),
    "gemma4-26b-a4b": (
        "gemma4_text",
        {**_HEADS, **_KEYS, **_EXPERTS, "num_hidden_layers": 4, "layer_types": _KINDS * 2},
    ),
    "gemma4-12b": (
        "gemma4_unified_text",
        {
            **_HEADS,
            **{name: value for name, value in _KEYS.items() if "per_layer" not in name},
            "num_hidden_layers": 4,
            "layer_types": _KINDS * 2,
        },
    ),
}
GEMMA4_GGUF_CASES = {case: "gemma4" for case in GEMMA4_CASES if case != "gemma4-12b"}


def gemma4_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    layers, rope = config.per_layer_config, config.rope_parameters
    full, plain = layers[sliding.index(False)], layers[sliding.index(True)]
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_uint32("tokenizer.ggml.eos_token_id", config.eos_token_id)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    for add, add_of_windows in (
        (writer.add_key_length, writer.add_key_length_swa),
        (writer.add_value_length, writer.add_value_length_swa),
        (writer.add_rope_dimension_count, writer.add_rope_dimension_count_swa),
    ):
        add(full.head_dim)
        add_of_windows(plain.head_dim)
    size, first = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([size * (1 + (layer >= first)) for layer in range(config.num_hidden_layers)])
    else:
        writer.add_feed_forward_length(size)
    if full.num_key_value_heads == plain.num_key_value_heads:
        writer.add_head_count_kv(plain.num_key_value_heads)
    else:
        writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def gemma4_tensors(model: Any) -> dict[str, torch.Tensor]:
    config, tensors = model.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("router.scale"):
            tensors[f"{block}.ffn_gate_inp.scale"] = tensor
        elif name.endswith("per_expert_scale"):
            tensors[f"{block}.ffn_down_exps.scale"] = tensor
        else:
            stem = name.removesuffix(".weight")
            tensors[f"{names.get_name(stem)}.weight"] = tensor
    half = (
        next(
            layer.head_dim
            for layer, kind in zip(config.per_layer_config, config.layer_types, strict=True)
            if kind == "full_attention"
        )
        // 2
    )
    rotated = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return tensors | {"rope_freqs.weight": torch.tensor([1.0] * rotated + [1e30] * (half - rotated))}
