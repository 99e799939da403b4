"""KINDS: tiny models that differ in what changes attention, rotation, the MLP or the head; and their weights."""

from typing import Any

import msgspec
import numpy as np
import pytest

from core.model_files.tensors.weight_shapes import expected_shapes
from core.models.config import (
    ExpertParts,
    HeadSizes,
    LatentParts,
    ModelConfig,
    PerLayerParts,
    RecurrentParts,
    StreamParts,
)
from core.models.layers.rope_scaling import LinearScaling, Llama3Scaling, ProportionalScaling, YarnScaling
from kernels.elements import Dtype, Numbers, rounded

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=500,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(0,),
    dtype="float32",
)

_MULTIPLIERS: dict[str, Any] = {"residual_multiplier": 0.4, "embedding_multiplier": 5.0, "logits_multiplier": 0.5}
_MULTIPLIERS |= {"unrotated_layers": (1,), "rotary_dim": 12}
_ROW_NORMS: dict[str, Any] = {"qk_norm": True, "qk_norm_of_rows": True, "sliding_window": 90, "sliding_layers": (1,)}
_EXPERTS = ExpertParts(num_experts=9, num_chosen=3, intermediate_size=80, normalises=True, dense_layers=(1,))
_CHOICE: dict[str, Any] = {"is_sigmoid": True, "has_correction": True, "scaling": 1.5, "dense_layers": (0,)}
_CHOICE |= {"num_groups": 3, "num_chosen_groups": 2, "best_of_group": 2}
_SHARED = msgspec.structs.replace(_EXPERTS, shared_size=72, has_shared_gate=True, **_CHOICE)
_SINKS: dict[str, Any] = {"attention_sinks": True, "hidden_act": "clamped_silu", "qkv_bias": True, "output_bias": True}
_SINKS |= {"sliding_window": 90, "sliding_layers": (0, 2)}
_SINKS |= {"experts": msgspec.structs.replace(_EXPERTS, has_biases=True, dense_layers=())}

_LATENT = LatentParts(query_dim=None, latent_dim=64, plain_dim=20, rotated_dim=8, value_dim=32)
_ONE_HEAD: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 72, "query_pre_attn_scalar": 28.0}

_CONVOLUTION = RecurrentParts(kind="short convolution", layers=(0, 2), taps=3, channels=96, has_bias=True)
#: Heads of values that are wider than a strip of the kernel, and no multiple of it.
_HEADS: dict[str, Any] = {"taps": 4, "num_heads": 4, "num_groups": 2, "key_dim": 16, "value_dim": 40}
_DELTA = RecurrentParts(kind="gated delta", layers=(0, 1), channels=2 * 2 * 16 + 4 * 40, **_HEADS)
_STATE_SPACE = RecurrentParts(kind="state space", layers=(1, 2), channels=2 * 2 * 16 + 4 * 40, has_bias=True, **_HEADS)

_INPUTS = ("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")

#: Two layers without MLPs, which read the same; a routed MLP without gates, and a table of positions.
_WITHOUT_MLPS: dict[str, Any] = {"file_layers": ((0, 1), (2, -1), (2, -1)), "is_gated": False, "hidden_act": "relu2"}
_WITHOUT_MLPS |= {
    "experts": msgspec.structs.replace(_SHARED, has_shared_gate=False, dense_layers=()),
    "position_table": True,
}

#: Layer normalisations with biases; MLPs without gates that read what attention reads.
_BESIDE: dict[str, Any] = {"residual": "parallel", "centred_norms": True, "norm_bias": True, "hidden_act": "relu2"}
_BESIDE |= {"is_gated": False, "mlp_bias": True, "head_bias": True, "tie_word_embeddings": False}

#: Gemma 4's layers: two sizes of heads, the last layers read K and V of others and have wide MLPs, inputs of their own.
_OWN_LAYERS: dict[str, Any] = {"num_hidden_layers": 6, "sliding_layers": (0, 1, 3, 4), "sliding_window": 90}
_OWN_LAYERS |= {"full_heads": HeadSizes(1, 40), "qk_norm": True, "post_norms": True, "value_norm": True}
_OWN_LAYERS |= {"layer_scales": True, "query_pre_attn_scalar": 1.0, "hidden_act": "gelu_pytorch_tanh"}
_OWN_LAYERS |= {"sliding_rope_theta": 1000.0, "rope_scaling": ProportionalScaling(2.0, 5)}
_SHARED_LAYERS: dict[str, Any] = {**_OWN_LAYERS, "num_shared_layers": 3, "wide_mlps": True}
_SHARED_LAYERS |= {"per_layer": PerLayerParts(width=24, vocab_size=600)}
_ROUTED_LAYERS: dict[str, Any] = {**_OWN_LAYERS, "full_keys_are_values": True, "num_hidden_layers": 3}
_ROUTED_LAYERS |= {
    "sliding_layers": (0, 1),
    "experts": msgspec.structs.replace(_EXPERTS, dense_layers=(), has_scales=True, beside_dense=True),
}

#: Gemma 3n's layers: hidden states in streams, sparse gates, the last layers read K and V of others.
_STREAMS: dict[str, Any] = {"num_hidden_layers": 4, "sliding_layers": (0, 2), "sliding_window": 90, "qk_norm": True}
_STREAMS |= {"num_shared_layers": 2, "post_norms": True, "value_norm": True, "hidden_act": "gelu_pytorch_tanh"}
_STREAMS |= {"streams": StreamParts(count=4, active=0, scales_active=True, rank=16), "sliding_rope_theta": 1000.0}
_STREAMS |= {"sparse_gates": (1.3, None, 0.0, 1.6), "per_layer": PerLayerParts(width=24, vocab_size=400)}

#: What changes attention, rotation or the head, by name. Windows end within KV tiles of 128 tokens and blocks of 16;
#: scalings begin within the prompt.
KINDS: dict[str, ModelConfig] = {
    "plain": TINY,
    "untied head": msgspec.structs.replace(TINY, tie_word_embeddings=False),
    "llama3 rope": msgspec.structs.replace(TINY, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64.0)),
    "yarn rope": msgspec.structs.replace(TINY, rope_scaling=YarnScaling(4.0, 64.0, 1.2), query_growth=0.2),
    "sliding window": msgspec.structs.replace(TINY, sliding_window=90, sliding_layers=(0, 1, 2), qkv_bias=True),
    "head norms": msgspec.structs.replace(TINY, qk_norm=True, head_dim=24, output_bias=True),
    "local and global": msgspec.structs.replace(
        TINY,
        sliding_window=139,
        sliding_layers=(0, 2),
        sliding_rope_theta=1000.0,
        rope_scaling=LinearScaling(8.0),
        query_pre_attn_scalar=40.0,
        hidden_act="gelu_pytorch_tanh",
        head_dim=32,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        scale_embeddings=True,
    ),
    "soft caps": msgspec.structs.replace(TINY, scores_cap=2.0, logits_cap=3.0, **_MULTIPLIERS),
    "norms after": msgspec.structs.replace(TINY, pre_norms=False, post_norms=True, **_ROW_NORMS),
    "experts": msgspec.structs.replace(TINY, experts=_EXPERTS),
    "shared experts": msgspec.structs.replace(TINY, experts=_SHARED),
    "sinks": msgspec.structs.replace(TINY, **_SINKS),
    "latent attention": msgspec.structs.replace(TINY, latent=_LATENT, **_ONE_HEAD),
    "latent queries": msgspec.structs.replace(
        TINY,
        latent=msgspec.structs.replace(_LATENT, query_dim=36),
        rope_scaling=YarnScaling(4.0, 64.0, 1.0),
        experts=msgspec.structs.replace(_SHARED, has_shared_gate=False, scales_inputs=True),
        **_ONE_HEAD,
    ),
    "short convolution": msgspec.structs.replace(TINY, recurrent=_CONVOLUTION),
    "gated delta": msgspec.structs.replace(TINY, recurrent=_DELTA, output_gate=True, qkv_bias=True, qk_norm=True),
    "state space": msgspec.structs.replace(TINY, recurrent=_STATE_SPACE, **_WITHOUT_MLPS, **_MULTIPLIERS),
    "centred head norms": msgspec.structs.replace(
        TINY, qk_norm=True, qk_norm_by_head=True, centred_norms=True, unrotated_layers=(1,), head_dim=24
    ),
    "head norms after rotation": msgspec.structs.replace(
        TINY, qk_norm=True, qk_norm_after=True, qk_norm_plain=True, unrotated_layers=(1,)
    ),
    "beside attention": msgspec.structs.replace(TINY, **_BESIDE),
    "gates of heads": msgspec.structs.replace(
        TINY,
        head_gates=True,
        post_norms=True,
        sliding_window=90,
        sliding_layers=(1,),
        rope_scaling=ProportionalScaling(1.0, 5),
    ),
    "shared keys and values": msgspec.structs.replace(TINY, **_SHARED_LAYERS),
    "recurrent layers with norms before": msgspec.structs.replace(
        TINY,
        recurrent=msgspec.structs.replace(_DELTA, most_beta=2.0, has_split_convolution=True, inputs=_INPUTS),
        pre_norms=False,
        post_norms=True,
        hidden_act="xielu",
        is_gated=False,
    ),
    "experts beside": msgspec.structs.replace(TINY, **_ROUTED_LAYERS),
    "streams and sparse gates": msgspec.structs.replace(TINY, **_STREAMS),
}

#: (dtype, kind): every kind in bfloat16, and half of them in float32; the others are the soak's.
EVERY_KIND = [
    *(("bfloat16", kind) for kind in KINDS),
    *(("float32", kind) for kind in list(KINDS)[::2]),
    *(pytest.param("float32", kind, marks=pytest.mark.soak) for kind in list(KINDS)[1::2]),
]


def is_recurrent(case: Any) -> bool:
    """Return whether the kind of a case of EVERY_KIND has recurrent layers."""
    return KINDS[getattr(case, "values", case)[1]].recurrent is not None


def is_one_call(case: Any) -> bool:
    """Return whether a step of the kind of a case of EVERY_KIND is one C call."""
    return KINDS[getattr(case, "values", case)[1]].streams is None


def random_weights(config: ModelConfig, dtype: Dtype) -> dict[str, Numbers]:
    """Return weights by name, the same on every machine."""
    rng = np.random.Generator(np.random.PCG64(5))

    def numbers(name: str, shape: tuple[int, ...]) -> Numbers:
        drawn = rng.standard_normal(shape, np.float32) * np.float32(0.2)
        return rounded(drawn + np.float32(name.endswith("norm.weight")), dtype)

    return {name: numbers(name, shape) for name, shape in expected_shapes(config).items()}
