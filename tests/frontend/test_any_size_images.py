"""Images of any size from LLM on: chats, HTTP, the prefix cache, captures, and what is refused by name."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.images.any_size import any_size_images
from frontend.llm import LLM
from ipc.errors import EngineCoreError, InvalidRequestError, ModelFileError, UnsupportedModelError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureLimits
from tests.core.models.grid_checkpoints import LARGE, LARGE_SIZE, greedy, tiny_tokenizer, write_checkpoint
from tests.core.models.idefics3_checkpoint import noise

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

FAMILY = "qwen3-vl"
IMAGES = [noise(40, 60, 1), noise(33, 25, 2), noise(64, 20, 3), noise(9, 50, 4)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = write_checkpoint(FAMILY, tmp_path_factory.mktemp("grid"))
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 700, "max_num_batched_tokens": 48}
    with LLM(str(folder), **options, max_num_seqs=4, limit_mm_per_prompt={"image": 4}) as llm:
        yield llm


def asked(*images: Any, text: str = "What?") -> Any:
    return {"prompt": f"See {MARK * len(images)} here. {text}", "multi_modal_data": {"image": list(images)}}


def test_one_to_four_images_of_odd_sizes(llm: LLM) -> None:
    prompts = [asked(*IMAGES[:count]) for count in range(1, 5)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for count, output in enumerate(outputs, 1):
        assert list(output.outputs[0].token_ids) == greedy(FAMILY, output.prompt_token_ids, IMAGES[:count], 8)
    before = llm.statistics().num_encoder_inputs
    again = llm.generate(asked(*IMAGES[:3], text="Why?"), GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens >= len(outputs[2].prompt_token_ids) // 16 * 16 - 16
    assert llm.statistics().num_encoder_inputs == before
    assert list(again.outputs[0].token_ids) == greedy(FAMILY, again.prompt_token_ids, IMAGES[:3], 8)


def test_an_image_that_takes_several_messages(tmp_path: Path) -> None:
    """6.3 megapixels: 18.9 MB of pixels, while one message has at most 8 MiB."""
    folder, image = write_checkpoint(LARGE, tmp_path), np.tile(noise(64, 96, 5), (32, 32, 1))
    with LLM(str(folder), dtype="float32", max_model_len=700) as llm:
        output, other = llm.generate([asked(image), asked(image, text="Why?")], GREEDY, use_tqdm=False)
        assert llm.statistics().num_encoder_inputs == 1
    mark = tiny_tokenizer().token_to_id("<|image_pad|>")
    assert output.prompt_token_ids.count(mark) == 2048 * 3072 // 128**2
    for one in (output, other):
        assert list(one.outputs[0].token_ids) == greedy(LARGE, one.prompt_token_ids, [image], 8)


def test_sizes_up_to_the_processors_most_pixels() -> None:
    limits = FeatureLimits(48, 1 << 20, 32, 2730, any_size=True, rows_in_parts=16_384)
    rules = any_size_images({"size": LARGE_SIZE, "patch_size": 16}, limits, lambda token: 5)
    assert rules.size_of(3024, 4032) == (3008, 4032)
    older = FeatureLimits(48, 1 << 20, 32, 2730, any_size=True)  # of an engine that takes no parts
    alone = any_size_images({"size": LARGE_SIZE, "patch_size": 16}, older, lambda token: 5)
    assert math.prod(alone.size_of(3024, 4032)) <= 2730 * 32**2


def test_a_chat_with_choices_and_a_result_of_a_tool(llm: LLM) -> None:
    parts = [{"type": "image", "image": IMAGES[1]}, {"type": "text", "text": "What?"}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "image": IMAGES[2]}]},
    ]
    params = SamplingParams(temperature=1, top_k=1, max_tokens=8, n=2)
    (output,) = llm.chat(chat, params, use_tqdm=False)  # type: ignore[arg-type]
    expected = greedy(FAMILY, output.prompt_token_ids, IMAGES[1:3], 8)
    assert [list(choice.token_ids) for choice in output.outputs] == [expected, expected]
    assert output.prompt is not None
    assert output.prompt.count(MARK) == 2


def test_what_is_refused(llm: LLM) -> None:
    wrong: list[tuple[Any, str]] = [
        (asked(*IMAGES, IMAGES[0]), r"has 5 images; this engine takes at most 4 \(limit_mm_per_prompt\)"),
        (asked(noise(2, 500, 1)), "one side may be at most 200 times the other"),
        ({"prompt": "a", "multi_modal_data": {"video": IMAGES}}, "has video"),
    ]
    for prompt, text in wrong:
        with pytest.raises(EngineCoreError, match=text):
            llm.generate(prompt, GREEDY, use_tqdm=False)


LIMITS = FeatureLimits(48, 1 << 20, 28, 100, any_size=True)
SETTINGS: list[tuple[dict[str, Any], type[EngineCoreError], str]] = [
    ({"patch_size": 16}, ModelFileError, "patch_size and merge_size are 16 and 2.* one row of 28 x 28"),
    ({"size": 3}, ModelFileError, "size must be an object"),
    ({"size": {"shortest_edge": "a"}}, ModelFileError, "the fewest and the most pixels"),
    ({"min_pixels": 2_000_000}, ModelFileError, "got 2000000 and 1003520"),
    ({"do_resize": False}, UnsupportedModelError, "do_resize=False is not supported"),
    ({"resample": 2}, UnsupportedModelError, "resample=2"),
]


@pytest.mark.parametrize(("settings", "error", "text"), SETTINGS)
def test_wrong_processors(settings: dict[str, Any], error: type[EngineCoreError], text: str) -> None:
    with pytest.raises(error, match=text):
        any_size_images(settings, LIMITS, lambda token: 5)


def test_an_image_is_no_larger_than_the_engine_takes() -> None:
    rules = any_size_images({"max_pixels": 10**9, "min_pixels": 4}, LIMITS, lambda token: 5)
    height, width = rules.size_of(3000, 4000)
    assert height * width <= 100 * 28**2
    with pytest.raises(ModelFileError, match="no token"):
        any_size_images({}, LIMITS, lambda token: None)
    with pytest.raises(InvalidRequestError):
        rules.size_of(1, 201)
