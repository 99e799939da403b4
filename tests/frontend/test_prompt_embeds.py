"""Prompts that are embeddings: the bits of their tokens, from LLM on; and what is said about wrong ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from frontend.llm import LLM
from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.params.sampling_params import SamplingParams
from tests.core.models.checkpoints import build

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

PROMPTS = [[int(token) for token in np.random.default_rng(n).integers(3, 300, n)] for n in (7, 40, 123)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
WIDTH = 48


class Model:
    def __init__(self, folder: Path) -> None:
        model = build("llama3")
        model.save_pretrained(folder)
        self.table: npt.NDArray[np.float32] = model.get_input_embeddings().weight.detach().numpy()
        options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1000}
        self.llm = LLM(str(folder), max_num_batched_tokens=48, **options)

    def tokens(self, prompts: Any, params: SamplingParams = GREEDY) -> list[tuple[Any, Any]]:
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = Model(tmp_path_factory.mktemp("model"))
    with made.llm:
        yield made


def test_the_embeddings_of_tokens_give_what_the_tokens_give(model: Model) -> None:
    """In chunks of 48 tokens, together and with texts between them; the second time from the prefix cache."""
    plain = model.tokens(PROMPTS)
    embeds = [{"prompt_embeds": model.table[prompt]} for prompt in PROMPTS]
    assert model.tokens(embeds) == plain
    assert model.tokens([one for pair in zip(PROMPTS, embeds, strict=True) for one in pair])[1::2] == plain
    (again,) = model.llm.generate(embeds[2], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 112
    assert again.prompt_token_ids == [0] * 123
    salted = model.llm.generate({**embeds[2], "cache_salt": "other"}, GREEDY, use_tqdm=False)
    assert salted[0].num_cached_tokens == 0


def test_every_form_of_an_array(model: Model) -> None:
    rows = torch.tensor(model.table[PROMPTS[1]])
    expected = model.tokens({"prompt_embeds": rows})
    assert expected == model.tokens([PROMPTS[1]])
    assert model.tokens({"prompt_embeds": rows.double().numpy()}) == expected
    assert model.tokens({"prompt_embeds": np.asfortranarray(rows.numpy())}) == expected
    rounded = rows.bfloat16()
    assert model.tokens({"prompt_embeds": rounded}) == model.tokens({"prompt_embeds": rounded.float().numpy()})


def test_long_ones_are_several_features(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from ipc.wire import placed_feature

    monkeypatch.setattr(placed_feature, "_PART_BYTES", 4 * WIDTH * 50)
    assert len(placed_feature.placed_embeds(model.table[PROMPTS[2]])) == 3
    assert model.tokens({"prompt_embeds": model.table[PROMPTS[2]]}) == model.tokens([PROMPTS[2]])


def test_several_choices(model: Model) -> None:
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=8)
    (ids,), (rows,) = (
        model.llm.generate(prompt, params, use_tqdm=False)
        for prompt in ([PROMPTS[2]], {"prompt_embeds": model.table[PROMPTS[2]]})
    )
    assert [one.token_ids for one in rows.outputs] == [one.token_ids for one in ids.outputs]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt_embeds": np.zeros((3, 5), np.float32)}, InvalidRequestError, r"shape \[tokens, 48\].*got \[3, 5\]"),
    ({"prompt_embeds": np.zeros((0, 48), np.float32)}, InvalidRequestError, "at least one token"),
    ({"prompt_embeds": np.zeros((2, 48), np.int32)}, InvalidRequestError, "of floats; got int32"),
    ({"prompt_embeds": [[0.0] * 48]}, InvalidRequestError, "of floats; got list"),
    ({"prompt_embeds": np.full((2, 48), 1e300)}, InvalidRequestError, "finite"),
    ({"prompt_embeds": np.zeros((2000, 48), np.float32)}, InvalidRequestError, "has 2000 tokens; at most 999 fit"),
    ({"prompt_embeds": np.zeros((1, 48)), "prompt_token_ids": [1]}, InvalidRequestError, "must be a whole prompt"),
]


@pytest.mark.parametrize(("prompt", "error", "text"), WRONG)
def test_wrong_ones(model: Model, prompt: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        model.tokens(prompt)


def test_what_does_not_go_with_them(model: Model) -> None:
    embeds = {"prompt_embeds": model.table[PROMPTS[0]]}
    with pytest.raises(InvalidRequestError, match="prompt_logprobs need tokens"):
        model.tokens(embeds, SamplingParams(prompt_logprobs=1))
    with pytest.raises(UnsupportedParameterError, match="truncate_prompt_tokens cannot be used for a prompt with"):
        model.tokens(embeds, SamplingParams(truncate_prompt_tokens=3))


def test_an_engine_without_a_model_takes_none() -> None:
    with LLM(executor="fake") as llm, pytest.raises(UnsupportedParameterError, match="this engine does not take"):
        llm.generate({"prompt_embeds": np.zeros((2, 4), np.float32)}, use_tqdm=False)
