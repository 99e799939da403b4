"""InternVL with images: pixels, rows and tokens are transformers'; what its files may say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.executors.load import load
from core.executors.local import usual_dtype
from core.model_files.model_config import read_model_config
from core.models.vision_encoder import VisionEncoder
from frontend.images.internvl import InternVLImages, internvl_images
from frontend.llm import LLM
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureLimits
from kernels.cpu.library import load_cpu_library
from tests.core.models.float_errors import check_errors
from tests.core.models.idefics3_checkpoint import noise
from tests.core.models.internvl_checkpoint import (
    FAMILIES,
    MOST,
    ROWS,
    SQUARE,
    greedy,
    processed,
    tiny_model,
    tiny_tokenizer,
    write_checkpoint,
)
from tests.core.models.test_vision_encoder import set_setting

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(100, 150, 1), noise(32, 32, 2), noise(200, 60, 3), noise(7, 47, 4)]
SIZES = [(32, 32), (100, 150), (7, 300), (1, 1), (333, 50), (70, 71), (45, 90), (200, 100)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 700, "max_num_batched_tokens": 50}
RULES = InternVLImages(
    square=SQUARE,
    least=1,
    most=MOST,
    rows_per_square=ROWS,
    mark_id=tiny_tokenizer().token_to_id("<IMG_CONTEXT>"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(family, tmp_path_factory.mktemp("internvl")) for family in FAMILIES}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(folders["internvl3"]), **OPTIONS) as llm:
        yield llm


def asked(*images: Any, text: str) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def theirs(family: str, pixels: Any, dtype: torch.dtype) -> Any:
    """transformers' rows of squares in dtype."""
    model = tiny_model(family).model.to(dtype)
    try:
        with torch.no_grad():
            rows = model.get_image_features(
                torch.tensor(pixels).to(dtype),
                vision_feature_layer=-1,
                vision_feature_select_strategy="default",
                return_dict=True,
            )
    finally:
        model.float()
    return rows.pooler_output.double().numpy()


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(size: tuple[int, int]) -> None:
    image = noise(*size, 5)
    made, squares = processed(image), RULES.squares_of(Image.fromarray(image))
    assert len(made) == len(squares.pixels)
    assert RULES.text_of(squares.num_rows, squares.num_columns, [SQUARE, SQUARE, 3]).count(
        "<IMG_CONTEXT>"
    ) == ROWS * len(made)
    mean = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
    std = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
    for pixels, right in zip(squares.pixels, made, strict=True):
        ours = ((pixels * (1 / 255)).astype(np.float32) - mean) / std
        assert np.array_equal(ours.transpose(2, 0, 1), right)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    config = EngineConfig(model=str(folders[family]), dtype="float32", max_model_len=512)
    encoder = load(config, usual_dtype).source.vision
    assert isinstance(encoder, VisionEncoder)
    squares, values = RULES.squares_of(Image.fromarray(IMAGES[0])).pixels, processed(IMAGES[0])
    assert len(squares) > 2
    exact = theirs(family, values, torch.float64)
    their_error = np.abs(theirs(family, values, torch.float32) - exact)
    ours = np.stack([encoder.encode(pixels) for pixels in squares])
    assert ours.shape[1] == encoder.num_rows == ROWS
    check_errors(np.abs(ours - exact), their_error)
    load_cpu_library().stop_threads()


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    cases = [IMAGES[:1], IMAGES[1:3], IMAGES]
    prompts = [asked(*images, text="See" + " <IMG_CONTEXT> and" * len(images) + " say.") for images in cases]
    for output, images in zip(llm.generate(prompts, GREEDY, use_tqdm=False), cases, strict=True):
        assert list(output.outputs[0].token_ids) == greedy("internvl3", output.prompt_token_ids, images, 8)
    again = llm.generate(prompts[2], GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens > 100


def test_a_chat_with_the_text_of_internvl_3_5(folders: dict[str, Path]) -> None:
    parts = [{"type": "image", "image": IMAGES[1]}, {"type": "text", "text": "What is it?"}]
    with LLM(str(folders["internvl3.5"]), **OPTIONS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    text = tiny_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == f"<|im_start|>user\n<img>{'<IMG_CONTEXT>' * ROWS}</img>\nWhat is it?<|im_end|>\n"
    assert list(output.outputs[0].token_ids) == greedy("internvl3.5", output.prompt_token_ids, IMAGES[1:2], 8)


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("vision_feature_layer", -2, UnsupportedModelError, "vision_feature_layer=-2 is not supported; only -1 is"),
    ("vision_config.use_mask_token", True, UnsupportedModelError, "use_mask_token=True is not supported; only False"),
    ("vision_config.norm_type", "group_norm", UnsupportedModelError, "norm_type='group_norm' is not supported"),
    ("vision_config.layer_norm_eps", 1e-5, UnsupportedModelError, "layer_norm_eps=1e-05 is not supported; only 1e-06"),
    ("vision_config.hidden_size", 33, ModelFileError, "hidden_size must be a multiple of num_attention_heads=2"),
    ("downsample_ratio", 0.3, ModelFileError, "downsample_ratio must divide the 8 patches of a side"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), WRONG)
def test_what_is_not_read_is_refused_by_name(
    name: str, value: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    tiny_model("internvl3-6b").config.save_pretrained(tmp_path)
    set_setting(tmp_path, ["architectures"], ["InternVLForConditionalGeneration"])
    set_setting(tmp_path, name.split("."), value)
    with pytest.raises(error, match=text):
        read_model_config(tmp_path)


def test_settings_of_the_processor() -> None:
    size, limits = {"height": SQUARE, "width": SQUARE}, FeatureLimits(48, 1 << 20, SQUARE, ROWS)
    find = tiny_tokenizer().token_to_id
    assert internvl_images({"size": size, "max_patches": MOST}, limits, find) == RULES
    for settings, error, text in (
        ({"size": {"height": 8, "width": 8}}, ModelFileError, "size is .* reads squares of 32 x 32"),
        ({"size": size, "max_patches": 65}, ModelFileError, "min_patches and max_patches must be 1 to 64"),
        ({"size": size, "resample": 2}, UnsupportedModelError, "resample=2 is not supported"),
    ):
        with pytest.raises(error, match=text):
            internvl_images(settings, limits, find)
    with pytest.raises(ModelFileError, match="no token <IMG_CONTEXT>"):
        internvl_images({"size": size}, limits, lambda token: None)
