"""Prompts that cannot be served, beside others: each error stands in its prompt's place."""

import pytest

from frontend.llm import LLM
from ipc.errors import InvalidRequestError, PromptTooLongError
from ipc.params.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, detokenize=False)


def test_the_others_run_and_each_error_is_returned_in_its_place() -> None:
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6], [7] * 100, [], [8])]
    with LLM(executor="fake", max_model_len=32) as llm:
        found = llm.generate(prompts, PARAMS, use_tqdm=False, return_exceptions=True)
        alone = llm.generate([prompts[0], prompts[3]], [PARAMS, PARAMS], use_tqdm=False)
        assert [type(one) for one in found[1:3]] == [PromptTooLongError, InvalidRequestError]
        assert [found[0].outputs[0].token_ids, found[3].outputs[0].token_ids] == [
            one.outputs[0].token_ids for one in alone
        ]
        with pytest.raises(PromptTooLongError):
            llm.generate(prompts[:2], PARAMS, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="tenant must be a str"):
            llm.generate(prompts, PARAMS, use_tqdm=False, return_exceptions=True, tenant=5)  # type: ignore[call-overload]
        with pytest.raises(InvalidRequestError):  # one for all or one for each
            llm.generate(prompts, [PARAMS], use_tqdm=False, return_exceptions=True)


def test_a_prompt_that_is_too_long_may_be_ignored() -> None:
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6], [7] * 100, [], [8])]
    with LLM(executor="fake", max_model_len=32) as llm:
        found = llm.generate([*prompts[:2], prompts[3]], PARAMS, use_tqdm=False, ignore_too_long=True)
        alone = llm.generate([prompts[0], prompts[3]], PARAMS, use_tqdm=False)
        ignored = found[1]
        assert (ignored.finished, ignored.prompt_token_ids) == (True, [7] * 100)
        assert [(one.text, one.token_ids, one.finish_reason) for one in ignored.outputs] == [("", [], "ignored")]
        assert [found[i].outputs[0].token_ids for i in (0, 2)] == [one.outputs[0].token_ids for one in alone]
        with pytest.raises(InvalidRequestError, match="cannot be empty"):
            llm.generate(prompts, PARAMS, use_tqdm=False, ignore_too_long=True)
        both = llm.generate(prompts, PARAMS, use_tqdm=False, ignore_too_long=True, return_exceptions=True)
        assert both[1].outputs == ignored.outputs
        assert isinstance(both[2], InvalidRequestError)
