"""Files of models with latent attention, and of mixtures like DeepSeek's: settings, refusals, FP8, further layers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model_files.loading import load_model
from core.model_files.model_config import ModelConfig, read_model_config
from core.model_files.settings.latent_settings import scalar_of
from core.model_files.tensors.weights import load_weights
from core.models.config import ExpertParts, LatentParts
from core.models.layers.adapted import takes_adapters
from core.models.layers.rope_scaling import YarnScaling
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from kernels.elements import FLOAT32
from tests.core.model_files.test_config_architectures import SIZES, gguf_of, read
from tests.core.models.checkpoints import build
from tests.numbers import dense_tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}


def experts_of(config: ModelConfig) -> ExpertParts:
    assert config.experts is not None
    return config.experts


def test_latent_attention_is_one_head_of_the_cached_vector(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="deepseek_v2", **ROUTED, q_lora_rank=None)
    assert config.latent == LatentParts(query_dim=None, latent_dim=512, plain_dim=128, rotated_dim=64, value_dim=128)
    assert (config.num_key_value_heads, config.head_dim, config.scores_scale) == (1, 576, 1 / 192**0.5)
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    config = read(tmp_path, model_type="deepseek_v3", **ROUTED, rope_scaling=yarn)
    assert config.latent is not None
    assert config.latent.query_dim == 1536
    multiplier = 0.1 * 0.707 * np.log(40) + 1
    assert config.scores_scale == pytest.approx(192**-0.5 * multiplier**2)
    assert scalar_of(config.latent, 1.0) == 192
    config = read(tmp_path, model_type="minicpm3", num_attention_heads=4)
    assert config.latent is not None
    assert (config.latent.latent_dim, config.latent.value_dim) == (256, 16)


def test_how_experts_are_chosen(tmp_path: Path) -> None:
    experts = experts_of(read(tmp_path, model_type="deepseek_v3", **{**ROUTED, "n_group": 4, "topk_group": 2}))
    groups = experts.num_groups, experts.num_chosen_groups, experts.best_of_group
    assert (groups, experts.is_sigmoid, experts.has_correction) == ((4, 2, 2), True, True)
    assert (experts.shared_size, experts.dense_layers) == (16, (0, 1, 2))
    experts = experts_of(read(tmp_path, model_type="deepseek_v2", **{**ROUTED, "n_group": 4, "topk_group": 2}))
    assert (experts.num_groups, experts.shared_size) == (1, 32)
    greedy = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
    experts = experts_of(read(tmp_path, model_type="deepseek_v2", **{**ROUTED, **greedy}))
    assert (experts.num_groups, experts.best_of_group, experts.scaling, experts.normalises) == (4, 1, 16.0, False)
    lite = {"mlp_layer_types": ["dense", "dense", *["sparse"] * 6]}
    assert experts_of(read(tmp_path, model_type="glm4_moe_lite", **ROUTED, **lite)).dense_layers == (0, 1)
    ernie = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_interval": 2}
    experts = experts_of(read(tmp_path, model_type="ernie4_5_moe", **ernie, moe_layer_end_index=5))
    assert (experts.dense_layers, experts.shared_size) == ((0, 2, 4, 6, 7), 32)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v2", "attention_bias": True}, "attention_bias=True.*only false is"),
    ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob=True.*only false is"),
    ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*'group_limited_greedy' are"),
    ({"model_type": "deepseek_v2", "kv_lora_rank": 48}, "kv_lora_rank=48.*multiples of 32 are"),
    ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax'.*only \"sigmoid\" is"),
    ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave=False.*only true is"),
    ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq=2.*only 1 is"),
    ({"model_type": "dots1", "sliding_window": 100}, "sliding_window=100.*only null is"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **{**ROUTED, **settings})


SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"n_group": 3}, "n_group must divide 8 experts into groups with at least 2 experts; got 3"),
    ({"n_group": 8}, "n_group must divide 8 experts into groups with at least 2 experts; got 8"),
    ({"n_group": 2, "topk_group": 3}, "topk_group must leave 2 experts or more, in at most 2 groups: 3"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 8"),
]


@pytest.mark.parametrize(("settings", "message"), SENSELESS, ids=[message[:30] for _, message in SENSELESS])
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        read(tmp_path, model_type="deepseek_v3", **{**ROUTED, **settings})


def test_gguf_files_state_the_heads_or_the_cached_vector(tmp_path: Path) -> None:
    both: dict[str, Any] = {
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 16,
        "attention.kv_lora_rank": 64,
    }
    both |= {"rope.dimension_count": 8, "block_count": 4, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0}
    both |= {"rope.scaling.yarn_log_multiplier": 0.1}
    heads = {"attention.key_length": 24, "attention.value_length": 12}
    vector = {"attention.key_length": 72, "attention.value_length": 64, "attention.head_count_kv": 1}
    vector |= {"attention.key_length_mla": 24, "attention.value_length_mla": 12}
    for sizes in (heads, vector):
        config = gguf_of(tmp_path, "deepseek2", **both, **sizes)
        assert config.latent == LatentParts(query_dim=None, latent_dim=64, plain_dim=16, rotated_dim=8, value_dim=12)
        assert (config.head_dim, config.num_key_value_heads, experts_of(config).is_sigmoid) == (72, 1, False)
        assert config.scores_scale == pytest.approx(24**-0.5 * (1 + 0.1 * np.log(40)) ** 2)
        assert isinstance(config.rope_scaling, YarnScaling)
        assert config.rope_scaling.attention_factor == 1.0
    with pytest.raises(UnsupportedModelError, match=r"expert_gating_func=3 is not supported; 1 .* and 2 .sigmoid. are"):
        gguf_of(tmp_path, "deepseek2", **both, **heads, expert_gating_func=3)
    nextn = {"rope.dimension_count": 8, "attention.key_length": 16, "attention.value_length": 16}
    routed = {"expert_count": 8, "expert_used_count": 2, "block_count": 4, "nextn_predict_layers": 1}
    assert gguf_of(tmp_path, "glm4moe", **nextn, **routed).num_hidden_layers == 3


def test_fp8_matrices_whose_rows_are_reordered(tmp_path: Path) -> None:
    """Queries and the rotated part: the weights are those of the folder with plain numbers of the same values."""
    build("deepseek-v3").save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight") or "mqa.weight" in name]:
        scale = tensors[name].abs().max() / 448
        stored = (tensors[name] / scale).to(torch.float8_e4m3fn)
        packed[name], packed[f"{name}_scale_inv"] = stored, scale.reshape(1, 1)
        tensors[name] = stored.float() * scale
    (tmp_path / "fp8").mkdir()
    settings = json.loads((tmp_path / "plain" / "config.json").read_text())
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    save_file(packed, tmp_path / "fp8" / "model.safetensors")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))
    plain, fp8 = (
        {name: dense_tensor(weight) for name, weight in load_weights(folder, read_model_config(folder), FLOAT32)}
        for folder in (tmp_path / "plain", tmp_path / "fp8")
    )
    assert plain.keys() == fp8.keys()
    assert all(torch.equal(plain[name], fp8[name]) for name in plain)


def test_layers_past_the_last_one_are_not_read(tmp_path: Path) -> None:
    build("glm4.5-air").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {"model.layers.3.eh_proj.weight": torch.ones(48, 96), "model.mtp_norm.weight": torch.ones(48)}
    save_file({**tensors, **further}, tmp_path / "model.safetensors")
    config = read_model_config(tmp_path)
    assert sum(1 for _ in load_weights(tmp_path, config, FLOAT32)) > 0
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.ones(48, 96)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor 'model.layers.2.eh_proj.weight'"):
        list(load_weights(tmp_path, config, FLOAT32))


def test_layers_with_latent_attention_take_no_adapters(tmp_path: Path) -> None:
    tiny = {"model_type": "minicpm3", "num_hidden_layers": 2, "num_attention_heads": 2, "dim_model_base": 64}
    latent = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **tiny, **latent}))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32")
    model: Any = load_model(tmp_path, FLOAT32, config).model
    assert not takes_adapters(model.layers)
