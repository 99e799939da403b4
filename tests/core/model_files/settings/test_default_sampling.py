"""Default sampling parameters of folders and GGUF files, as vLLM reads generation_config.json."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from core.model_files.settings.default_sampling import read_default_sampling
from ipc.errors import ConfigError, ModelFileError
from ipc.options.config import EngineConfig

RECOMMENDED: dict[str, Any] = {
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "max_new_tokens": 2048,
}
EXPECTED = {**{name: value for name, value in RECOMMENDED.items() if name != "max_new_tokens"}, "max_tokens": 2048}


def write_folder(folder: Path, generation: object = None) -> Path:
    (folder / "config.json").write_text("{}")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(model: Path | None, **options: Any) -> dict[str, float | int]:
    return read_default_sampling(EngineConfig(model=None if model is None else str(model), **options))


def test_a_folder_recommends(tmp_path: Path) -> None:
    others = {"do_sample": True, "eos_token_id": [1, 2], "num_beams": 4, "stop_strings": ["x"], "logprobs": 3}
    assert read(write_folder(tmp_path, RECOMMENDED | others)) == EXPECTED
    assert read(write_folder(tmp_path, {"temperature": None, "top_k": 5, "do_sample": False})) == {"top_k": 5}
    assert read(write_folder(tmp_path, {})) == {}


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert read(write_folder(tmp_path)) == {}
    assert read(None, executor="fake") == {}


def test_vllm_is_neutral_and_a_folder_replaces_the_models(tmp_path: Path) -> None:
    model, other = (tmp_path / name for name in ("model", "other"))
    for folder, temperature in ((model, 0.6), (other, 0.7)):
        folder.mkdir()
        write_folder(folder, {"temperature": temperature})
    assert read(model, generation_config="vllm") == {}
    assert read(model, generation_config=str(other)) == {"temperature": 0.7}
    assert read(None, executor="fake", generation_config=str(other)) == {"temperature": 0.7}
    with pytest.raises(ConfigError, match=r"'auto', 'vllm' or a folder with generation_config\.json; got '/nowhere'"):
        read(model, generation_config="/nowhere")


def test_an_override_is_in_place_of_each(tmp_path: Path) -> None:
    model = write_folder(tmp_path, {"temperature": 0.6, "top_k": 20})
    override = {"temperature": 0.1, "max_new_tokens": 64.0}
    assert read(model, override_generation_config=override) == {"temperature": 0.1, "top_k": 20, "max_tokens": 64}
    assert read(model, generation_config="vllm", override_generation_config={"top_k": 5.0}) == {"top_k": 5}
    assert isinstance(read(model, override_generation_config={"top_k": 5.0})["top_k"], int)
    assert read(None, executor="fake", override_generation_config={"min_p": 0.5}) == {"min_p": 0.5}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"temprature": 0.5}, "takes .*temperature.*; got 'temprature'"),
        ({"temperature": -1.0}, "override_generation_config: temperature must be"),
        ({"top_k": 1.5}, "override_generation_config: top_k must be"),
        ({"top_k": "5"}, "must be a dict of numbers"),
        ({"max_new_tokens": float("nan")}, "override_generation_config: max_tokens must be"),
    ],
)
def test_a_wrong_override_is_refused(override: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(None, executor="fake", override_generation_config=override)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({"top_p": "high"}, r"top_p: top_p must be a number .* got 'high'; generation_config='vllm' starts"),
        ({"temperature": -1}, r"temperature: temperature must be in \[0, 10000\], got -1"),
        ({"max_new_tokens": 0}, r"max_new_tokens: max_tokens must be in \[1, "),
        ({"top_k": 2.5}, "top_k: top_k must be an integer"),
    ],
)
def test_values_that_are_no_parameters(tmp_path: Path, generation: object, message: str) -> None:
    with pytest.raises(ModelFileError, match=r"generation_config\.json: " + message):
        read(write_folder(tmp_path, generation))
    assert read(tmp_path, generation_config="vllm") == {}


def write_gguf(path: Path, **values: float) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        getattr(writer, f"add_{'uint32' if key == 'top_k' else 'float32'}")(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file_recommends(tmp_path: Path) -> None:
    """The keys are llama.cpp's; its numbers are float32."""
    assert gguf.Keys.General.SAMPLING_TEMP == "general.sampling.temp"
    values = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.05, "mirostat_tau": 5.0}
    expected = {name: value for name, value in EXPECTED.items() if name != "max_tokens"}
    assert read(write_gguf(tmp_path / "a.gguf", **values)) == expected
    assert read(write_gguf(tmp_path / "b.gguf")) == {}
    with pytest.raises(ModelFileError, match=r"c\.gguf: general\.sampling\.top_p: top_p must be in \[0, 1\], got 2\.0"):
        read(write_gguf(tmp_path / "c.gguf", top_p=2.0))
