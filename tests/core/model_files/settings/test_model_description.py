"""What a model's files say of it: GGUF files and folders, whole, packed, of classifiers, and without weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.model_files.settings.model_description import describe_model
from ipc.files.model_files import resolve_model
from ipc.options.config import EngineConfig
from ipc.wire.messages import ModelDescription


def folder(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> ModelDescription | None:
    (path / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, path / "model.safetensors")
    return describe_model(EngineConfig(model=str(path)))


def test_a_gguf_file() -> None:
    size = resolve_model(None).stat().st_size
    assert describe_model(EngineConfig()) == ModelDescription("gguf", "llama", 134_515_008, "Q4_1", size)


def test_a_folder(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float32)}
    found = folder(tmp_path, {"model_type": "qwen3"}, tensors)
    assert found == ModelDescription("safetensors", "qwen3", 22, "F16", 58)


@pytest.mark.parametrize(
    ("config", "tensors", "wanted"),
    [
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            {"a": np.zeros(4, np.int32), "b": np.zeros(4, np.float16)},
            ModelDescription("safetensors", "llama", 0, "GPTQ", 24),
        ),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gguf"}},
            {"b": np.zeros(4, np.float16)},
            ModelDescription("safetensors", "llama", 4, "F16", 8),
        ),
        ({"id2label": {"1": "good", "0": "bad"}}, {}, ModelDescription("safetensors", labels=["bad", "good"])),
        ({"id2label": {"0": "bad", "2": "good"}}, {}, ModelDescription("safetensors")),
        ({"id2label": 5, "model_type": None}, {}, ModelDescription("safetensors")),
    ],
)
def test_parts_that_are_not_known(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], wanted: ModelDescription
) -> None:
    assert folder(tmp_path, config, tensors) == wanted


def test_no_files(tmp_path: Path) -> None:
    assert describe_model(EngineConfig(executor="fake")) is None
    (tmp_path / "config.json").write_text("[]")
    assert describe_model(EngineConfig(model=str(tmp_path))) is None
