"""Files whose layers are others than ours: of a mixer or an MLP (Nemotron-H), or of two mixers (Falcon-H1)."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from core.model_files.model_config import ModelConfig, read_model_config
from core.models.parts.stage import layers_of_stages
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


#: As the settings of Falcon-H1-0.5B, but for its sizes.
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e11,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "mamba_proj_bias": False,
    "mamba_use_mlp": True,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
}


def read_falcon(folder: Path, **other: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**FALCON, **other}))
    return read_model_config(folder)


def test_two_mixers_that_read_the_same_are_two_layers(tmp_path: Path) -> None:
    config = read_falcon(tmp_path)
    assert config.file_layers == ((0, -1), (0, 0), (1, -1), (1, 1))
    assert config.recurrent_layers == (0, 2)
    assert [config.is_second_mixer(layer) for layer in range(4)] == [False, True, False, True]
    assert config.recurrent is not None
    assert not config.recurrent.has_norm
    assert {part: runs[0] for part, runs in config.factors} == {
        "mixer.in_proj": (64, 0.3535533905932738),
        "mlp.gate_proj": (80, 0.8838834764831844),
        "mlp.down_proj": (48, 0.5859375),
    }


def test_stages_do_not_part_two_mixers_that_read_the_same(tmp_path: Path) -> None:
    config = read_falcon(tmp_path, num_hidden_layers=5)
    bounds = [[part.first for part in layers_of_stages(config, count)] for count in (2, 3, 5)]
    assert all(first % 2 == 0 for firsts in bounds for first in firsts), bounds
    assert bounds[2] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            UnsupportedModelError,
            "mamba_norm_before_gate=True",
        ),
        ({"projectors_bias": True}, UnsupportedModelError, "projectors_bias=True is not supported; only false is"),
        ({"mlp_multipliers": [1.0]}, ModelFileError, r"mlp_multipliers must be 2 numbers, got \[1\.0\]"),
        ({"ssm_multipliers": [1, 1, 1, 1, 0]}, ModelFileError, "ssm_multipliers must be a number from 1e-06"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, "without factors of products"),
    ],
)
def test_others_of_falcon_are_refused(
    other: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        read_falcon(tmp_path, **other)


def write_gguf(path: Path, architecture: str, **more: Any) -> Path:
    """A file of three layers without tensors. more: keys after the name of the architecture, or those with a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {"vocab_size": 300, "embedding_length": 48, "block_count": 3, "context_length": 1024, **more}
    keys |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    for name, value in keys.items():
        add = writer.add_array if isinstance(value, list) else writer.add_float32
        if isinstance(value, int):
            add = writer.add_uint32
        add(name.removeprefix(".") if name.startswith(".") else f"{architecture}.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


XIELU: dict[str, Any] = {f".xielu.{name}": [0.5] * 3 for name in ("alpha_p", "alpha_n", "beta", "eps")}


def test_the_numbers_of_an_activation_are_keys_of_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "apertus", feed_forward_length=80, **{**XIELU, ".xielu.eps": 0.25})
    assert read_model_config(path).xielu == ((0.5, 0.5, 0.5, 0.25),) * 3


@pytest.mark.parametrize(
    ("architecture", "keys", "error", "words"),
    [
        (
            "nemotron_h",
            {"feed_forward_length": 80, "attention.head_count_kv": [0, 2, 0]},
            ModelFileError,
            "feed_forward_length must be a list of 3 numbers, one for each layer; got 80",
        ),
        (
            "nemotron_h",
            {"feed_forward_length": [80, 0, 0], "attention.head_count_kv": [0, 2, 0]},
            UnsupportedModelError,
            "an MLP after a layer of Mamba-2 or attention is",
        ),
        (
            "apertus",
            {"feed_forward_length": 80, **XIELU, ".xielu.beta": [0.5, 0.5]},
            ModelFileError,
            r"xielu\.beta must be 3 numbers, one for each layer; got \[0\.5, 0\.5\]",
        ),
    ],
)
def test_keys_of_gguf_files_that_do_not_fit_are_refused(
    architecture: str, keys: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        read_model_config(write_gguf(tmp_path / "a.gguf", architecture, **keys))
