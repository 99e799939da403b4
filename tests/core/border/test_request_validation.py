"""What is refused before the scheduler sees it, and how it is said."""

import contextlib

import msgspec
import numpy as np
import pytest

from core.border.validation import MAX_PROMPT_LOGPROBS, decode_request_number, validate_request
from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, encode


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


GOOD = AddRequest(7, ids(0, 99), SamplingParams(max_tokens=5), seed=2**64 - 1)


def check(request: AddRequest) -> None:
    validate_request(request, vocab_size=100, max_model_len=10, max_logprobs=20)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"prompt_token_ids": ids(*range(9))},
        {"delivered": [ids(1, 2, 3, 4)]},
        {"delivered": [b""]},
        {"number": 2**32 - 1, "priority": -(2**31), "deadline_ms": 1, "cache_salt": "x" * 1024},
    ],
)
def test_good_requests(change: dict[str, object]) -> None:
    check(msgspec.structs.replace(GOOD, **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt_token_ids": b""}, "the prompt is empty: it needs at least one token"),
        ({"prompt_token_ids": b"12345"}, "the prompt has 5 bytes"),
        ({"prompt_token_ids": ids(*[1] * 10)}, "has 10 tokens and max_model_len is 10"),
        ({"prompt_token_ids": ids(*[1] * 15)}, "shorten it by at least 6"),
        (
            {"prompt_token_ids": ids(1, 100)},
            "token 100 at index 1 of the prompt is not in the vocabulary: ids go from 0 to 99",
        ),
        ({"prompt_token_ids": ids(-1)}, "token -1 at index 0"),
        ({"prompt_token_ids": ids(*[1] * 70, 100, *[1] * 9)}, "token 100 at index 70"),
        ({"prompt_token_ids": ids(*[1] * 70, -1, *[1] * 9)}, "token -1 at index 70"),
        ({"delivered": [ids(1, 2), ids(1)]}, "2 choices, but n=1"),
        ({"delivered": [b"123"]}, "delivered[0] has 3 bytes"),
        ({"delivered": [ids(1, -5)]}, "token -5 at index 1 of delivered[0]"),
        ({"delivered": [ids(1, 2, 3, 4, 5, 6)]}, "delivered has 6 tokens"),
        ({"delivered": [ids(*[1] * 9)], "params": SamplingParams(max_tokens=None)}, "ends after 8"),
        ({"params": SamplingParams(logit_bias={100: 1.0})}, "token 100 of logit_bias is not in the vocabulary"),
        ({"params": SamplingParams(allowed_token_ids=[1, 101])}, "token 101 of allowed_token_ids is not in"),
        ({"params": SamplingParams(bad_words_token_ids=[[1], [2, 100]])}, "token 100 of bad_words_token_ids"),
        ({"params": SamplingParams(bad_words=["x"])}, "the engine only uses token ids: send bad_words_token_ids"),
        (
            {"params": SamplingParams(logprobs=21)},
            "logprobs=21 asks for 21 tokens at each position, but this engine reports at",
        ),
        ({"params": SamplingParams(prompt_logprobs=-1)}, "prompt_logprobs=-1 asks for 100 tokens at each"),
        ({"number": -1}, "number must be from 0 to 4294967295, got -1"),
        ({"number": 2**32}, "number must be"),
        ({"seed": -1}, "seed must be"),
        ({"priority": 2**31}, "priority must be"),
        ({"deadline_ms": -1}, "deadline_ms must be"),
        ({"deadline_ms": 2**60}, "deadline_ms must be"),
        ({"cache_salt": "x" * 1025}, "cache_salt has 1025 characters; at most 1024"),
    ],
)
def test_bad_requests(change: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(msgspec.structs.replace(GOOD, **change))
    assert text in str(caught.value)


def test_number_of_an_undecodable_request() -> None:
    good = encode(GOOD)
    assert decode_request_number(good) == 7
    assert decode_request_number(msgspec.msgpack.encode([2, 9, "no", "sense", {}, []])) == 9
    for bad in (b"", b"\xff", good[:1], msgspec.msgpack.encode([2, "x"]), msgspec.msgpack.encode([3, 7])):
        assert decode_request_number(bad) is None


def test_the_log_probabilities_of_a_prompt_are_bounded_whatever_max_logprobs_says() -> None:
    for count, each in ((-1, 100_000), (1000, 1000), (10**9, 100_000)):
        longest = MAX_PROMPT_LOGPROBS // each
        for num_prompt in (longest, longest + 1):
            request = AddRequest(1, ids(*[1] * num_prompt), SamplingParams(prompt_logprobs=count), seed=1)
            with (
                pytest.raises(InvalidRequestError, match=f"shorten the prompt to {longest} tokens")
                if (num_prompt > longest)
                else contextlib.nullcontext()
            ):
                validate_request(request, vocab_size=100_000, max_model_len=10_000, max_logprobs=-1)
