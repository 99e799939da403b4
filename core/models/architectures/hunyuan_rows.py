"""HUNYUAN_ROWS: the rows of Hunyuan's architectures; architecture_rows.py collects all rows."""

import msgspec

from core.models.architectures.architecture import Architecture, ExpertRow
from core.models.architectures.routed_rows import GGUF_EXPERTS

_NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
_DENSE = Architecture(
    name="HunYuanDenseV1ForCausalLM",
    base_name="HunYuanDenseV1Model",
    model_type="hunyuan_v1_dense",
    gguf="hunyuan-dense",
    defaults={"rms_norm_eps": 1e-5, "use_qk_norm": True},
    only={"use_qk_norm": True},
    attention_bias="as configured",
    qk_norm=True,
    qk_norm_after=True,
    ntk_alpha=True,
    names=_NORMS,
)

HUNYUAN_ROWS = (
    _DENSE,
    msgspec.structs.replace(
        _DENSE,
        name="HunYuanMoEV1ForCausalLM",
        base_name="HunYuanMoEV1Model",
        model_type="hunyuan_v1_moe",
        gguf="hunyuan-moe",
        settings={"moe_topk": "num_experts_per_tok"},
        experts=ExpertRow(size_key="intermediate_size", normalises=True, shared_size_key="intermediate_size"),
        names={
            **_NORMS,
            "mlp.router": "mlp.gate.wg",
            **{f"mlp.shared_expert.{part}_proj": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        gguf_names=GGUF_EXPERTS,
    ),
)
