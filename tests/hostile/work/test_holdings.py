"""Holdings: the memory of unfinished answers has a bound; a single one always runs."""

import pytest

from frontend.http import holdings
from frontend.http.errors import HttpError
from frontend.http.holdings import MAX_BYTES, MAX_LOGPROBS, Cost, Holdings, cost_of, sum_of
from ipc.params.sampling_params import SamplingParams


def test_more_than_there_is_waits_for_what_is_given_back() -> None:
    shared = Holdings()
    first = shared.take(2 * MAX_BYTES)  # alone
    with pytest.raises(HttpError) as full:
        shared.take(1)
    assert full.value.status == 503
    first()
    second = shared.take(MAX_BYTES // 2)
    shared.take(MAX_BYTES // 2)()
    second()
    shared.take(MAX_BYTES)


def bytes_of(num_prompt: int = 10, *, is_streamed: bool = False, **fields: int) -> int:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 10, **fields})  # type: ignore[arg-type]
    return sum_of([cost_of(num_prompt, params, 4000, 1000, is_streamed=is_streamed)])


def test_what_an_answer_takes() -> None:
    plain = bytes_of()
    assert bytes_of(n=8) - bytes_of(n=4) == 4 * holdings.CHOICE_BYTES
    assert bytes_of(110) == plain + 100 * holdings.TOKEN_BYTES
    assert plain < bytes_of(logprobs=5, is_streamed=True) < bytes_of(logprobs=5)
    assert bytes_of(logprobs=5) < bytes_of(logprobs=5, n=2) < bytes_of(logprobs=5, n=2, prompt_logprobs=5)
    assert bytes_of(logprobs=-1) > 100 * bytes_of(logprobs=0) // 10


def test_log_probabilities_of_one_answer_are_bounded() -> None:
    fits = MAX_LOGPROBS // 21
    bytes_of(fits, prompt_logprobs=20)
    for fields in ({"num_prompt": fits + 1, "prompt_logprobs": 20}, {"n": 8, "max_tokens": 4000, "logprobs": 20}):
        with pytest.raises(HttpError) as refused:
            bytes_of(**fields)
        assert refused.value.status == 400
    with pytest.raises(HttpError):
        sum_of([Cost(1, MAX_LOGPROBS // 4)] * 5)
