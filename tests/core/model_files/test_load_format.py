"""Weights by load_format: those of files, and made-up ones."""

import time
from pathlib import Path

import numpy as np
import pytest

from core.model_files import load_format
from core.model_files.load_format import open_weights
from core.model_files.model_config import ModelConfig, read_model_config
from core.model_files.tensors.weight_shapes import expected_shapes
from ipc.errors import ConfigError, ModelFileError
from ipc.files.gguf import cut_gguf_metadata
from ipc.files.model_files import model_fingerprint, resolve_model
from kernels.elements import BFLOAT16, FLOAT32, Dtype, Numbers
from tests.numbers import dense
from tools.lab.bench.tiny_model import write_tiny_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def _made_up(path: Path, dtype: Dtype = FLOAT32) -> tuple[ModelConfig, dict[str, Numbers], str]:
    config = read_model_config(path)
    opened = open_weights("dummy", path, config, dtype)
    assert opened.label == "dummy-"
    return config, {name: dense(weight, dtype) for name, weight in opened.tensors}, opened.fingerprint


def test_files(tiny: Path) -> None:
    config = read_model_config(tiny)
    for name in ("auto", "safetensors"):
        opened = open_weights(name, tiny, config, BFLOAT16)
        assert (opened.label, opened.fingerprint) == ("", model_fingerprint(tiny))
        assert [name for name, _ in opened.tensors] == list(expected_shapes(config))
    with pytest.raises(ConfigError, match=r"load_format='gguf' does not match .* which is safetensors"):
        open_weights("gguf", tiny, config, BFLOAT16)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_made_up_weights_need_no_file_and_are_always_the_same(tiny: Path, dtype: Dtype) -> None:
    (tiny / "model.safetensors").unlink()
    config, first, fingerprint = _made_up(tiny, dtype)
    _, second, again = _made_up(tiny, dtype)
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == expected_shapes(config)
    assert all(numbers.dtype == (dtype if numbers.ndim > 1 else FLOAT32) for numbers in first.values())
    assert all(np.array_equal(numbers, second[name]) for name, numbers in first.items())
    assert fingerprint == again
    with pytest.raises(ModelFileError, match=r"expected model\.safetensors"):
        open_weights("auto", tiny, config, dtype)


def test_made_up_weights_are_of_a_sensible_size_and_never_repeat_a_row(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_format, "_PERIOD", 10_007)
    _, tensors, _ = _made_up(tiny)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            assert np.array_equal(tensor, np.ones(tensor.shape)), name
        else:
            assert float(tensor.std()) == pytest.approx(0.02, rel=0.05), name
            assert len(np.unique(tensor, axis=0)) == len(tensor), name
    assert not np.array_equal(
        tensors["model.layers.0.mlp.gate_proj.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    )


def test_made_up_weights_of_a_gguf_header_take_little_time(tmp_path: Path) -> None:
    """The demo model's 135 million, from its metadata alone."""
    path = tmp_path / "header.gguf"
    path.write_bytes(cut_gguf_metadata(resolve_model(None)))
    begin = time.process_time()
    _, tensors, _ = _made_up(path, BFLOAT16)
    assert sum(tensor.size for tensor in tensors.values()) > 134_000_000
    assert time.process_time() - begin < 5.0  # 0.2 s alone on the machine


def test_the_fingerprint_tells_configs_apart(tiny: Path) -> None:
    before = _made_up(tiny)[2]
    text = (tiny / "config.json").read_text()
    (tiny / "config.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    assert _made_up(tiny)[2] != before
