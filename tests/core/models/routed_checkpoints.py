"""Cases of checkpoints.py with routed MLPs: shared experts, scores of several kinds, groups, dense layers."""

from typing import Any

_GRANITE: dict[str, Any] = {"num_local_experts": 5, "shared_intermediate_size": 56, "residual_multiplier": 0.22}

_CHOICE: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_SIGMOIDS: dict[str, Any] = {
    **_CHOICE,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

_PARTIAL: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
#: A power of 128 that is exact: a GGUF file has the product of theta and 128 ** (16 / 14) as float32.
_ALPHA: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 128.0, "factor": 1.0}

#: Name -> transformers' model_type and settings beside SIZES.
ROUTED_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite-moe-shared": ("granitemoeshared", {**_GRANITE, "logits_scaling": 3.0}),
    "granite4-experts": (
        "granitemoehybrid",
        {
            **_GRANITE,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
        },
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": _ALPHA, "tie_word_embeddings": True}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"head_dim": 16, "attention_bias": True, "num_experts": 6, "moe_topk": 3}),
    "minimax-m2": (
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": _PARTIAL},
    ),
    "solar-open": ("solar_open", {**_SIGMOIDS, "first_k_dense_replace": 0, "head_dim": 16, "attention_bias": True}),
    "exaone-moe": (
        "exaone_moe",
        {
            **{
                name: value for name, value in _SIGMOIDS.items() if name not in ("n_routed_experts", "n_shared_experts")
            },
            "num_experts": 8,
            "num_shared_experts": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 100,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "flex-olmo": ("flex_olmo", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
        },
    ),
    "glm4-moe": ("glm4_moe", {**_SIGMOIDS, **_GROUPS, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
    "glm4.5-air": ("glm4_moe", {**_SIGMOIDS, "head_dim": 16, "attention_bias": True}),
    "dots1": ("dots1", {**_SIGMOIDS, "head_dim": 16, "sliding_window": None}),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {"head_dim": 16, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**_LATENT, **_CHOICE, "q_lora_rank": None, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_LATENT,
            **_CHOICE,
            **_GROUPS,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_LATENT,
            **_SIGMOIDS,
            **_GROUPS,
            "q_lora_rank": 20,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4.7-flash": ("glm4_moe_lite", {**_LATENT, **_SIGMOIDS, "q_lora_rank": 20, "v_head_dim": 14}),
    "minicpm3": (
        "minicpm3",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "v_head_dim": 12,
            "dim_model_base": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        },
    ),
}
