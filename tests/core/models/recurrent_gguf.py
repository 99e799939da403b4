"""What llama.cpp's converter does with layers that have a recurrent state; a part of gguf_checkpoints.py."""

from typing import Any

import gguf
import torch


def feed_forward_length(config: Any) -> int:
    size: int = config.intermediate_size
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        unit = config.block_multiple_of
        size = -(-int(config.block_ffn_dim_multiplier * int(2 * size / 3)) // unit) * unit
    if is_hybrid(config) and not config.num_local_experts:
        size = config.shared_intermediate_size
    return size


def is_hybrid(config: Any) -> bool:
    return config.model_type == "granitemoehybrid" and "linear_attention" in config.layer_types


def kv_heads(config: Any) -> Any:
    """Of each layer, where some have none."""
    if config.model_type.startswith("lfm2") or is_hybrid(config):
        return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return config.num_key_value_heads


def of_recurrent_layers(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    """The name and the tensor that are converted; of other layers nothing changes."""
    if "conv" in name and tensor.dim() == 3:
        tensor = tensor.squeeze(1)
    if config.model_type.startswith("qwen3_5"):
        tensor = in_turns(name, tensor, config)
    is_centred = config.model_type.startswith(("qwen3_5", "qwen3_next"))
    if is_centred and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if ".mamba." in name and name.endswith((".A_log", ".D")):
        tensor = tensor[:, None]
    if name.endswith("mamba.norm.weight"):
        tensor = tensor.reshape(config.mamba_n_groups, -1)
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(
        "feed_forward.expert_bias", "feed_forward.expert_bias.bias"
    )
    return name, tensor.contiguous()


def in_turns(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """A gated delta net's tensor with its heads of values in turns over the heads of keys."""
    groups, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    keys = 2 * groups * config.linear_key_head_dim

    def turned(rows: torch.Tensor, size: int) -> torch.Tensor:
        return rows.reshape(groups, heads // groups, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    if "linear_attn" not in name or name.endswith(".norm.weight"):
        return tensor
    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:keys], turned(tensor[keys:], width)))
    if "out_proj" in name:
        return turned(tensor.T, width).T
    return turned(tensor, width if "in_proj_z" in name else 1)


def parts_of_qkvz(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Qwen3-Next's in_proj_qkvz, whose groups of heads have a part of each, as two matrices."""
    groups, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // groups * config.linear_value_head_dim
    parts = tensor.view(groups, -1, tensor.shape[1]).split([key_dim, key_dim, each, each], 1)
    q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
    block = f"blk.{name.split('.')[2]}"
    return {f"{block}.attn_qkv.weight": torch.cat((q, k, v)), f"{block}.attn_gate.weight": z}


def recurrent_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if is_hybrid(config):
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.model_type.startswith(("qwen3_5", "qwen3_next")):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
