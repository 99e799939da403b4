"""Cases of checkpoints.py with routed MLPs: shared experts, scores of several kinds, groups, dense layers."""

from typing import Any

_GRANITE: dict[str, Any] = {"num_local_experts": 5, "shared_intermediate_size": 56, "residual_multiplier": 0.22}

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
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
        },
    ),
}
