"""LATENT_ROWS: the rows of architectures with latent attention; architecture_rows.py collects all rows."""

import msgspec

from core.models.architectures.architecture import NEXTN_LAYER, SIGMOID, SOFTMAX, Architecture, ExpertRow
from core.models.architectures.routed_rows import DEEPSEEK_NAMES, GGUF_EXPERTS
from core.models.architectures.sigmoid_rows import SIGMOID_EXPERTS

#: Names of latent attention.
_NAMES = {
    "self_attn.q_a_norm": "self_attn.q_a_layernorm",
    "self_attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "self_attn.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
}
_GGUF_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj": "attn_kv_a_mqa",
    "self_attn.kv_a_norm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.heads.*.k_b_proj": "attn_k_b.*",
    "self_attn.heads.*.v_b_proj": "attn_v_b.*",
}

LATENT_ROWS = (
    Architecture(
        name="DeepseekV2ForCausalLM",
        base_name="DeepseekV2Model",
        model_type="deepseek_v2",
        gguf=None,
        defaults={
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_shared_experts": 2,
            "attention_bias": False,
            "scoring_func": "softmax",
            "norm_topk_prob": False,
        },
        only={"attention_bias": False, "scoring_func": "softmax", "norm_topk_prob": False},
        interleaves_heads=True,
        latent=True,
        experts=ExpertRow(
            normalises=False, shared_count_key="n_shared_experts", scales=True, groups="group_limited_greedy"
        ),
        names={**DEEPSEEK_NAMES, **_NAMES},
    ),
    Architecture(  # llama.cpp has one name for all of DeepSeek V2 and V3, and GLM 4.7 Flash
        name="DeepseekV3ForCausalLM",
        base_name="DeepseekV3Model",
        model_type="deepseek_v3",
        gguf="deepseek2",
        defaults={
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "attention_bias": False,
            "scoring_func": "sigmoid",
            "rope_interleave": True,
        },
        only={"attention_bias": False, "scoring_func": "sigmoid", "rope_interleave": True},
        interleaves_heads=True,
        latent=True,
        experts=msgspec.structs.replace(SIGMOID_EXPERTS, gguf_gating=(SOFTMAX, SIGMOID), gguf_normalises=False),
        mtp=NEXTN_LAYER,
        further_layers=True,
        names={**DEEPSEEK_NAMES, **_NAMES},
        gguf_names={**GGUF_EXPERTS, **_GGUF_NAMES},
    ),
    Architecture(
        name="Glm4MoeLiteForCausalLM",
        base_name="Glm4MoeLiteModel",
        model_type="glm4_moe_lite",
        gguf=None,
        defaults={
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "scoring_func": "sigmoid",
            "rope_interleave": True,
        },
        only={"attention_bias": False, "scoring_func": "sigmoid", "rope_interleave": True},
        interleaves_heads=True,
        latent=True,
        experts=SIGMOID_EXPERTS,
        mtp=NEXTN_LAYER,
        further_layers=True,
        names={**DEEPSEEK_NAMES, **_NAMES},
    ),
    Architecture(
        name="MiniCPM3ForCausalLM",
        base_name="MiniCPM3Model",
        model_type="minicpm3",
        gguf=None,
        defaults={
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12.0,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "tie_word_embeddings": True,
            "attention_bias": False,
        },
        only={"attention_bias": False},
        latent=True,
        longrope=True,
        multipliers="minicpm",
        names=_NAMES,
    ),
)
