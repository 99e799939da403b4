"""Layers with a recurrent state in config.json: which layers, and their sizes."""

from pathlib import Path
from typing import Any

import pytest

from ipc.errors import UnsupportedModelError
from tests.core.model_files.test_config_architectures import FULL, read


def test_recurrent_layers(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="lfm2", full_attn_idxs=[0, 3], block_ff_dim=60, block_multiple_of=16)
    parts = config.recurrent
    assert parts is not None
    assert (parts.layers, parts.taps, parts.channels, parts.has_bias) == ((1, 2, 4, 5, 6, 7), 3, 64, False)
    assert (config.intermediate_size, config.tie_word_embeddings, config.num_caches) == (48, True, 2)
    settings: dict[str, Any] = {"model_type": "lfm2", "layer_types": ["conv", *FULL[1:]], "tie_embedding": False}
    config = read(tmp_path, **settings, conv_bias=True, block_auto_adjust_ff_dim=False)
    assert (config.recurrent_layers, config.tie_word_embeddings, config.intermediate_size) == ((0,), False, 96)
    config = read(tmp_path, model_type="qwen3_5_text", linear_num_value_heads=32, head_dim=32)
    parts = config.recurrent
    assert parts is not None
    assert (parts.layers, parts.channels, config.rotary_dim) == ((0, 1, 2, 4, 5, 6), 2 * 16 * 128 + 32 * 128, 8)
    assert config.state_size == 6 * (3 * parts.channels + 32 * 128 * 128)
    assert [config.place_of(layer) for layer in (0, 3, 4, 7)] == [0, 0, config.state_size // 2, 1]
    config = read(tmp_path, model_type="granitemoehybrid", mamba_n_heads=4, layer_types=["mamba", *FULL[1:]])
    parts = config.recurrent
    assert parts is not None
    assert (parts.num_heads, parts.value_dim, parts.channels) == (4, 32, 128 + 2 * 256)
    assert read(tmp_path, model_type="qwen3_5_text", layer_types=FULL).recurrent is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lfm2", "layer_types": ["conv"] * 8}, "layer_types=.*a layer with attention is"),
    ({"model_type": "lfm2", "layer_types": ["conv", "mamba2"] * 4}, "layer_types=.*'conv', 'linear_attention'"),
    ({"model_type": "lfm2", "conv_L_cache": 9, "full_attn_idxs": [1]}, "conv_L_cache=9.*2 to 8 are"),
    ({"model_type": "qwen3_5_text", "linear_key_head_dim": 5}, "linear_key_head_dim=5.*even numbers are"),
    ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate=False.*only true is"),
    (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * 4, "mamba_proj_bias": True},
        "mamba_proj_bias=True.*only false is",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, **settings)
