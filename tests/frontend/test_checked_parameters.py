"""Sampling parameters are checked once where they come in, and once more by the engine, which trusts no client."""

from collections.abc import Callable
from typing import Any

import pytest

from core.batch.request import request_from_message
from frontend.llm import LLM
from ipc.errors import InvalidRequestError
from ipc.params import sampling_params
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.records.black_box import request_digest
from ipc.wire.messages import AddRequest, FinishReason, decode_client_message, encode
from tests.frontend.conftest import PlayedEngine, output
from tests.raw_client import request

Count = Callable[[], int]


@pytest.fixture
def num_checks(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Return how often parameters have been checked since it was last asked."""
    checked: list[Any] = []
    check = sampling_params.refuse_parameters

    def counted(params: Any) -> None:
        checked.append(params)
        check(params)

    monkeypatch.setattr(sampling_params, "refuse_parameters", counted)

    def count() -> int:
        found = len(checked)
        checked.clear()
        return found

    return count


def test_a_request_through_llm(played_llm: LLM, played_engine: PlayedEngine, num_checks: Count) -> None:
    """The played engine decodes messages as an engine does."""
    played_engine.answers[AddRequest] = lambda message: output(message.number, 0, [5], FinishReason.LENGTH)
    params = SamplingParams(max_tokens=1, detokenize=False)
    assert num_checks() == 1
    played_llm.generate([1, 2], params, use_tqdm=False)
    assert num_checks() == 2
    params.max_tokens = 0  # set without a check, so it is checked when it is used
    with pytest.raises(InvalidRequestError, match="max_tokens must be in"):
        played_llm.generate([1, 2], params, use_tqdm=False)
    num_checks()
    played_llm.generate([1, 2], use_tqdm=False)  # parameters that are ours: when they are made, and in the engine
    assert num_checks() == 2


def test_a_request_in_the_engine(num_checks: Count) -> None:
    message = request(1, [1, 2])
    message.params.prompt_logprobs, message.params.n, message.params.temperature = 1, 3, 1.0
    frame = encode(message)
    num_checks()
    decoded = decode_client_message(frame)
    assert isinstance(decoded, AddRequest)
    for choice in range(3):
        request_from_message(decoded, 1, 1, 100, choice)
    request_digest(decoded.prompt_token_ids, decoded.params)
    assert num_checks() == 1


def test_a_changed_copy_is_not_checked_and_leaves_the_original(num_checks: Count) -> None:
    params = SamplingParams(max_tokens=3)
    num_checks()
    other = params.changed(output_kind=RequestOutputKind.DELTA)
    assert (other.max_tokens, other.output_kind) == (3, RequestOutputKind.DELTA)
    assert params.output_kind == RequestOutputKind.CUMULATIVE
    assert num_checks() == 0
