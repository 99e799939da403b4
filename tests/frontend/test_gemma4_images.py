"""Gemma 4 with images from LLM on: pixels and tokens are transformers', in chats, in chunks, and from the cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontend.images.gemma4 import Gemma4Images
from frontend.llm import LLM
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from tests.core.assistants import AssistedModel
from tests.core.models.gemma4_images_checkpoint import (
    POOL,
    ROWS,
    UNIT,
    greedy,
    inputs_of,
    processor,
    tiny_model,
    tiny_tokenizer,
    write_checkpoint,
)
from tests.core.models.idefics3_checkpoint import noise

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

FAMILY = "e4b"
IMAGES = [noise(100, 150, 1), noise(48, 48, 2), noise(200, 60, 3), noise(31, 47, 4)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 700, "max_num_batched_tokens": 50}
SIZES = [(48, 48), (100, 150), (7, 300), (1, 1), (333, 50), (1000, 14), (3, 200)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(write_checkpoint(FAMILY, tmp_path_factory.mktemp("gemma4"))), **OPTIONS) as llm:
        yield llm


def asked(*images: Any, text: str = "What is <|image|> this?") -> Any:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    cases = [IMAGES[:1], IMAGES[1:3], IMAGES[:3], IMAGES]
    prompts = [asked(*images, text="See" + " <|image|> and" * len(images) + " say.") for images in cases]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, images in zip(outputs, cases, strict=True):
        assert tokens_of([output])[0] == greedy(FAMILY, output.prompt_token_ids, images, 8)
    again = llm.generate(prompts[3], GREEDY, use_tqdm=False)[0]
    assert tokens_of([again]) == tokens_of(outputs[3:])
    assert again.num_cached_tokens > 100


def test_a_chat(llm: LLM) -> None:
    parts = [{"type": "image", "image": IMAGES[1]}, {"type": "text", "text": "What is an <|image|> tag?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert output.prompt == "<bos><|turn>user\n<|image|>What is an <|image|> tag?<turn|>\n<|turn>model\n"
    text = tiny_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    assert f"user\n<|image>{'<|image|>' * 64}<image|>What is an <|image|> tag" in text
    (prepared,) = llm._engine.prepare([{**asked(IMAGES[1], text=output.prompt), "image_marks": [0]}], GREEDY)  # type: ignore[list-item]
    assert [(one.use.position, one.use.num_rows) for one in prepared.prompt.features] == [
        (output.prompt_token_ids.index(tiny_tokenizer().token_to_id("<|image|>")), 64)
    ]


def test_an_assistant_drafts_after_images(llm: LLM, tmp_path: Path) -> None:
    """It reads sampled tokens, and K and V of all others."""
    pair = AssistedModel("gemma4-e2b", vocab_size=tiny_tokenizer().get_vocab_size(), vocab_size_per_layer_input=400)
    model, (_, assistant) = write_checkpoint(FAMILY, tmp_path / "images"), pair.write(tmp_path)
    drafts = {"model": assistant, "method": "mtp", "num_speculative_tokens": 3, "step_ns": [10**6] * 8}
    sampling = [SamplingParams(temperature=t / 2, seed=5, max_tokens=30, logprobs=1) for t in range(3)]
    prompts = [asked(*IMAGES[:count], text="See" + " <|image|> and" * count + " say.") for count in (1, 2, 3)]
    expected = llm.generate(prompts, sampling, use_tqdm=False)
    with LLM(str(model), speculative_config=drafts, **OPTIONS) as drafting:
        outputs = drafting.generate(prompts, sampling, use_tqdm=False)
    assert tokens_of(outputs) == tokens_of(expected)
    assert [one.outputs[0].logprobs for one in outputs] == [one.outputs[0].logprobs for one in expected]
    assert sum(one.metrics.num_draft_tokens for one in outputs if one.metrics is not None) > 10


def test_it_pools_prompts_with_images(tmp_path: Path) -> None:
    """In chunks, and from the prefix cache: the last token's state is transformers'."""
    folder, options = str(write_checkpoint(FAMILY, tmp_path)), {**OPTIONS, "max_num_batched_tokens": 80}
    prompts = [asked(*IMAGES[:2], text=f"See <|image|> and <|image|> {end}") for end in ("here.", "there.")]
    with LLM(folder, **options, runner="pooling") as pooling:
        outputs = pooling.embed(prompts, use_tqdm=False)
        again = pooling.embed(prompts, use_tqdm=False)
    for output, other in zip(outputs, again, strict=True):
        with torch.no_grad():
            inputs = inputs_of(output.prompt_token_ids, IMAGES[:2])
            state = tiny_model(FAMILY).model(**inputs).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(output.outputs.embedding, state / np.linalg.norm(state), atol=2e-5)
        assert (other.vectors.tobytes(), other.num_cached_tokens > 100) == (output.vectors.tobytes(), True)


def test_layers_with_inputs_of_their_own_take_no_prompt_embeds(llm: LLM) -> None:
    rows = np.zeros((3, 48), np.float32)
    with pytest.raises(InvalidRequestError, match="takes no prompt_embeds: it pools, or its layers have"):
        llm.generate({"prompt_embeds": rows}, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_those_of_transformers(size: tuple[int, int]) -> None:
    image, rules = noise(*size, 5), Gemma4Images(unit=UNIT, pool=POOL, most=ROWS, mark_id=0)
    try:
        made = processor()(images=[image], return_tensors="np", input_data_format="channels_last")
    except ValueError:
        with pytest.raises(InvalidRequestError, match="is too long for this model"):
            rules.squares_of(Image.fromarray(image))
        return
    (pixels,) = rules.squares_of(Image.fromarray(image)).pixels
    assert rules.rows_of(pixels.shape) == made["num_soft_tokens_per_image"][0] <= ROWS
    side = UNIT // POOL
    height, width = pixels.shape[0] // side, pixels.shape[1] // side
    cut = pixels.reshape(height, side, width, side, 3).transpose(0, 2, 1, 3, 4).reshape(height * width, -1)
    assert np.array_equal((cut * (1 / 255)).astype(np.float32), made["pixel_values"][0, : height * width])
