"""ROUTED_ROWS: the rows of architectures with routed MLPs; core/models/architecture_rows.py has all."""

import msgspec

from core.models.architecture import SOFTMAX_OF_CHOSEN, Architecture, ExpertRow

#: Defaults of the windows of all Qwen models.
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

#: GGUF's names of routed MLPs.
_GGUF_EXPERTS = {
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps.*",
    "mlp.experts.*.up_proj": "ffn_up_exps.*",
    "mlp.experts.*.down_proj": "ffn_down_exps.*",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.router_correction": "exp_probs_b",
}

_GRANITE_MOE = Architecture(
    name="GraniteMoeForCausalLM",
    base_name="GraniteMoeModel",
    model_type="granitemoe",
    gguf="granitemoe",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    attention_bias="as configured",
    gguf_interleaves_heads=True,
    multipliers="granite",
    fused_gate_up=True,
    experts=ExpertRow(size_key="intermediate_size", normalises=True, shared_size_key="shared_intermediate_size"),
    names={
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.*.gate_up_proj": "block_sparse_moe.input_linear.*",
        "mlp.experts.*.down_proj": "block_sparse_moe.output_linear.*",
        "mlp.shared_expert.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    },
    gguf_names=_GGUF_EXPERTS,
)

ROUTED_ROWS = (
    Architecture(
        name="GptOssForCausalLM",
        base_name="GptOssModel",
        model_type="gpt_oss",
        gguf="gpt-oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        only={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        activation_key=None,  # hidden_act says silu
        activation="clamped_silu",
        attention_bias="as configured",
        attention_sinks=True,
        sliding="by sliding_window_pattern",
        rope_theta=150_000.0,
        gguf_yarn_truncates=False,
        fused_gate_up=True,
        experts=ExpertRow(
            size_key="intermediate_size",
            normalises=True,
            gguf_gating=(SOFTMAX_OF_CHOSEN,),
            has_biases=True,
            is_turned=True,
        ),
        gguf_names={
            **_GGUF_EXPERTS,
            "self_attn.sinks": "attn_sinks",
            "post_attention_layernorm": "post_attention_norm",
        },
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        base_name="Qwen3MoeModel",
        model_type="qwen3_moe",
        gguf="qwen3moe",
        defaults={"num_key_value_heads": 4, **QWEN_WINDOW},
        attention_bias="as configured",
        sliding="from max_window_layers",
        qk_norm=True,
        experts=ExpertRow(),
        names={"mlp.router": "mlp.gate"},
        gguf_names=_GGUF_EXPERTS,
    ),
    Architecture(
        name="MixtralForCausalLM",
        base_name="MixtralModel",
        model_type="mixtral",
        gguf=None,
        defaults={"num_key_value_heads": 8, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
        sliding="all",
        rope_theta=1_000_000.0,
        gguf_interleaves_heads=True,
        experts=ExpertRow(size_key="intermediate_size", normalises=True, gguf="llama"),
        names={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.experts.*.gate_proj": "block_sparse_moe.experts.*.w1",
            "mlp.experts.*.up_proj": "block_sparse_moe.experts.*.w3",
            "mlp.experts.*.down_proj": "block_sparse_moe.experts.*.w2",
        },
        gguf_names=_GGUF_EXPERTS,
    ),
    Architecture(
        name="OlmoeForCausalLM",
        base_name="OlmoeModel",
        model_type="olmoe",
        gguf="olmoe",
        defaults={"num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
        attention_bias="as configured",
        qk_norm=True,
        qk_norm_of_rows=True,
        experts=ExpertRow(size_key="intermediate_size", gguf_normalises=False),
        names={"mlp.router": "mlp.gate"},
        gguf_names=_GGUF_EXPERTS,
    ),
    _GRANITE_MOE,
    msgspec.structs.replace(
        _GRANITE_MOE,
        name="GraniteMoeSharedForCausalLM",
        base_name="GraniteMoeSharedModel",
        model_type="granitemoeshared",
        gguf=None,
    ),
    Architecture(  # without recurrent layers; GGUF files of those without experts are granite's
        name="GraniteMoeHybridForCausalLM",
        base_name="GraniteMoeHybridModel",
        model_type="granitemoehybrid",
        gguf=None,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
        size_key="shared_intermediate_size",
        attention_bias="as configured",
        unrotated="by position_embedding_type",
        multipliers="granite",
        fused_gate_up=True,
        experts=_GRANITE_MOE.experts,
        names={
            **_GRANITE_MOE.names,
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        },
    ),
    Architecture(
        name="Qwen2MoeForCausalLM",
        base_name="Qwen2MoeModel",
        model_type="qwen2_moe",
        gguf="qwen2moe",
        defaults={
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
            "use_sliding_window": False,
            "qkv_bias": True,
        },
        only={"use_sliding_window": False, "qkv_bias": True},
        attention_bias="qkv",
        experts=ExpertRow(
            gguf_normalises=False, shared_size_key="shared_expert_intermediate_size", has_shared_gate=True
        ),
        names={"mlp.router": "mlp.gate"},
        gguf_names=_GGUF_EXPERTS,
    ),
)
