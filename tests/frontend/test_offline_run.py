"""The requests of one generate(): refusals, failures, and how many the engine holds at once."""

import numpy as np
import pytest

from frontend.llm import LLM
from ipc.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, ErrorCode, FinishReason, Outputs, RequestFailed
from tests.frontend.conftest import greedy, ids_of


def all_choices(number, count):
    """Each choice's only token."""
    return Outputs(
        epoch=1,
        step=0,
        numbers=np.full(count, number, "<u4").tobytes(),
        positions=bytes(4 * count),
        counts=b"\1\0" * count,
        tokens=bytes(4 * count),
        choices=np.arange(count, dtype="<u2").tobytes(),
        finish=bytes([FinishReason.LENGTH]) * count,
    )


def refuse_first(connection, count, retry_after_ms=1):
    """Have the played engine refuse the first `count` requests for want of room, and fail prompt [9]."""
    seen = []

    def answer(request):
        seen.append(request)
        if len(seen) <= count:
            return RequestFailed(request.number, ErrorCode.RESOURCE_EXHAUSTED, "full", retry_after_ms)
        if np.frombuffer(request.prompt_token_ids, "<i4").tolist() == [9]:
            return RequestFailed(request.number, ErrorCode.INTERNAL, "not finite")
        connection.feed(request.number, 0, [request.seed % 50], FinishReason.LENGTH)
        return None

    connection.answers[AddRequest] = answer
    return seen


def test_what_is_refused_for_want_of_room_is_sent_again(played_llm, played_connection):
    """With the seeds of a run in which nothing is refused, though the numbers are others."""
    prompts = [[token] for token in range(1, 8)]
    refuse_first(played_connection, 0)
    undisturbed = ids_of(played_llm.generate(prompts, greedy(), use_tqdm=False))
    other = LLM(connect="ipc:///nowhere", skip_tokenizer_init=True)
    seen = refuse_first(played_connection, 5)
    assert ids_of(other.generate(prompts, greedy(), use_tqdm=False)) == undisturbed
    assert len(seen) == 12
    assert len({request.seed for request in seen}) == 7
    other.close()


def test_finished_outputs_are_on_the_error(played_llm, played_connection):
    refuse_first(played_connection, 2)
    with pytest.raises(RequestFailedError, match="prompt 1 of 3: not finite") as raised:
        played_llm.generate([[1], [9], [2]], greedy(), use_tqdm=False)
    assert [output and output.prompt_token_ids for output in raised.value.outputs] == [[1], None, [2]]
    outputs = played_llm.generate([[1], [9], [2]], greedy(), use_tqdm=False, return_exceptions=True)
    assert isinstance(outputs[1], RequestFailedError)
    assert [output.prompt_token_ids for output in outputs[::2]] == [[1], [2]]
    played_connection.answers[AddRequest] = lambda request: (
        played_connection.feed(request.number, 0, [1], FinishReason.LENGTH)
        if request.prompt_token_ids == b"\1\0\0\0"
        else played_connection.die("it is gone")
    )
    with pytest.raises(EngineDeadError) as dead:
        played_llm.generate([[1], [2]], greedy(), use_tqdm=False)
    assert dead.value.outputs[1] is None


def test_the_window_counts_choices(played_llm, played_connection):
    most = 0

    def answer(request):
        nonlocal most
        most = max(most, played_llm.client.num_live)
        if request.number % 2:
            for number in (request.number - 1, request.number):
                played_connection.give(all_choices(number, 100))

    played_connection.answers[AddRequest] = answer
    outputs = played_llm.generate([[1]] * 10, SamplingParams(n=100), use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [100] * 10
    assert most <= 4


def test_requests_name_their_tenant(played_llm, played_connection):
    refuse_first(played_connection, 0)
    played_llm.generate([[1]], greedy(), use_tqdm=False, tenant="alice")
    played_llm.generate([[1]], greedy(), use_tqdm=False)
    assert [request.tenant for request in played_connection.sent(AddRequest)] == ["alice", ""]
    with pytest.raises(InvalidRequestError, match="tenant must be a str, got int"):
        played_llm.generate([[1]], greedy(), use_tqdm=False, tenant=7)
