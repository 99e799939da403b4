"""Tiny random checkpoints of every in-tree architecture, made by transformers, and what it makes of them.

transformers is imported when the first checkpoint is built, and each checkpoint is built once per process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.llama import Llama
from ipc.tables.arrays import Ints
from kernels.cpu.library import CpuLibrary, load_cpu_library
from kernels.elements import FLOAT32
from tests.core.models.centred_checkpoints import CENTRED_CASES
from tests.core.models.exact_delta_rule import delta_rule_in_float64
from tests.core.models.float_errors import check_errors
from tests.core.models.gemma3n_checkpoints import GEMMA3N_CASES
from tests.core.models.gemma4_checkpoints import GEMMA4_CASES
from tests.core.models.routed_checkpoints import ROUTED_CASES
from tests.core.models.test_golden import generate
from tests.core.models.test_llama import Requests

#: Of tokens. The longest passes every window below by more than a KV tile of 128 tokens.
PROMPT_LENGTHS = (5, 60, 290)
NUM_TOKENS = 10

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
#: transformers takes the short factors for prompts of at most 4 tokens, and the long ones for all of PROMPT_LENGTHS.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 4,
    "short_factor": [1.0, 1.5, 2.0, 3.0, 1.0, 1.25],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 16.0],
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

MINISTRAL_ROPE = {
    **YARN,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
OLMO_ROPE = {
    "full_attention": {**YARN, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}

DELTA = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
STATE_SPACE = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_chunk_size": 64}
FALCON = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 64}
_NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 64}
#: Name -> transformers' model_type and settings beside SIZES.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"tie_word_embeddings": False}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 16, "tie_word_embeddings": True}),
    "llama-biased-linear": (
        "llama",
        {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral-sliding": ("mistral", {"sliding_window": 131}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-biased": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "rope_parameters": {**YARN, "attention_factor": 0.9, "beta_fast": 16}},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 100, "query_pre_attn_scalar": 20}),
    "gemma3-scaled": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 40,
            "rope_parameters": GEMMA_ROPE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 100,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi3": ("phi3", {"max_position_embeddings": 512, "sliding_window": 131}),
    "phi4-mini": (
        "phi3",
        {
            "hidden_size": 64,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 4,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": (
        "granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.4, "logits_scaling": 3.0},
    ),
    "granite4-dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.22,
            "mamba_n_heads": 4,
        },
    ),
    "minicpm": (  # transformers has no MiniCPM: the same arithmetic, with the usual scale of scores
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 3**0.5,
            "attention_multiplier": 12**-0.5,
            "logits_scaling": 3.0,
        },
    ),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 100, "num_hidden_layers": 4, "rope_parameters": OLMO_ROPE}),
    "exaone4": ("exaone4", {"sliding_window": 100, "sliding_window_pattern": 2, "rope_parameters": LLAMA3}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ministral": (
        "ministral",
        {"head_dim": 16, "sliding_window": 100, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL_ROPE}),
    "seed-oss": ("seed_oss", {"head_dim": 16}),
    "ernie4.5": ("ernie4_5", {"head_dim": 16}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe with a dense layer": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "granite-moe": (
        "granitemoe",
        {"num_local_experts": 5, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 100,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "glm": ("glm", {"head_dim": 16}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8}),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
        },
    ),
    "qwen3.5": ("qwen3_5_text", {"num_hidden_layers": 4, "head_dim": 16, **DELTA}),
    "granite4-hybrid": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "residual_multiplier": 0.22,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.4,
            "logits_scaling": 3.0,
            **STATE_SPACE,
        },
    ),
    "granite4-hybrid-experts": (
        "granitemoehybrid",
        {
            "num_local_experts": 4,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "residual_multiplier": 0.22,
            "position_embedding_type": "rope",
            **STATE_SPACE,
            "mamba_n_groups": 2,
        },
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", {"num_hidden_layers": 4, "head_dim": 16, **DELTA, **SHARED_EXPERTS}),
    "qwen3-next": ("qwen3_next", {"num_hidden_layers": 4, "head_dim": 16, **DELTA, **SHARED_EXPERTS}),
    "lfm2-biased": (
        "lfm2",
        {
            "full_attn_idxs": [2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "glm4": ("glm4", {"head_dim": 20}),
    "lfm3": (
        "lfm3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": 100,
        },
    ),
    "granite-swa": (
        "granite_swa",
        {
            "num_hidden_layers": 4,
            "sliding_window": 100,
            "layer_rope_theta": [0, 1e4, 1e4, 1e4],
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
        },
    ),
    "granite-swa with two thetas": (
        "granite_swa",
        {"sliding_window": 100, "layer_rope_theta": [3e5, 1e4, 1e4], "attention_multiplier": 0.4},
    ),
    "granite-moe-swa": (
        "granitemoe_swa",
        {
            "sliding_window": 100,
            "layer_rope_theta": [0, 1e4, 1e4],
            "num_local_experts": 5,
            "shared_intermediate_size": 24,
            "residual_multiplier": 0.3,
        },
    ),
    "apertus": ("apertus", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "olmo-hybrid": (  # transformers saves the convolution's channels in three equal parts, whatever their sizes
        "olmo_hybrid",
        {
            "num_hidden_layers": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "rope_parameters": None,
        },
    ),
    "nemotron-3": (
        "nemotron_h",
        {
            "head_dim": 12,
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            **_NEMOTRON,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "head_dim": 16,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            **_NEMOTRON,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            "head_dim": 16,
            **FALCON,
            "mamba_n_groups": 2,
            "attention_in_multiplier": 0.75,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.4,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.7, 0.5, 0.6, 0.9, 0.4],
            "mlp_multipliers": [0.8, 0.6],
            "embedding_multiplier": 5.5,
            "lm_head_multiplier": 0.3,
        },
    ),
    "falcon-h1-normed": ("falcon_h1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 40,
            "intermediate_size_mlp": 80,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [1, 3],
            "rope_parameters": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        },
    ),
    "llama4-without-norms": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size": 40,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "use_qk_norm": False,
            "no_rope_layers": [1, 0, 1],
        },
    ),
    "mellum2": (
        "mellum",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "sliding_window": 100,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    **ROUTED_CASES,
    **CENTRED_CASES,
    **GEMMA4_CASES,
    **GEMMA3N_CASES,
}


class Golden(NamedTuple):
    model: Any  # transformers', float32
    prompts: list[Ints]
    exact: list[torch.Tensor]  # [tokens, vocab] float64 logits of each prompt
    errors: list[torch.Tensor]  # transformers' float32 error


def build(case: str, **other: Any) -> Any:
    import transformers

    model_type, settings = CASES[case]
    settings = {**SIZES, **settings, **other}
    config = transformers.AutoConfig.for_model(model_type, **settings, attn_implementation="eager")
    # The other implementations of experts have no float64.
    is_routed = any(hasattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    options = {"experts_implementation": "eager"} if is_routed else {}
    return with_random_weights(transformers.AutoModelForCausalLM.from_config(config, **options).eval())


@torch.no_grad()
def with_random_weights(model: Any, seed: int = 11) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        numbers = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_(parameter + 0.3 * numbers if "norm" in name else 0.5 * numbers)
        else:
            parameter.copy_(numbers * 1.5 * parameter.shape[-1] ** -0.5)
    for name, correction in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            correction.copy_(torch.randn(correction.shape, generator=generator) * 0.3)
        if name.endswith("layer_scalar"):
            correction.copy_(1 + torch.randn(correction.shape, generator=generator) * 0.3)
    return model


_GOLDENS: dict[str, Golden] = {}


def golden(case: str) -> Golden:
    if case not in _GOLDENS:
        _GOLDENS[case] = golden_of(build(case))
    return _GOLDENS[case]


def golden_of(model: Any) -> Golden:
    """What transformers makes of the model, in float32 and in float64."""
    prompts = [np.random.default_rng(n).integers(3, SIZES["vocab_size"], n) for n in PROMPT_LENGTHS]  # type: ignore[call-overload]
    with torch.inference_mode():
        theirs = [model(torch.from_numpy(ids)[None]).logits[0] for ids in prompts]
        model.double()
        with delta_rule_in_float64(model):
            exact = [model(torch.from_numpy(ids)[None]).logits[0] for ids in prompts]
        model.float()
    errors = [(mine - truth).abs() for mine, truth in zip(theirs, exact, strict=True)]
    return Golden(model, prompts, exact, errors)


def our_logits(
    path: Path, prompts: list[Ints], *, library: CpuLibrary | None = None, **wrong: Any
) -> list[torch.Tensor]:
    """Compute logits in chunks, all prompts at once. library: None = torch's operations; wrong: changed fields.

    Hidden states in streams need the C kernels.
    """
    config = msgspec.structs.replace(read_model_config(path), **wrong)
    library = library if config.streams is None else load_cpu_library()
    model = Llama(config, load_weights(path, config, FLOAT32), FLOAT32, library=library)
    requests = Requests(model, prompts)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while left := {i: min(len(p) - requests.done[i], 170) for i, p in enumerate(prompts) if requests.done[i] < len(p)}:
        for index, logits in requests.step(left).items():
            parts[index].append(logits)
    return [torch.cat(each) for each in parts]


def check_greedy(path: Path, expected: Golden) -> None:
    """transformers' choice at every position, given the tokens before it, is the token that follows."""
    prompts = [ids.tolist() for ids in expected.prompts]
    for prompt, tokens in zip(prompts, generate(path, prompts, NUM_TOKENS), strict=True):
        assert len(tokens) == NUM_TOKENS
        with torch.inference_mode():
            logits = expected.model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens


def check_logits(path: Path, expected: Golden, libraries: Sequence[CpuLibrary | None] = ()) -> None:
    """The error against float64 is at most twice transformers' own in float32, with the C kernels and with torch's, or
    with those that are named.

    Of gated delta nets the numbers vary most. If a query and a key nearly cancel, single numbers lose more, in
    transformers' sums as in ours: with six seeds of weights of each architecture our largest errors were 0.3 to 3.1 of
    theirs, the root mean squares 0.7 to 1.9.
    """
    for library in libraries or (load_cpu_library(), None):
        ours = our_logits(path, expected.prompts, library=library)
        errors = [(logits - exact).abs() for logits, exact in zip(ours, expected.exact, strict=True)]
        check_errors(torch.cat(errors), torch.cat(expected.errors))
