"""Checkpoints with layer normalisations, MLPs without gates or beside attention, and of relatives of Llama."""

from typing import Any

import gguf
import torch

_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}
#: No wavelength is between the bounds: the divisors in a GGUF file, which are float32, are exact.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.5,
    "original_max_position_embeddings": 64,
}
#: See CASES of checkpoints.py.
CENTRED_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", {"hidden_size": 64, "rope_parameters": _PARTIAL, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"hidden_size": 64, "rope_parameters": _PARTIAL, "use_parallel_residual": True}),
    "stablelm-head-norms": (
        "stablelm",
        {"hidden_size": 64, "rope_parameters": _PARTIAL, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-sliding": ("starcoder2", {"sliding_window": 100, "use_bias": False}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere-head-norms": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 100, "logit_scale": 0.25}),
    "nemotron": ("nemotron", {"head_dim": 16, "rope_parameters": _PARTIAL}),
    "phi": ("phi", {"hidden_size": 64, "rope_parameters": _PARTIAL}),
    "gpt2": ("gpt2", {"num_key_value_heads": 4, "n_positions": 1024, "n_inner": None}),
    "gpt-neox": ("gpt_neox", {"hidden_size": 64, "num_key_value_heads": 4, "rope_parameters": _PARTIAL}),
    "gpt-neox-in-turn": (
        "gpt_neox",
        {
            "hidden_size": 64,
            "num_key_value_heads": 4,
            "rope_parameters": _PARTIAL,
            "use_parallel_residual": False,
            "hidden_act": "gelu_new",
        },
    ),
    "arcee": ("arcee", {"mlp_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "exaone": ("exaone", {"head_dim": 16, "rope_parameters": _LLAMA3}),
    "internlm3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": _DYNAMIC}),
}
#: Case -> llama.cpp's name of its architecture.
CENTRED_GGUF_CASES = {
    "stablelm": "stablelm",
    "stablelm-parallel": "stablelm",
    "stablelm-head-norms": "stablelm",
    "starcoder2": "starcoder2",
    "cohere": "command-r",
    "cohere-head-norms": "command-r",
    "cohere2": "cohere2",
    "nemotron": "nemotron",
    "phi": "phi2",
    "gpt-neox": "gptneox",
    "arcee": "arcee",
    "exaone": "exaone",
}


def norm_eps(config: Any) -> float | None:
    """The eps of layer normalisations; None for a model with others."""
    names = ("layer_norm_eps", "norm_epsilon", *(("norm_eps",) if config.model_type == "nemotron" else ()))
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


def centred_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """What the converters of these architectures write."""
    if (eps := norm_eps(config)) is not None:
        writer.add_layer_norm_eps(eps)
    if config.model_type in ("stablelm", "nemotron", "phi", "gpt_neox"):
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
    if config.model_type in ("stablelm", "gpt_neox"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type.startswith("cohere"):
        writer.add_logit_scale(config.logit_scale)
    if config.model_type == "cohere2":
        writer.add_sliding_window(config.sliding_window)


def norms_of_heads(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors; the norms of StableLM's heads are one tensor in GGUF files, as Cohere's are everywhere."""
    tensors: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        stem, found, _ = name.partition(".norms.")
        if found:
            stacks.setdefault(f"{stem}.weight", []).append(tensor)
        else:
            tensors[name] = tensor
    return tensors | {name: torch.stack(stack) for name, stack in stacks.items()}


def parts_in_turn(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """The rows of Q, then of K, then of V, where a model has these head by head."""
    if "query_key_value" not in name:
        return tensor
    heads = config.num_attention_heads
    return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape).contiguous()
