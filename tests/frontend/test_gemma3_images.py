"""Gemma 3 with images: tokens are transformers', whose image tokens see each other; chunks, batches and the cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontend.images.gemma3 import Gemma3Images
from frontend.llm import LLM
from ipc.errors import ConfigError, InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from tests.core.models.gemma3_checkpoint import ROWS, SIDE, processed, tiny_model, tiny_tokenizer, write_checkpoint
from tests.core.models.idefics3_checkpoint import noise

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

IMAGES = [noise(100, 150, 1), noise(48, 48, 2), noise(200, 60, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=10)
#: A step has room for an image and three rows more, so that chunks end everywhere.
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 500, "max_num_seqs": 4, "max_num_batched_tokens": 19}
QUESTION = "What is <start_of_image> this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def asked(*images: Any, text: str = QUESTION) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in outputs]


def theirs(ids: list[int], *images: Any) -> list[int]:
    """transformers' greedy tokens."""
    mark = tiny_tokenizer().token_to_id("<image_soft_token>")
    inputs = torch.tensor([ids])
    with torch.no_grad():
        got = tiny_model().generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            token_type_ids=(inputs == mark).long(),
            pixel_values=torch.tensor(np.concatenate([processed(image) for image in images])),
            max_new_tokens=10,
            do_sample=False,
        )
    return [int(token) for token in got[0, len(ids) :]]


def test_tokens_are_those_of_transformers(llm: LLM) -> None:
    prompts = [asked(image) for image in IMAGES]
    prompts += [asked(*IMAGES[:2], text="A long beginning, <start_of_image> and <start_of_image>, what are they?")]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, images in zip(outputs, [*[[image] for image in IMAGES], IMAGES[:2]], strict=True):
        (tokens,) = tokens_of([output])
        assert tokens == theirs(output.prompt_token_ids, *images)
        assert len(set(tokens)) > 3
    assert len({str(one) for one in tokens_of(outputs)}) == 4


def test_a_second_question_reads_the_cache_and_another_image_does_not(llm: LLM) -> None:
    """The cached blocks end within the image; its last tokens are computed again, and see the others."""
    llm.reset_prefix_cache()
    first = llm.generate(asked(IMAGES[0]), GREEDY, use_tqdm=False)[0]
    again = llm.generate(asked(IMAGES[0]), GREEDY, use_tqdm=False)[0]
    assert tokens_of([again]) == tokens_of([first])
    assert again.num_cached_tokens == 32
    begin = first.prompt_token_ids.index(tiny_tokenizer().token_to_id("<image_soft_token>"))
    assert begin < 16 < begin + ROWS < 32
    short = llm.generate(asked(IMAGES[0], text="What is <start_of_image> 8?"), GREEDY, use_tqdm=False)[0]
    assert short.num_cached_tokens == 16
    assert tokens_of([short])[0] == theirs(short.prompt_token_ids, IMAGES[0])
    changed = IMAGES[0].copy()
    changed[50:60, 70:80] ^= 255
    other = llm.generate(asked(changed), GREEDY, use_tqdm=False)[0]
    assert other.prompt_token_ids == first.prompt_token_ids
    assert other.num_cached_tokens == 0
    assert tokens_of([other])[0] == theirs(other.prompt_token_ids, changed)


def test_a_chat(llm: LLM) -> None:
    parts = [{"type": "image", "image": IMAGES[0]}, {"type": "text", "text": "What?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert output.prompt == "<bos><start_of_turn>user\n<start_of_image>What?<end_of_turn>\n<start_of_turn>model\n"
    assert tokens_of([output])[0] == theirs(output.prompt_token_ids, IMAGES[0])
    text = tiny_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    assert f"user\n\n\n<start_of_image>{'<image_soft_token>' * ROWS}<end_of_image>\n\nWhat?" in text


@pytest.mark.parametrize("size", [(48, 48), (100, 150), (7, 300), (1, 1), (333, 50)])
def test_squares_are_those_of_transformers(size: tuple[int, int]) -> None:
    got = Gemma3Images(square=SIDE, rows_per_square=ROWS, mark_id=0).squares_of(Image.fromarray(noise(*size, 1)))
    assert (got.num_rows, got.num_columns, len(got.pixels)) == (0, 0, 1)
    ours = ((got.pixels[0] * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
    assert np.array_equal(ours.transpose(2, 0, 1), processed(noise(*size, 1))[0])


def test_a_mark_without_an_image_and_an_image_that_was_cut(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="has <start_of_image> 0 times but 1 image"):
        llm.generate(asked(IMAGES[1], text="No mark"), GREEDY, use_tqdm=False)
    cut = SamplingParams(temperature=0, max_tokens=2, truncate_prompt_tokens=8)
    with pytest.raises(InvalidRequestError):
        llm.generate(asked(IMAGES[1]), cut, use_tqdm=False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_num_batched_tokens": 18}, "tokens of an image are computed in one step.*at least 19"),
    ({"long_prefill_token_threshold": 15}, "long_prefill_token_threshold=15.*at least 16"),
]


@pytest.mark.parametrize(("options", "text"), WRONG)
def test_steps_without_room_for_an_image_are_refused(folder: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(str(folder), **{**OPTIONS, **options})
