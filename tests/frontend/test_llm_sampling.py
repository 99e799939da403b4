"""Sampling parameters through LLM: logprobs, bad words, with engine processes running the fake executor."""

import asyncio
import time

import msgspec
import pytest

from core.executors.fake import choice_seed
from frontend.async_llm import AsyncLLM
from frontend.llm import LLM
from frontend.results.outputs import Logprob
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import AddRequest
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.frontend.conftest import VOCAB_SIZE, greedy


def test_logprobs(llm):
    """The fake executor's: the token first, of rank 3, then the ids after it, and values by position."""
    params = greedy(4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    output = llm.generate([1, 2, 3], params, use_tqdm=False)[0]
    completion = output.outputs[0]
    assert [list(one) for one in completion.logprobs] == [
        [token, (token + 1) % VOCAB_SIZE, (token + 2) % VOCAB_SIZE] for token in completion.token_ids
    ]
    assert completion.logprobs[1][completion.token_ids[1]] == Logprob(-5 / 16, 3, f".w{completion.token_ids[1]}")
    assert [one.rank for one in completion.logprobs[1].values()] == [3, 1, 2]
    assert completion.cumulative_logprob == -(4 + 5 + 6 + 7) / 16
    assert output.prompt_logprobs == [None, {2: Logprob(-2 / 16, 3, ".w2")}, {3: Logprob(-3 / 16, 3, ".w3")}]
    everything = llm.generate([1], greedy(1, logprobs=-1, detokenize=False), use_tqdm=False)[0].outputs[0]
    assert len(everything.logprobs[0]) == VOCAB_SIZE
    assert {one.decoded_token for one in everything.logprobs[0].values()} == {None}
    plain = llm.generate([1], greedy(1), use_tqdm=False)[0]
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None,) * 3


def test_more_logprobs_than_the_engine_tells_are_refused_before_anything_is_submitted(llm):
    most = greedy(1, logprobs=VOCAB_SIZE)
    assert len(llm.generate([1], most, use_tqdm=False)[0].outputs[0].logprobs[0]) == VOCAB_SIZE
    too_many = greedy(1, prompt_logprobs=VOCAB_SIZE + 1)
    with pytest.raises(InvalidRequestError, match=f"prompt_logprobs={VOCAB_SIZE + 1} .* at most {VOCAB_SIZE}"):
        llm.generate([[1], [2]], [most, too_many], use_tqdm=False)


def test_logprobs_of_a_request_that_a_stop_string_cuts(llm):
    free = llm.generate([1, 2], greedy(20, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    params = greedy(20, ignore_eos=True, stop=[f".w{free.token_ids[9]}"], logprobs=0)
    cut = llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0]
    assert cut.finish_reason == "stop"
    assert [list(one) for one in cut.logprobs] == [[token] for token in cut.token_ids]
    assert cut.cumulative_logprob == sum(
        one[token].logprob for one, token in zip(cut.logprobs, cut.token_ids, strict=True)
    )


def test_bad_words_reach_the_engine_as_ids(played_connection, text_side):
    played_connection.answers[AddRequest] = lambda request: played_connection.feed(request.number, 0, [5], 1)
    with LLM(connect="ipc:///played", tokenizer=text_side) as llm:
        params = greedy(bad_words=["w3 w4", "w5"])
        llm.generate([1], params, use_tqdm=False)
        assert played_connection.sent(AddRequest)[0].params.bad_words_token_ids == [[3, 4], [5]]
        assert params.bad_words_token_ids is None


def assert_idle(llm):
    deadline = time.monotonic() + 5.0
    while (counts := llm.statistics()).num_running + counts.num_waiting:
        assert time.monotonic() < deadline, counts
        time.sleep(0.01)


def test_several_choices(llm):
    params = SamplingParams(n=5, max_tokens=20, ignore_eos=True, seed=9, logprobs=1, prompt_logprobs=0)
    first, second = llm.generate([[1, 2], [3]], params, use_tqdm=False)
    for output, prompt in ((first, [1, 2]), (second, [3])):
        assert [one.index for one in output.outputs] == list(range(5))
        for choice, one in enumerate(output.outputs):
            assert one.token_ids == fake_tokens(prompt, 20, VOCAB_SIZE, choice_seed(9, choice))
            assert [next(iter(place)) for place in one.logprobs] == one.token_ids
            assert one.text == llm.get_tokenizer().decode(one.token_ids, skip_special_tokens=True)
        assert len(output.prompt_logprobs) == len(prompt)
    assert_idle(llm)


def test_a_stop_string_ends_a_choice_in_the_engine_too(llm):
    params = SamplingParams(n=2, max_tokens=300, ignore_eos=True, seed=1)
    free = llm.generate([1, 2], params, use_tqdm=False)[0].outputs
    other = free[1].token_ids
    token = next(token for token in free[0].token_ids if token not in other[:250] or other.index(token) > 100)
    stop = [f".w{token}"]
    before = llm.statistics().num_generation_tokens
    cut = llm.generate([1, 2], msgspec.structs.replace(params, stop=stop), use_tqdm=False)[0].outputs
    assert cut[0].finish_reason == "stop"
    assert free[0].text.startswith(cut[0].text)
    assert llm.statistics().num_generation_tokens - before < 600
    assert_idle(llm)


def test_truncated_prompts(llm):
    params = [greedy(truncate_prompt_tokens=2), greedy()]
    first, second = llm.generate(["w4 w5 w6", "w4 w5 w6"], params, use_tqdm=False)
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([5, 6], [4, 5, 6])


def test_what_cannot_be_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="token 64 of logit_bias is not in the vocabulary"):
        llm.generate([1], greedy(logit_bias={64: 1.0}), use_tqdm=False)
    assert_idle(llm)


def test_streams_of_choices(text_side):
    """Deltas of each choice add up to what it gives at once."""

    async def scenario():
        arguments = {
            "executor": "fake",
            "executor_options": fake_options(vocab_size=VOCAB_SIZE),
            "tokenizer": text_side,
        }
        async with await AsyncLLM.create(**arguments) as llm:
            params = SamplingParams(n=4, max_tokens=50, ignore_eos=True, seed=3, output_kind=RequestOutputKind.DELTA)
            texts, ids = [""] * 4, [[] for _ in range(4)]
            async for output in llm.generate({"prompt_token_ids": [1, 2]}, params):
                for one in output.outputs:
                    texts[one.index] += one.text
                    ids[one.index] += one.token_ids
            assert ids == [fake_tokens([1, 2], 50, VOCAB_SIZE, choice_seed(3, choice)) for choice in range(4)]
            assert texts == [llm.get_tokenizer().decode(one, skip_special_tokens=True) for one in ids]
            outputs = llm.generate({"prompt_token_ids": [1]}, SamplingParams(n=4, max_tokens=10**5, ignore_eos=True))
            await anext(outputs)
            await outputs.aclose()
            while (counts := await llm.statistics()).num_running + counts.num_waiting:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 20.0))
