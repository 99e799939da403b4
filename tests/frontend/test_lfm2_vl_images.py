"""LFM2-VL with images: pixels, rows and tokens are transformers'; what its files may say.

The goldens in lfm2_vl_pixels.json are from transformers' processor (5.24.0) with torchvision 0.28.0, which the tests do
not install: for each image the rows and columns of its squares, the size of the whole image, a digest of all patches,
and the text, with <image>*N for N marks.
"""

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.executors.load import load
from core.executors.local import usual_dtype
from core.model_files.model_config import read_model_config
from core.models.grid_encoder import GridEncoder
from frontend.images.fixed_point import resized
from frontend.images.lfm2_vl import lfm2_vl_images
from frontend.llm import LLM
from ipc.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureLimits
from kernels.cpu.library import load_cpu_library
from tests.core.models.float_errors import check_errors
from tests.core.models.idefics3_checkpoint import noise
from tests.core.models.lfm2_vl_checkpoint import (
    FAMILIES,
    RULES,
    SIZES,
    UNIT,
    greedy,
    patches_of,
    tiny_model,
    tiny_tokenizer,
    vision_inputs,
    write_checkpoint,
)
from tests.core.models.test_vision_encoder import set_setting

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "lfm2_vl_pixels.json").read_text())
IMAGES = [noise(100, 150, 1), noise(32, 40, 2), noise(200, 60, 3), noise(7, 47, 4)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 700, "max_num_batched_tokens": 50}
LIMITS = FeatureLimits(48, 1 << 20, UNIT, 20, any_size=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(family, tmp_path_factory.mktemp("lfm2")) for family in FAMILIES}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(folders["lfm2-vl"]), **OPTIONS) as llm:
        yield llm


def asked(*images: Any, text: str) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def theirs(family: str, number: int, dtype: torch.dtype) -> Any:
    """transformers' rows of an image in dtype."""
    model, inputs = tiny_model(family).model.to(dtype), vision_inputs(IMAGES[number : number + 1])
    try:
        with torch.no_grad():
            inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
            rows = model.get_image_features(**inputs, return_dict=True)
    finally:
        model.float()
    return torch.cat(list(rows.pooler_output)).double().numpy()


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda one: "x".join(map(str, one["image"])))
def test_pixels_are_those_of_transformers(golden: dict[str, Any]) -> None:
    settings, (height, width) = golden["settings"], golden["image"]
    unit = settings.get("encoder_patch_size", 16) * 2
    limits = FeatureLimits(48, 1 << 20, unit, 256, any_size=True)
    rules = lfm2_vl_images(settings, limits, tiny_tokenizer().token_to_id)
    got = rules.squares_of(Image.fromarray(noise(height, width, 5)))
    assert [max(1, got.num_rows), max(1, got.num_columns)] == golden["grid"]
    assert list(got.pixels[-1].shape[:2]) == golden["whole"]
    digest = blake2b(digest_size=16)
    for pixels in got.pixels:
        digest.update(patches_of(pixels, unit // 2).tobytes())
    assert digest.hexdigest() == golden["digest"]
    last = got.pixels[-1].shape
    text = rules.text_of(got.num_rows, got.num_columns, last)
    assert re.sub("(?:<image>)+", lambda run: f"<image>*{len(run[0]) // 7}", text) == golden["text"]


@pytest.mark.parametrize("size", [(1, 1), (13, 300), (64, 64), (90, 47)])
def test_an_image_is_resized_with_the_bits_of_torch(size: tuple[int, int]) -> None:
    pixels = noise(70, 53, 6)
    exact = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).permute(2, 0, 1)[None], size, mode="bilinear", antialias=True
    )
    if "AVX" in torch.backends.cpu.get_cpu_capability():  # otherwise torch has another kernel
        assert np.array_equal(resized(pixels, *size), exact[0].permute(1, 2, 0).numpy())
    assert np.abs(resized(pixels, *size).astype(int) - exact[0].permute(1, 2, 0).numpy().astype(int)).max() <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    config = EngineConfig(model=str(folders[family]), dtype="float32", max_model_len=512)
    encoder = load(config, usual_dtype).source.vision
    assert isinstance(encoder, GridEncoder)
    for number in (0, 1, 3):
        squares = RULES.squares_of(Image.fromarray(IMAGES[number])).pixels
        ours = np.concatenate([encoder.encode(pixels) for pixels in squares])
        exact = theirs(family, number, torch.float64)
        check_errors(np.abs(ours - exact), np.abs(theirs(family, number, torch.float32) - exact))
    load_cpu_library().stop_threads()


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    cases = [IMAGES[:1], IMAGES[1:3], IMAGES[:3], IMAGES]
    prompts = [asked(*images, text="See" + " <image> and" * len(images) + " say.") for images in cases]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, images in zip(outputs, cases, strict=True):
        assert list(output.outputs[0].token_ids) == greedy("lfm2-vl", output.prompt_token_ids, images, 8)
    again = llm.generate(prompts[3], GREEDY, use_tqdm=False)[0]
    assert again.outputs[0].token_ids == outputs[3].outputs[0].token_ids


def test_a_chat(folders: dict[str, Path]) -> None:
    parts = [{"type": "image", "image": IMAGES[1]}, {"type": "text", "text": "What is it?"}]
    with LLM(str(folders["lfm2.5-vl"]), **OPTIONS) as llm:
        (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    text = tiny_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    image = f"<|image_start|>{'<image>' * 20}<|image_end|>"
    assert text == f"<|im_start|>user\n{image}What is it?<|im_end|>\n"
    assert list(output.outputs[0].token_ids) == greedy("lfm2.5-vl", output.prompt_token_ids, IMAGES[1:2], 8)


def test_an_image_that_is_too_thin(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="rows for this model; at most 20 are"):
        llm.generate(asked(noise(1, 900, 1), text="<image>"), GREEDY, use_tqdm=False)


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("vision_config.hidden_act", "gelu", UnsupportedModelError, "hidden_act='gelu' is not supported"),
    ("vision_config.hidden_size", 36, ModelFileError, "must be a multiple of 4 \\* num_attention_heads=8, got 36"),
    ("vision_config.num_patches", 37, ModelFileError, "num_patches must be a square number, got 37"),
    ("projector_bias", False, UnsupportedModelError, "projector_bias=False is not supported; only True is"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), WRONG)
def test_what_is_not_read_is_refused_by_name(
    name: str, value: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    tiny_model("lfm2-vl").config.save_pretrained(tmp_path)
    set_setting(tmp_path, ["architectures"], ["Lfm2VlForConditionalGeneration"])
    set_setting(tmp_path, name.split("."), value)
    with pytest.raises(error, match=text):
        read_model_config(tmp_path)


def test_settings_of_the_processor() -> None:
    find = tiny_tokenizer().token_to_id
    assert lfm2_vl_images(SIZES, LIMITS, find) == RULES
    assert lfm2_vl_images({**SIZES, "do_image_splitting": False}, LIMITS, find).tiles == (1, 1)
    for settings, error, text in (
        ({"encoder_patch_size": 8}, ModelFileError, "are 8 and 2, but the vision encoder makes one row of 8 x 8"),
        ({"max_tiles": 65}, ModelFileError, "min_tiles and max_tiles must be 2 to 64"),
        ({"max_image_tokens": 21}, ModelFileError, "at most 20"),
        ({"tile_size": 33}, ModelFileError, "tile_size a multiple of 8"),
        ({"max_pixels_tolerance": 0}, ModelFileError, "must be a positive number"),
        ({"min_tiles": "a"}, ModelFileError, "min_tiles must be an integer"),
        ({"resample": 3}, UnsupportedModelError, "resample=3 is not supported"),
    ):
        with pytest.raises(error, match=text):
            lfm2_vl_images({**SIZES, **settings}, LIMITS, find)
    with pytest.raises(ModelFileError, match="no token <image>"):
        lfm2_vl_images(SIZES, LIMITS, lambda token: None)
