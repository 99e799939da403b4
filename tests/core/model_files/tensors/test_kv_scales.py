"""Scales of a KV cache in the files of a model."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from core.model_files.loading import _kv_scales
from core.model_files.tensors.kv_scales import read_kv_scales
from ipc.errors import ConfigError, ModelFileError
from ipc.options.config import EngineConfig
from kernels.memory.kv_cache import Scales
from tests.core.executors.test_cuda_architectures import shape_config

ATTENTION = "model.layers.{}.self_attn"


def scale(value: float, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (1,)) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({"model.norm.weight": torch.ones(4), **tensors}, folder / "model.safetensors")
    return folder


NAMES: dict[str, Any] = {
    "compressed-tensors": (f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale"),
    "modelopt": (f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"),
    "text part": (f"language_model.{ATTENTION}.k_scale", f"language_model.{ATTENTION}.v_scale"),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_scales_are_those_of_each_layer(names: tuple[str, str], tmp_path: Path) -> None:
    keys, values = names
    found = {keys.format(0): scale(0.5), values.format(0): scale(0.25, torch.bfloat16, ())}
    found |= {keys.format(1): scale(3.0, torch.float16), values.format(1): scale(1.5)}
    assert read_kv_scales(write(tmp_path, found), [0, 1]) == (Scales(0.5, 0.25), Scales(3.0, 1.5))
    assert read_kv_scales(tmp_path / "model.safetensors", [0]) == (Scales(0.5, 0.25),)
    assert read_kv_scales(tmp_path / "model.gguf", [0, 1]) == ()


def test_files_without_scales(tmp_path: Path) -> None:
    assert read_kv_scales(write(tmp_path, {f"{ATTENTION.format(0)}.k_proj.weight_scale": scale(1.0)}), [0]) == ()


def test_a_number_that_no_layer_has_is_part_of_another_name(tmp_path: Path) -> None:
    assert read_kv_scales(write(tmp_path, {f"{ATTENTION.format('9' * 5000)}.k_scale": scale(1.0)}), [0]) == ()


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"k": None}, r"layer 1 has no k_scale of its KV cache, and others have one"),
        ({"v": scale(1.0, shape=(2,))}, r"model.layers.1.self_attn.v_scale is F32 \[2\]; supported is one number"),
        ({"v": scale(0.0)}, "v_scale is 0.0; a scale is a positive number"),
        ({"k": scale(float("nan"))}, "k_scale is nan; a scale is a positive number"),
        ({"k": scale(1, torch.int32)}, r"k_scale is I32 \[1\]; supported is one number"),
    ],
)
def test_scales_that_are_none(changes: dict[str, Any], refused: str, tmp_path: Path) -> None:
    tensors = {f"{ATTENTION.format(layer)}.{side}_scale": scale(1.0) for layer in range(2) for side in "kv"}
    for side, tensor in changes.items():
        tensors[f"{ATTENTION.format(1)}.{side}_scale"] = tensor
    write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(ModelFileError, match=refused):
        read_kv_scales(tmp_path, [0, 1])


def test_only_a_cache_of_8_bit_floats_has_them(tmp_path: Path) -> None:
    tensors = {f"{ATTENTION.format(layer)}.{side}_scale": scale(1.0 + layer) for layer in range(2) for side in "kv"}
    write(tmp_path, tensors)
    config, model = EngineConfig(device="cuda", kv_cache_dtype="fp8"), shape_config("llama")
    assert _kv_scales(tmp_path, config, model) == (Scales(1.0, 1.0), Scales(2.0, 2.0))
    for other in ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "auto"}, {"load_format": "dummy"}):
        assert _kv_scales(tmp_path, msgspec.structs.replace(config, **other), model) == ()
    with pytest.raises(ConfigError, match="whose layers have no K and V: use 'int8', or leave it out"):
        _kv_scales(tmp_path, config, shape_config("deepseek-v2-lite"))


def test_recurrent_layers_have_none(tmp_path: Path) -> None:
    """The first layer has a recurrent state, and the cache has the second one's K and V only."""
    write(tmp_path, {f"{ATTENTION.format(1)}.{side}_scale": scale(2.0) for side in "kv"})
    config, model = EngineConfig(device="cuda", kv_cache_dtype="fp8"), shape_config("qwen3.5")
    assert _kv_scales(tmp_path, config, model) == (Scales(2.0, 2.0),)
