"""GGUF files of the checkpoints of routed_checkpoints.py: what their converters write beside the usual.

The matrices of K and V of latent attention are one tensor for "deepseek-v2-lite", and two for "deepseek-v3".
"""

from typing import Any

import gguf
import torch

#: Case -> llama.cpp's name of its architecture.
ROUTED_GGUF_CASES = {
    "glm4-moe": "glm4moe",
    "glm4.5-air": "glm4moe",
    "dots1": "dots1",
    "ernie4.5-moe": "ernie4_5-moe",
    "deepseek-v2-lite": "deepseek2",
    "deepseek-v2": "deepseek2",
    "deepseek-v3": "deepseek2",
    "glm4.7-flash": "deepseek2",
    "minimax-m2": "minimax-m2",
    "solar-open": "glm4moe",
    "exaone-moe": "exaone-moe",
    "hunyuan-dense": "hunyuan-dense",
    "hunyuan-moe": "hunyuan-moe",
    "llama4": "llama4",
}


def special_tensors(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    """The file's tensors of one of the model's; None: it has the usual name."""
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    is_llama4 = config.model_type == "llama4_text"
    if is_llama4 and ".feed_forward.experts." in name:  # these are [experts, in, out]
        parts = ("gate", "up") if "gate_up_proj" in name else ("down",)
        halves = tensor.transpose(1, 2).chunk(len(parts), 1)
        return {f"{block}.ffn_{part}_exps.weight": half.contiguous() for part, half in zip(parts, halves, strict=True)}
    if is_llama4 and "feed_forward.router" in name:
        return {f"{block}.ffn_gate_inp.weight": tensor}
    if "e_score_correction" in name:
        return {f"{block}.exp_probs_b.bias": tensor.flatten()}
    if "mixer.experts" in name:
        return {f"{block}.ffn_{'up' if 'up_proj' in name else 'down'}_exps.weight": tensor}
    if "shared_mlp" in name and "linear" in name:  # an only MLP where there are no experts
        ending = "_shexp" if config.num_local_experts else ""
        if "output_linear" in name:
            return {f"{block}.ffn_down{ending}.weight": tensor}
        halves = zip(("gate", "up"), tensor.chunk(2), strict=True)
        return {f"{block}.ffn_{part}{ending}.weight": half for part, half in halves}
    if "kv_b_proj" in name and config.q_lora_rank is not None:
        heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = torch.split(heads, [config.qk_nope_head_dim, config.v_head_dim], 1)
        return {
            f"{block}.attn_k_b.weight": keys.transpose(1, 2).contiguous(),
            f"{block}.attn_v_b.weight": values.contiguous(),
        }
    if config.model_type in ("glm4_moe", "solar_open") and "post_attention_layernorm" in name:
        return {f"{block}.post_attention_norm.weight": tensor}
    return None


def routed_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """What describes experts, and latent attention."""
    if getattr(config, "kv_lora_rank", None) is not None:
        latent_metadata(writer, config)
    if config.model_type == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "llama4_text":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(2)
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(1)
    count = (
        getattr(config, "n_shared_experts", None)
        or getattr(config, "num_shared_experts", None)
        or getattr(config, "moe_num_shared_experts", None)
    )
    if count is None:
        return
    writer.add_expert_shared_count(count)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "ernie4_5_moe":
        return
    is_sigmoid = config.model_type != "deepseek_v2"
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(is_sigmoid)
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if is_sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
    )
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def latent_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is None:  # as older files have it
        writer.add_key_length(width)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(width)
        writer.add_value_length_mla(config.v_head_dim)
    if (scale := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
