"""The vision encoders against transformers: rows, error, places, and an image's rows in any company."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.executors.load import load
from core.executors.local import LocalExecutor, usual_dtype
from core.features.store import Features
from core.models.architectures.vision_architectures import is_unused, text_name, vision_name
from core.models.vision_encoder import VisionEncoder, position_ids
from ipc.errors import ConfigError, EngineCoreError, ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from kernels.cpu.library import load_cpu_library
from tests.core.models import gemma3_checkpoint
from tests.core.models.float_errors import check_errors
from tests.core.models.idefics3_checkpoint import ROWS, SQUARE, noise, tiny_model, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    load_cpu_library().stop_threads()


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), **{"dtype": "float32", **options})


def executor(folder: Path, **options: Any) -> LocalExecutor:
    return LocalExecutor(config_of(folder, **options))


def encoder(folder: Path, **options: Any) -> VisionEncoder:
    vision = load(config_of(folder, **options), usual_dtype).source.vision
    assert vision is not None
    return vision


def expected(pixels: npt.NDArray[np.uint8], dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """transformers' rows of a square in dtype."""
    model = tiny_model().model
    values = ((pixels * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
    numbers = torch.tensor(values.transpose(2, 0, 1))[None].to(dtype)
    model.to(dtype)
    try:
        with torch.no_grad():
            rows = model.connector(model.vision_model(pixel_values=numbers).last_hidden_state)
    finally:
        model.to(torch.float32)
    return np.asarray(rows.to(torch.float64).reshape(ROWS, -1).numpy())


def test_rows_are_those_of_transformers(folder: Path) -> None:
    vision, pixels = encoder(folder), noise(SQUARE, SQUARE, 4)
    exact, theirs = expected(pixels, torch.float64), expected(pixels, torch.float32)
    got = vision.encode(pixels)
    assert got.shape == (vision.num_rows, 48) == (ROWS, 48)
    assert np.abs(exact).max() > 0.1
    check_errors(np.abs(got - exact), np.abs(theirs - exact))


def test_rows_of_gemma_3_are_those_of_transformers(tmp_path: Path) -> None:
    vision, pixels = encoder(gemma3_checkpoint.write_checkpoint(tmp_path)), noise(gemma3_checkpoint.SIDE, 48, 4)
    values = ((pixels * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
    model, rows = gemma3_checkpoint.tiny_model().model, {}
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        with torch.no_grad():
            numbers = torch.tensor(values.transpose(2, 0, 1))[None].to(dtype)
            rows[dtype] = model.get_image_features(numbers).pooler_output[0].double().numpy()
    exact, theirs, got = rows[torch.float64], rows[torch.float32], vision.encode(pixels)
    assert got.shape == exact.shape == (gemma3_checkpoint.ROWS, 48)
    assert vision.sees_whole
    check_errors(np.abs(got - exact), np.abs(theirs - exact))


def test_names_of_gemma_3_as_either_version_of_transformers_writes_them() -> None:
    for before, vision, text in (
        ("", "vision_tower.vision_model.", "language_model.model."),
        ("model.", "model.vision_tower.", "model.language_model."),
    ):
        assert vision_name(f"{vision}encoder.layers.3.self_attn.out_proj.bias") == "layers.3.o.bias"
        assert vision_name(f"{vision}embeddings.position_embedding.weight") == "positions.weight"
        assert vision_name(f"{before}multi_modal_projector.mm_soft_emb_norm.weight") == "connector_norm.weight"
        assert text_name(f"{text}layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
        assert text_name(f"{vision}post_layernorm.weight") is None
        assert vision_name(f"{text}norm.weight") is None
        assert is_unused(f"{vision}head.probe")
        assert not is_unused(f"{vision}post_layernorm.weight")
    assert text_name("lm_head.weight") == text_name("language_model.lm_head.weight") == "lm_head.weight"


def test_an_images_rows_are_its_own(folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        vision = encoder(folder, dtype=dtype)
        load_cpu_library().start_threads(1)
        first = vision.encode(noise(SQUARE, SQUARE, 1))
        vision.encode(noise(SQUARE, SQUARE, 2))
        load_cpu_library().start_threads(3)
        assert vision.encode(noise(SQUARE, SQUARE, 1)).tobytes() == first.tobytes()


@pytest.mark.parametrize("side", [2, 7, 14, 27, 32])
def test_places_are_found_as_transformers_finds_them(side: int) -> None:
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    module = Idefics3VisionEmbeddings(Idefics3VisionConfig(hidden_size=1, image_size=4 * side, patch_size=4))
    with torch.no_grad():
        module.position_embedding.weight.copy_(torch.arange(side * side)[:, None])
        module.patch_embedding.weight.zero_()
        module.patch_embedding.bias.zero_()
        mask = torch.ones(1, side, side, dtype=torch.bool)
        ids = module(torch.zeros(1, 3, 4 * side, 4 * side), mask).reshape(-1)
    assert position_ids(side).tolist() == ids.int().tolist()


WRONG: list[tuple[list[str], Any, type[EngineCoreError], str]] = [
    (["vision_config", "hidden_act"], "relu", UnsupportedModelError, "vision_config.hidden_act='relu'"),
    (["vision_config", "image_size"], 60, ModelFileError, "must be a multiple of patch_size \\* scale_factor = 16"),
    (["vision_config", "num_attention_heads"], 5, ModelFileError, "must be a multiple of num_attention_heads=5"),
    (["vision_config", "num_hidden_layers"], 1, UnsupportedModelError, "unexpected tensor"),
    (["text_config", "model_type"], "qwen2", UnsupportedModelError, "text_config.model_type='qwen2'"),
    (["text_config"], None, ModelFileError, "text_config is missing"),
]


def set_setting(folder: Path, keys: list[str], value: Any) -> None:
    """Change a setting of config.json."""
    settings = inner = json.loads((folder / "config.json").read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(("keys", "value", "error", "text"), WRONG)
def test_wrong_settings(tmp_path: Path, keys: list[str], value: Any, error: type[EngineCoreError], text: str) -> None:
    write_checkpoint(tmp_path)
    set_setting(tmp_path, keys, value)
    with pytest.raises(error, match=text):
        executor(tmp_path)


GEMMA_WRONG: list[tuple[list[str], Any, type[EngineCoreError], str]] = [
    (["mm_tokens_per_image"], 15, ModelFileError, "square number whose root divides the 12 patches"),
    (["mm_tokens_per_image"], 169, ModelFileError, "square number whose root divides the 12 patches"),
    (["mm_tokens_per_image"], 25, ModelFileError, "square number whose root divides the 12 patches"),
    (["text_config", "model_type"], "gemma3n_text", UnsupportedModelError, "only 'gemma3_text' is|'gemma3_text' is"),
    (["text_config", "use_bidirectional_attention"], True, UnsupportedModelError, "use_bidirectional_attention"),
]


@pytest.mark.parametrize(("keys", "value", "error", "text"), GEMMA_WRONG)
def test_wrong_settings_of_gemma_3(
    tmp_path: Path, keys: list[str], value: Any, error: type[EngineCoreError], text: str
) -> None:
    gemma3_checkpoint.write_checkpoint(tmp_path)
    set_setting(tmp_path, keys, value)
    with pytest.raises(error, match=text):
        executor(tmp_path)


def test_images_of_one_size_have_no_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"image_max_pixels: images of .* have one size: leave it out"):
        executor(folder, image_max_pixels=1000)


def test_without_the_c_kernels_the_text_runs_alone(folder: Path) -> None:
    assert executor(folder, numerics="L0").features is None


def test_a_draft_model_reads_no_features(folder: Path) -> None:
    settings = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=2)
    features = executor(folder, speculative_config=settings).features
    assert isinstance(features, Features)
    assert features.limits is None
