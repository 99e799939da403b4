"""The log probabilities of rollouts are those of the same tokens as parts of prompts, bit for bit: with preemption,
chunks, prefix hits, and whatever else runs in the same steps.
"""

import random
from typing import Any

import pytest

from frontend.llm import LLM
from frontend.results.outputs import TokenLogprobs
from ipc.params.sampling_params import SamplingParams
from tests.core.draft_heads import LLAMA, VOCAB, model_shapes, random_weights, write

MODEL = {**LLAMA, "num_hidden_layers": 2}
SHARED = list(range(20, 50))
#: Options with which requests are preempted and chunked.
OPTIONS: dict[str, Any] = {
    "threads": 1,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks_override": 120,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 48,
}


def values_of(entries: list[TokenLogprobs | None], tokens: list[int]) -> list[float]:
    return [entry[token].logprob for entry, token in zip(entries, tokens, strict=True) if entry is not None]


def compare(llm: LLM, count: int, seed: int) -> int:
    """Draw `count` rollouts, assert that nothing differs, and return how many log probabilities were compared."""
    rng, prompts, params = random.Random(seed), [], []
    for index in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
        prompts.append({"prompt_token_ids": SHARED + own if index % 2 else own})
        length = rng.randrange(20, 60)
        drawn = {"temperature": rng.choice([0.0, 0.7, 1.0]), "seed": rng.getrandbits(32), "max_tokens": length}
        params.append(SamplingParams(**drawn, top_p=rng.choice([1.0, 0.9]), logprobs=0, ignore_eos=True))
    rollouts = llm.generate(prompts, params, use_tqdm=False)
    whole = [{"prompt_token_ids": one.prompt_token_ids + one.outputs[0].token_ids} for one in rollouts]
    forced = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    num_compared = 0
    for rollout, again in zip(rollouts, forced, strict=True):
        (choice,) = rollout.outputs
        assert choice.logprobs is not None
        assert again.prompt_logprobs is not None
        reported = values_of([*choice.logprobs], choice.token_ids)
        expected = values_of(again.prompt_logprobs[len(rollout.prompt_token_ids) :], choice.token_ids)
        assert reported == expected, rollout.request_id
        num_compared += len(reported)
    return num_compared


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write(tmp_path_factory.mktemp("model"), MODEL, random_weights(model_shapes(MODEL), 1))
    with LLM(folder, dtype=request.param, **OPTIONS) as one:
        yield one


def test_rollouts_report_what_the_same_tokens_have_as_prompts(llm: LLM) -> None:
    before = llm.statistics()
    assert compare(llm, 40, 1) > 1200
    after = llm.statistics()
    assert after.num_preemptions > before.num_preemptions
    assert after.prefix_cache_hits > before.prefix_cache_hits


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_million_of_them(llm: LLM) -> None:
    total = seed = 0
    while total < 500_000:  # for each dtype
        seed += 1
        total += compare(llm, 400, seed)
