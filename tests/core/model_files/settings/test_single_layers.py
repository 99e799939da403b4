"""Files in which a mixer and an MLP are layers of their own (Nemotron-H): how they are joined, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.model_files.model_config import ModelConfig, read_model_config
from ipc.errors import ModelFileError, UnsupportedModelError

#: Settings as NVIDIA's files have them.
SETTINGS: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "expand": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 24,
    "num_hidden_layers": 7,
    "hybrid_override_pattern": "MEM*EM-",
}


def read(folder: Path, **other: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **other}))
    return read_model_config(folder)


def test_an_mlp_belongs_to_the_mixer_before_it(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.file_layers == ((0, 1), (2, -1), (3, 4), (5, 6))
    assert config.recurrent_layers == (0, 1, 3)
    assert [config.has_experts(layer) for layer in range(4)] == [True, False, True, False]
    assert [config.has_dense_mlp(layer) for layer in range(4)] == [False, False, False, True]
    assert config.recurrent is not None
    assert config.recurrent.value_dim * config.recurrent.num_heads == 64  # not expand * hidden_size
    names = ["mamba", "moe", "mamba", "attention", "moe", "mamba", "mlp"]
    assert read(tmp_path, hybrid_override_pattern=None, layers_block_type=names) == config


def test_a_model_without_routed_layers_has_no_experts(tmp_path: Path) -> None:
    assert read(tmp_path, hybrid_override_pattern="M-M*-").experts is None


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        ({"hybrid_override_pattern": "-M*-"}, UnsupportedModelError, "an MLP after a layer of Mamba-2 or attention is"),
        ({"hybrid_override_pattern": "M--*"}, UnsupportedModelError, "an MLP after a layer of Mamba-2 or attention is"),
        ({"hybrid_override_pattern": "M-M-"}, UnsupportedModelError, "a layer with attention is"),
        ({"hybrid_override_pattern": "MX*-"}, UnsupportedModelError, "'M', 'mamba', 'linear_attention'"),
        ({"hybrid_override_pattern": None}, ModelFileError, "must have the kind of each layer, got None"),
        ({"layers_block_type": "M*"}, ModelFileError, "must have the kind of each layer, got 'M\\*'"),
        ({"moe_latent_size": 64}, UnsupportedModelError, "moe_latent_size=64 is not supported; only null is"),
        ({"mlp_hidden_act": "silu"}, UnsupportedModelError, "mlp_hidden_act='silu' is not supported"),
        ({"use_bias": True}, UnsupportedModelError, "use_bias=True is not supported"),
    ],
)
def test_others_are_refused(other: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path, **other)
