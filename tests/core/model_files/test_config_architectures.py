"""ModelConfig of each architecture: config.json in the forms of transformers 4 and 5, held against transformers' own
reading of it; and what each refuses."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.model_files.model_config import ModelConfig, read_model_config
from core.models.layers.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from ipc.errors import ModelFileError, UnsupportedModelError
from tests.core.model_files.test_model_config import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def read(folder: Path, **settings: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SIZES | settings))
    return read_model_config(folder)


#: config.json as older versions of transformers wrote it, and as little of it as they allow.
OLD: list[dict[str, Any]] = [
    {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 1e6},
    {"model_type": "mistral", "sliding_window": None, "head_dim": 128},
    {"model_type": "mistral"},
    {"model_type": "qwen2", "rope_theta": 1e6, "sliding_window": 100, "use_sliding_window": False},
    {"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 5},
    {"model_type": "qwen2", "use_sliding_window": True},
    {"model_type": "qwen2", "num_key_value_heads": 4, "tie_word_embeddings": True},
    {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "max_window_layers": 2},
    {"model_type": "qwen3"},
    {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 4,
    },
    {"model_type": "gemma3_text"},
    {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3, "rope_local_base_freq": 5000.0},
    {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 8, "query_pre_attn_scalar": 168},
    {"model_type": "gemma2", "sliding_window": 30},
    {"model_type": "phi3", "sliding_window": 30},
    {"model_type": "phi3", "num_key_value_heads": None},
    {"model_type": "smollm3", "no_rope_layers": [1, 0] * 4},
    {"model_type": "exaone4", "sliding_window": 9},
    {"model_type": "ministral", "sliding_window": None},
    {"model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"] * 4},
    {"model_type": "glm4", "head_dim": 8},
    {"model_type": "mixtral", "sliding_window": 12},
]


@pytest.mark.parametrize("settings", OLD, ids=str)
def test_settings_are_understood_as_by_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig

    ours = read(tmp_path, **settings)
    theirs = AutoConfig.from_pretrained(tmp_path)
    for name in ("num_key_value_heads", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.query_pre_attn_scalar == getattr(theirs, "query_pre_attn_scalar", None)
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"] * 8
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    assert ours.sliding_layers == sliding
    assert ours.sliding_window == (window if sliding else None)
    rope = theirs.rope_parameters
    own = rope.get("sliding_attention")
    assert ours.sliding_rope_theta == (own and own["rope_theta"])
    rope = rope.get("full_attention", rope)
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rope_scaling == (LinearScaling(8.0) if rope["rope_type"] == "linear" else None)


def test_features_of_each_architecture(tmp_path: Path) -> None:
    def features(**settings: Any) -> tuple[bool, ...]:
        config = read(tmp_path, **settings)
        names = ("qkv_bias", "output_bias", "qk_norm", "post_norms", "scale_embeddings")
        return tuple(getattr(config, name) for name in names)

    assert features(model_type="llama") == (False, False, False, False, False)
    assert features(model_type="llama", attention_bias=True) == (True, True, False, False, False)
    assert features(model_type="mistral", attention_bias=True) == (False, False, False, False, False)
    assert features(model_type="qwen2") == (True, False, False, False, False)
    assert features(model_type="qwen3") == (False, False, True, False, False)
    assert features(model_type="qwen3", attention_bias=True) == (True, True, True, False, False)
    assert features(model_type="gemma3_text") == (False, False, True, True, True)
    gemma = read(tmp_path, model_type="gemma3_text")
    assert (gemma.hidden_act, gemma.norm_offset) == ("gelu_pytorch_tanh", 1.0)
    assert read(tmp_path, model_type="gemma3_text", hidden_activation="silu").hidden_act == "silu"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scalings(key: str, tmp_path: Path) -> None:
    def scaling(**settings: Any) -> Any:
        return read(tmp_path, model_type="llama", rope_theta=5e5, **{key: settings}).rope_scaling

    assert scaling(type="linear", factor=4) == LinearScaling(4.0)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    assert scaling(**llama3) == Llama3Scaling(8.0, 1.0, 4.0, 512.0)
    assert scaling(**llama3, original_max_position_embeddings=64) == Llama3Scaling(8.0, 1.0, 4.0, 64.0)
    yarn = scaling(rope_type="yarn", original_max_position_embeddings=128)
    assert yarn == YarnScaling(4.0, 128.0, 1.138629436111989, 32.0, 1.0, True)
    yarn = scaling(rope_type="yarn", factor=2.0, attention_factor=1.5, beta_fast=16, beta_slow=2, truncate=False)
    assert yarn == YarnScaling(2.0, 512.0, 1.5, 16.0, 2.0, False)
    assert scaling(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.0


ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


FULL = ["full_attention"] * 8


def test_features_of_the_other_architectures(tmp_path: Path) -> None:
    granite = {
        "embedding_multiplier": 12,
        "logits_scaling": 8,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.5,
    }
    config = read(tmp_path, model_type="granite", **granite)
    multipliers = config.embedding_multiplier, config.residual_multiplier, config.logits_multiplier, config.scores_scale
    assert multipliers == (12.0, 0.22, 0.125, 0.5)
    config = read(tmp_path, model_type="minicpm", scale_emb=12, scale_depth=1.4, dim_model_base=16)
    assert (config.embedding_multiplier, config.logits_multiplier) == (12.0, 0.25)
    assert config.residual_multiplier == 1.4 / 8**0.5
    config = read(tmp_path, model_type="gemma2")
    assert (config.scores_cap, config.logits_cap) == (50.0, 30.0)
    config = read(tmp_path, model_type="smollm3", num_hidden_layers=9)
    assert config.unrotated_layers == (3, 7)
    assert read(tmp_path, model_type="exaone4").unrotated_layers == (3, 7)
    assert read(tmp_path, model_type="exaone4", sliding_window=None, layer_types=FULL).unrotated_layers == ()
    config = read(tmp_path, model_type="glm4", head_dim=24)
    assert (config.rotary_dim, config.qkv_bias, config.output_bias) == (12, True, False)
    config = read(tmp_path, model_type="minimax_m2", head_dim=16, rotary_dim=8)
    assert (config.rotary_dim, config.qk_norm_of_rows) == (8, True)
    config = read(tmp_path, model_type="llama4_text", max_position_embeddings=10**6, no_rope_layers=[])
    assert (config.max_position_embeddings, config.unrotated_layers, config.qk_norm) == (8191, (3, 7), True)
    config = read(tmp_path, model_type="llama4_text", max_position_embeddings=10**6, attn_temperature_tuning=False)
    assert config.max_position_embeddings == 8192
    config = read(tmp_path, model_type="seed_oss", attention_out_bias=True)
    assert (config.qkv_bias, config.output_bias) == (True, True)
    config = read(tmp_path, model_type="olmo3", rope_theta=7e4, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert (config.rope_theta, config.sliding_rope_theta, config.rope_scaling) == (7e4, 7e4, LinearScaling(2.0))


def test_routed_mlps(tmp_path: Path) -> None:
    def experts(**settings: Any) -> tuple[Any, ...]:
        parts = read(tmp_path, **settings).experts
        assert parts is not None
        return parts.num_experts, parts.num_chosen, parts.intermediate_size, parts.normalises, parts.dense_layers

    assert experts(model_type="qwen3_moe", **ROUTED, norm_topk_prob=True) == (8, 2, 16, True, ())
    assert experts(model_type="qwen3_moe", **ROUTED, mlp_only_layers=[2]) == (8, 2, 16, False, (2,))
    assert experts(model_type="qwen3_moe", **ROUTED, decoder_sparse_step=3) == (8, 2, 16, False, (0, 1, 3, 4, 6, 7))
    assert experts(model_type="llama4_text", moe_layers=[1, 3, 5, 7])[4] == (0, 2, 4, 6)
    assert experts(model_type="llama4_text", interleave_moe_layer_step=2)[4] == (0, 2, 4, 6)
    assert experts(model_type="mixtral") == (8, 2, 96, True, ())
    assert experts(model_type="olmoe") == (64, 8, 96, False, ())
    assert experts(model_type="granitemoe", num_local_experts=3) == (3, 2, 96, True, ())
    listed = {"num_experts": 6, "moe_topk": [2] * 8}  # a number for each layer
    assert experts(model_type="hunyuan_v1_moe", **listed) == (6, 2, 96, True, ())
    assert read(tmp_path, model_type="qwen3").experts is None
    assert read(tmp_path, model_type="granitemoehybrid", num_local_experts=0, layer_types=FULL).experts is None


def test_shared_experts(tmp_path: Path) -> None:
    def shared(**settings: Any) -> tuple[int, bool]:
        parts = read(tmp_path, **settings).experts
        assert parts is not None
        return parts.shared_size, parts.has_shared_gate

    assert shared(model_type="qwen2_moe", **ROUTED, shared_expert_intermediate_size=24) == (24, True)
    assert shared(model_type="qwen2_moe", **ROUTED, shared_expert_intermediate_size=0) == (0, False)
    assert shared(model_type="granitemoeshared", shared_intermediate_size=24) == (24, False)
    assert shared(model_type="granitemoe") == (0, False)
    assert shared(model_type="granitemoehybrid", shared_intermediate_size=40, layer_types=FULL) == (40, False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5.*only 1 is"),
    ({"model_type": "llama", "rope_scaling": {"type": "longrope"}}, "rope_scaling.type='longrope'.*'yarn' are"),
    ({"model_type": "olmoe", "shared_intermediate_size": 8}, "shared_intermediate_size=8.*only null is"),
    ({"model_type": "qwen2_moe", "use_sliding_window": True}, "use_sliding_window=True.*only false is"),
    ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0.*only null is"),
    (
        {"model_type": "hunyuan_v1_moe", "num_experts": 6, "moe_topk": [2] * 7 + [1]},
        r"num_experts_per_tok=\[2, .*1\].*all layers must be alike",
    ),
    ({"model_type": "minimax_m2", "qk_norm_type": "per_head"}, "qk_norm_type='per_head'.*only \"per_layer\" is"),
    ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "alpha": 50.0}}, "alpha=50.0.*only null is"),
    ({"model_type": "ernie4_5", "use_bias": True}, "use_bias=True.*only false is"),
    (
        {"model_type": "granite_swa", "layer_rope_theta": [1e4, 1e5] * 4, "sliding_window_pattern": 9},
        "layer_rope_theta=.*one theta, or one of layers with a window and one of the others, is",
    ),
    ({"model_type": "lfm3", "use_attention_gate": False}, "use_attention_gate=False.*only true is"),
    (
        {"model_type": "llama", "layer_types": ["mamba", "attention"] * 4},
        "layer_types=.*all layers of a Llama.* have full",
    ),
    ({"model_type": "gpt_oss", **ROUTED, "swiglu_limit": 10.0}, "swiglu_limit=10.0.*only 7.0 is"),
    ({"architectures": ["Mamba2ForCausalLM"]}, "architectures=.*supported are LlamaForCausalLM"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 8}, "layer_types=.*all layers of a Mistral"),
    ({"model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 8}, "layer_types=.*'full_attention' and"),
    ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation='gelu'.*'gelu_pytorch_tanh' are"),
    ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0.*only null is"),
    (
        {
            "model_type": "gemma3_text",
            "rope_parameters": {
                "full_attention": {"rope_type": "default"},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0},
            },
        },
        "rope_parameters=.*sliding layers cannot be scaled",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **settings)


SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be an integer from 1"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 8 zeros and ones"),
    ({"model_type": "granite_swa", "layer_rope_theta": [1, 0]}, "layer_rope_theta must be a list of 8 numbers"),
    (
        {"model_type": "qwen3_moe", **ROUTED, "num_experts_per_tok": 9},
        "num_experts_per_tok must be at most num_experts=8",
    ),
    ({"model_type": "llama4_text", "moe_layers": 3}, "moe_layers must be a list of layers, got 3"),
    ({"model_type": "qwen3_moe", **ROUTED, "mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
    ({"model_type": "qwen3_moe"}, "num_experts is missing"),
    (
        {"model_type": "glm4", "partial_rotary_factor": 0.01},
        "partial_rotary_factor must rotate an even number of the 128",
    ),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
        "rope_scaling.long_factor must be a list of 1 numbers",
    ),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [0], "long_factor": [1.0]}},
        "rope_scaling.short_factor must hold numbers above 0",
    ),
    ({"model_type": "qwen2", "use_sliding_window": 1}, "use_sliding_window must be true or false"),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types must be a list of 8 names"),
    ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window is missing"),
    ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern must be an integer from 1"),
    ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number"),
    ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "must have full_attention and sliding_att"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a number"),
    (
        {
            "model_type": "llama",
            "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3},
        },
        "rope_scaling.high_freq_factor must be at least low_freq_factor=4, got 3",
    ),
    (
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {}},
        "rope_scaling and rope_parameters contradict",
    ),
]


@pytest.mark.parametrize(("settings", "message"), SENSELESS, ids=[message[:30] for _, message in SENSELESS])
def test_senseless_settings_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path, **settings)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.sampled_from(["linear", "yarn", "llama3", "x"]),
    lambda inner: (
        st.lists(inner | st.just("full_attention"), max_size=8)
        | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "factor", "full_attention"]), inner)
    ),
    max_leaves=4,
)
KEYS = ["layer_types", "sliding_window", "sliding_window_pattern", "max_window_layers", "use_sliding_window"]
KEYS += ["rope_parameters", "rope_scaling", "rope_local_base_freq", "hidden_activation", "query_pre_attn_scalar"]


@hypothesis.settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@given(st.sampled_from(["mistral", "qwen3", "gemma3_text"]), st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1))
def test_any_values_give_a_config_or_a_model_file_error(
    tmp_path_factory: pytest.TempPathFactory, model_type: str, edit: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz-architectures"
    folder.mkdir(exist_ok=True)
    try:
        config = read(folder, model_type=model_type, **edit)
    except ModelFileError:
        return
    assert (config.sliding_window is None) == (config.sliding_layers == ())


# --- GGUF ---------------------------------------------------------------------------------------------------------


def gguf_of(folder: Path, architecture: str, **edit: Any) -> ModelConfig:
    """Keys after the architecture's name, with _ for the dots."""
    sizes = {
        "block_count": 62,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 0.0009765625,
        "vocab_size": 1000,
    }
    values = {f"{architecture}.{key}": value for key, value in {**sizes, **edit}.items()}
    return read_model_config(write_gguf(folder / "m.gguf", edit=values, architecture=architecture))


def test_windows_of_gguf_files(tmp_path: Path) -> None:
    plain = gguf_of(tmp_path, "gemma3")
    assert (plain.sliding_window, plain.sliding_layers, plain.sliding_rope_theta) == (None, (), None)
    usual = gguf_of(tmp_path, "gemma3", **{"attention.sliding_window": 7, "block_count": 8})
    assert (usual.sliding_window, usual.sliding_layers) == (7, (0, 1, 2, 3, 4, 6, 7))
    assert (usual.rope_theta, usual.sliding_rope_theta) == (1e6, 1e4)
    settings = {"attention.sliding_window": 7, "attention.sliding_window_pattern": 2, "rope.freq_base_swa": 5000.0}
    other = gguf_of(tmp_path, "gemma3", **settings, block_count=4)
    assert (other.sliding_layers, other.sliding_rope_theta) == ((0, 2), 5000.0)
    settings["attention.sliding_window_pattern"] = [False, True, True]
    assert gguf_of(tmp_path, "gemma3", **settings, block_count=3).sliding_layers == (1, 2)
    with pytest.raises(ModelFileError, match="sliding_window_pattern must be a number or 4 booleans"):
        gguf_of(tmp_path, "gemma3", **settings, block_count=4)


GGUF_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"embedding_scale": 12.0}, "llama.embedding_scale=12.0 is not supported; only 1.0 is"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping=50.0 is not supported"),
    (
        "qwen2",
        {"attention.sliding_window": 9},
        "only gemma3, gemma4, gemma3n, gemma2, phi3, .*, cohere2, gpt-oss, exaone-moe have one",
    ),
    ("qwen2", {"rope.scaling.attn_factor": 1.2}, "attn_factor=1.2.* is not supported; only 1.0 is"),
    ("qwen3", {"expert_count": 8}, "qwen3.expert_count=8 is not supported; only 0 is"),
    ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func=2 is not supported; 1 .softmax. is"),
    ("olmoe", {"attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv=8.0 is not supported"),
    (
        "qwen3moe",
        {"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1},
        "qwen3moe.expert_shared_count=1 is not",
    ),
]


@pytest.mark.parametrize(("architecture", "edit", "message"), GGUF_REFUSED, ids=[one for _, _, one in GGUF_REFUSED])
def test_what_gguf_files_cannot_have_is_refused_by_name(
    architecture: str, edit: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        gguf_of(tmp_path, architecture, **edit)


def test_routed_mlps_of_gguf_files(tmp_path: Path) -> None:
    settings = {"expert_count": 8, "expert_used_count": 2}
    mixtral = gguf_of(tmp_path, "llama", **settings)
    assert (mixtral.architecture, mixtral.experts and mixtral.experts.normalises) == ("MixtralForCausalLM", True)
    assert gguf_of(tmp_path, "llama").architecture == "LlamaForCausalLM"
    olmoe = gguf_of(tmp_path, "olmoe", **settings, expert_feed_forward_length=32).experts
    assert olmoe is not None
    assert (olmoe.normalises, olmoe.intermediate_size) == (False, 32)
    with pytest.raises(ModelFileError, match=r"qwen3moe.expert_used_count must be at most qwen3moe.expert_count=8"):
        gguf_of(tmp_path, "qwen3moe", **{**settings, "expert_used_count": 9})


def test_the_large_gemma_scales_its_queries_by_another_number(tmp_path: Path) -> None:
    settings = {"attention.key_length": 128, "attention.value_length": 128}
    assert gguf_of(tmp_path, "gemma3", **settings, block_count=62).query_pre_attn_scalar == 16
    assert gguf_of(tmp_path, "gemma3", **settings, block_count=48).query_pre_attn_scalar is None


def test_rope_scalings_of_gguf_files(tmp_path: Path) -> None:
    assert gguf_of(tmp_path, "qwen2", **{"rope.scaling.factor": 2.0}).rope_scaling == LinearScaling(2.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    assert gguf_of(tmp_path, "qwen2", **yarn).rope_scaling == YarnScaling(4.0, 128.0, 1.138629436111989)
    assert gguf_of(tmp_path, "qwen3", **{**yarn, "rope.scaling.type": "none"}).rope_scaling is None
