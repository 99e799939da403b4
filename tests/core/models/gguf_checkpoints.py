"""GGUF files of the checkpoints of checkpoints.py, laid out by hand as llama.cpp's converter does it.

Names come from the gguf package; the order of q and k rows, the norms' offset and the metadata are written out here.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch

from tests.core.models.centred_checkpoints import (
    CENTRED_GGUF_CASES,
    centred_metadata,
    norm_eps,
    norms_of_heads,
    parts_in_turn,
)
from tests.core.models.checkpoints import Golden
from tests.core.models.gemma3n_checkpoints import GEMMA3N_CASES, gemma3n_metadata, gemma3n_tensors
from tests.core.models.gemma4_checkpoints import GEMMA4_GGUF_CASES, gemma4_metadata, gemma4_tensors
from tests.core.models.recurrent_gguf import (
    feed_forward_length,
    kv_heads,
    of_recurrent_layers,
    parts_of_qkvz,
    recurrent_metadata,
)
from tests.core.models.routed_gguf import ROUTED_GGUF_CASES, routed_metadata, special_tensors

#: Case -> llama.cpp's name of its architecture.
GGUF_CASES = {
    "llama2": "llama",
    "llama3": "llama",
    "llama-biased-linear": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3-scaled": "gemma3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "phi4-mini": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "minicpm": "minicpm",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "exaone4-full": "exaone4",
    "ministral3": "mistral3",
    "seed-oss": "seed_oss",
    "ernie4.5": "ernie4_5",
    "glm4": "glm4",
    "qwen3-moe": "qwen3moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "granite-moe": "granitemoe",
    "granite-moe-shared": "granitemoe",
    "qwen2-moe": "qwen2moe",
    "gpt-oss": "gpt-oss",
    "lfm2": "lfm2",
    "lfm2-moe": "lfm2moe",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "qwen3-next": "qwen3next",
    "granite4-hybrid": "granitehybrid",
    "granite4-hybrid-experts": "granitehybrid",
    "falcon-h1": "falcon-h1",
    "falcon-h1-normed": "falcon-h1",
    "nemotron-h": "nemotron_h",
    "nemotron-3": "nemotron_h_moe",
    "apertus": "apertus",
    **ROUTED_GGUF_CASES,
    **CENTRED_GGUF_CASES,
    **GEMMA4_GGUF_CASES,
    **dict.fromkeys(GEMMA3N_CASES, "gemma3n"),
}
#: Architectures whose rows of q and k the converter interleaves; llama.cpp rotates neighbours in these.
INTERLEAVED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "minicpm", "arcee")
INTERLEAVED += ("internlm2",)


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Row i of a head's first half is followed by row i of its second half."""
    first, second = rows.view(heads, 2, -1, *rows.shape[1:]).unbind(1)
    return torch.stack((first, second), 2).reshape(rows.shape)


def converted(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    config = model.config
    if architecture in ("gemma4", "gemma3n"):
        return gemma4_tensors(model) if architecture == "gemma4" else gemma3n_tensors(model)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    tensors = {}
    for name, tensor in norms_of_heads(model).items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or ".act_fn." in name:
            continue
        if config.model_type == "nemotron_h":  # as its files have them
            name = name.replace("model.", "backbone.", 1)
        if architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            tensor = interleaved(tensor, config.num_attention_heads if "q_" in name else config.num_key_value_heads)
        is_offset = architecture.startswith("gemma") or architecture == "nemotron"
        if is_offset and name.endswith("norm.weight"):
            tensor = tensor + 1
        if (special := special_tensors(name, tensor, config)) is not None:
            tensors |= special
            continue
        if ".experts." in name or "router" in name or ".gate.weight" in name:
            tensors |= of_gpt_oss(name, tensor) if config.model_type == "gpt_oss" else of_experts(name, tensor)
            continue
        if "in_proj_qkvz" in name:
            tensors |= parts_of_qkvz(name, tensor, config)
            continue
        name, tensor = of_recurrent_layers(name, tensor, config)
        if name.endswith((".A_log", ".D")):
            tensors[names.get_name(name)] = tensor
            continue
        name, tensor = f"{name}.weight" if name.endswith(".sinks") else name, parts_in_turn(name, tensor, config)
        stem, kind = name.rsplit(".", 1)
        whole = names.get_name(name)  # of Falcon-H1's norms, whose name in the file has no .weight
        tensors[whole or f"{names.get_name(stem)}.{kind}"] = tensor
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = divisors(config)
    if rope.get("rope_type") == "longrope":
        tensors |= {f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"]) for name in ("short", "long")}
    return tensors


def of_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The router and all experts' matrices, one tensor each."""
    block = f"blk.{name.split('.')[2]}"
    if name.endswith("gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        return {f"{block}.ffn_gate_exps.weight": gate.contiguous(), f"{block}.ffn_up_exps.weight": up.contiguous()}
    return {f"{block}.ffn_{'down_exps' if name.endswith('down_proj') else 'gate_inp'}.weight": tensor}


def of_gpt_oss(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same for matrices whose rows are inputs, and biases; the outputs of gate and up take turns."""
    block, part = f"blk.{name.split('.')[2]}", name.rsplit(".", 1)[1].removesuffix("_bias")
    kind = "bias" if "bias" in name else "weight"
    if "router" in name:
        return {f"{block}.ffn_gate_inp.{kind}": tensor}
    tensor = tensor.transpose(1, 2) if kind == "weight" else tensor
    parts = {"ffn_down_exps": tensor}
    if part == "gate_up_proj":
        parts = {"ffn_gate_exps": tensor[:, ::2], "ffn_up_exps": tensor[:, 1::2]}
    return {f"{block}.{name}.{kind}": each.contiguous() for name, each in parts.items()}


def divisors(config: Any) -> torch.Tensor:
    """What llama.cpp's converter makes of Llama 3's scaling."""
    rope, values = config.rope_parameters, []
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = float(turns > high) if low == high else min(max((turns - low) / (high - low), 0.0), 1.0)
        values.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(values)


def xielu_metadata(writer: gguf.GGUFWriter, model: Any) -> None:
    """The numbers of an Apertus's activations, which are keys."""
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        numbers = [float(getattr(layer.mlp.act_fn, name).item()) for layer in model.model.layers]
        getattr(writer, f"add_xielu_{name}")(numbers)


def metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("no name")
    if writer.arch in ("gemma4", "gemma3n"):
        (gemma4_metadata if writer.arch == "gemma4" else gemma3n_metadata)(writer, config)
        return
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(feed_forward_length(config))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads(config))
    if norm_eps(config) is None:
        name = next(name for name in ("norm_eps", "layer_norm_epsilon", "rms_norm_eps") if hasattr(config, name))
        writer.add_layer_norm_rms_eps(getattr(config, name))
    head_dim = None if hasattr(config, "kv_lora_rank") else getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        if not config.model_type.startswith("nemotron"):
            partial = config.rope_parameters.get("partial_rotary_factor", 1.0)
            writer.add_rope_dimension_count(int(head_dim * partial))
    writer.add_uint32("tokenizer.ggml.eos_token_id", config.eos_token_id)
    special_metadata(writer, config)
    if config.model_type == "nemotron_h":
        return
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    alpha = rope.get("alpha", 1.0)
    writer.add_rope_freq_base(rope["rope_theta"] * alpha ** (1.0 if head_dim is None else head_dim / (head_dim - 2)))
    if "alpha" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def special_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the converters of single architectures write."""
    kinds = getattr(config, "layer_types", None) or []
    routed_metadata(writer, config)
    centred_metadata(writer, config)
    if number := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(number)
        writer.add_expert_used_count(config.num_experts_per_tok)
    recurrent_metadata(writer, config)
    if size := getattr(config, "shared_intermediate_size", None) or getattr(
        config, "shared_expert_intermediate_size", 0
    ):
        writer.add_expert_shared_feed_forward_length(size)
    if config.model_type in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
    elif config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(2)
    elif config.model_type in ("olmo3", "exaone4", "exaone_moe") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    elif config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    elif config.model_type == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif config.model_type in ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        if writer.arch != "minicpm":
            writer.add_attention_scale(config.attention_multiplier)
    elif config.model_type == "phi3":
        rope = config.rope_parameters
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_sliding_window(config.sliding_window or 0)
        width = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] == "longrope":
            factor = math.log(config.max_position_embeddings / original) / math.log(original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + factor))


def write(path: Path, case: str, expected: Golden) -> Path:
    return write_model(path, expected.model, GGUF_CASES[case])


def write_model(
    path: Path,
    model: Any,
    architecture: str,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors,
) -> Path:
    """Write a model of transformers'. more: writes further metadata. changed: what becomes of the tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    metadata(writer, model.config)
    if architecture == "apertus":
        xielu_metadata(writer, model)
    more(writer)
    for name, tensor in changed(converted(model, architecture)).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
