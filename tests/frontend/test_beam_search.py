"""LLM.beam_search() through an engine process: shapes of results, texts, and the same search by parameters."""

from collections.abc import Iterator

import pytest

from engine_core import LLM, BeamSearchParams, InvalidRequestError, SamplingParams
from tests.fake_options import fake_options


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        executor="fake", executor_options=fake_options(vocab_size=40, eos_token_id=2), skip_tokenizer_init=True
    ) as made:
        yield made


def test_sequences_are_vllms_and_the_best_first(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5)
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 20}]
    outputs = llm.beam_search(prompts, params)
    shown = llm.beam_search(prompts, params._replace(include_stop_str_in_output=True))
    for prompt, output, with_stop in zip(prompts, outputs, shown, strict=True):
        scores = [one.score for one in output.sequences]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        for one, other in zip(output.sequences, with_stop.sequences, strict=True):
            ids = prompt["prompt_token_ids"]
            assert one.tokens[: len(ids)] == ids
            assert other.tokens == one.tokens + ([2] if one.finish_reason == "stop" else [])
            count = len(other.tokens) - len(ids)
            assert len(one.logprobs) == count
            values = [next(iter(position.values())).logprob for position in one.logprobs]
            assert one.cum_logprob == pytest.approx(sum(values))
            assert one.score == pytest.approx(one.cum_logprob / count**0.5)


def test_parameters_ask_for_the_same_search(llm: LLM) -> None:
    wanted = llm.beam_search([[5, 6, 7]], BeamSearchParams(4, 10, ignore_eos=True))[0]
    params = SamplingParams(
        n=2, best_of=4, use_beam_search=True, temperature=0, max_tokens=10, ignore_eos=True, logprobs=0
    )
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert [[5, 6, 7, *one.token_ids] for one in output.outputs] == [one.tokens for one in wanted.sequences[:2]]
    assert [one.cumulative_logprob for one in output.outputs] == [one.cum_logprob for one in wanted.sequences[:2]]
    assert output.finished


def test_what_cannot_be_searched_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="beam_width must be an integer in"):
        llm.beam_search([[5]], BeamSearchParams(beam_width=0, max_tokens=4))
