"""Tiny random checkpoints of Gemma 3n, and their GGUF files, laid out by hand as llama.cpp's converter does it."""

import math
from statistics import NormalDist
from typing import Any

import gguf
import torch

_KINDS = ["sliding_attention", "full_attention"]
_SIZES: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 100,
    "num_hidden_layers": 6,
    "layer_types": [*_KINDS, "sliding_attention", *_KINDS, "full_attention"],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 290,  # of 300 tokens; the others have the inputs of the first one
    "laurel_rank": 16,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
}
#: Name -> transformers' model_type and settings beside checkpoints.SIZES.
GEMMA3N_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("gemma3n_text", {**_SIZES, "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.95, 0.0, 0.0]}),
    "gemma3n with three streams": (
        "gemma3n_text",
        {**_SIZES, "altup_num_inputs": 3, "altup_active_idx": 1, "activation_sparsity_pattern": [0.0] * 6},
    ),
}


def gemma3n_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_uint32("tokenizer.ggml.eos_token_id", config.eos_token_id)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    shares = config.activation_sparsity_pattern
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(one) if one else -math.inf for one in shares])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def gemma3n_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors: those of streams but the first are one, and tokens without inputs of their own get some.

    The converter pads the table with zeros; here tokens have what transformers gives them.
    """
    config, tensors = model.config, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, config.num_hidden_layers)
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name.startswith(("model.altup_projections", "model.altup_unembed_projections")):
            stacks.setdefault(name.split(".")[1], []).append(tensor)
            continue
        if name == "model.embed_tokens_per_layer.weight":
            tensor = torch.cat((tensor, tensor[:1].repeat(config.vocab_size - len(tensor), 1)))
        tensors[f"{names.get_name(name.removesuffix('.weight'))}.weight"] = tensor
    return tensors | {f"{names.get_name(f'model.{name}')}.weight": torch.stack(each) for name, each in stacks.items()}
