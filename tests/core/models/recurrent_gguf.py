"""What llama.cpp's converter does with layers that have a recurrent state; a part of gguf_checkpoints.py."""

from typing import Any

import gguf
import torch


def feed_forward_length(config: Any) -> Any:
    """Of each layer, where some have no MLP."""
    size: int = getattr(config, "intermediate_size_mlp", config.intermediate_size)
    if config.model_type == "nemotron_h":
        sizes = {"moe": config.moe_intermediate_size, "mlp": size}
        return [sizes.get(kind, 0) for kind in config.layers_block_type]
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
    if config.model_type == "nemotron_h":
        return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layers_block_type]
    return config.num_key_value_heads


def multiplied(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """A Falcon-H1's tensor with the factors of its inputs and results."""
    if config.model_type != "falcon_h1":
        return tensor
    part = name.rsplit(".", 2)[-2]
    before = config.attention_in_multiplier
    factors = {
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
        "q_proj": before,
        "k_proj": before * config.key_multiplier,
        "v_proj": before,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
    }
    if part == "in_proj":
        inner, keys = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        widths = torch.tensor([inner, inner, keys, keys, config.mamba_n_heads])
        own = torch.tensor(config.ssm_multipliers).repeat_interleave(widths)
        return tensor * config.ssm_in_multiplier * own[:, None]
    return tensor * factors.get(part, 1.0)


def of_recurrent_layers(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    """The name and the tensor that are converted; of other layers nothing changes."""
    if "conv" in name and tensor.dim() == 3:
        tensor = tensor.squeeze(1)
    tensor = multiplied(name, tensor, config)
    if config.model_type.startswith("qwen3_5"):
        tensor = in_turns(name, tensor, config)
    is_centred = config.model_type.startswith(("qwen3_5", "qwen3_next"))
    if is_centred and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if (".mamba." in name or config.model_type == "nemotron_h") and name.endswith((".A_log", ".D")):
        tensor = tensor[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.reshape(config.n_groups if "mixer" in name else config.mamba_n_groups, -1)
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


def state_space(writer: gguf.GGUFWriter, taps: int, state: int, groups: int, heads: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)


def recurrent_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "nemotron_h":
        state_space(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        writer.add_rope_scaling_finetuned(False)
        if "moe" in config.layers_block_type:
            writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    if is_hybrid(config) or config.model_type == "falcon_h1":
        sizes = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads
        state_space(writer, *sizes)
        inner = getattr(config, "mamba_d_ssm", None)
        writer.add_ssm_inner_size(inner or config.mamba_expand * config.hidden_size)
    if is_hybrid(config):
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.model_type.startswith(("qwen3_5", "qwen3_next")):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
