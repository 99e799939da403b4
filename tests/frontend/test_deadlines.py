"""Deadlines of generate() and chat(), and the errors of requests that miss them."""

import asyncio
import time

import pytest

from frontend.async_llm import AsyncLLM
from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.errors import DeadlineExceededError, InvalidRequestError, RequestFailedError
from ipc.options.config import EngineConfig
from ipc.wire.messages import AddRequest, ErrorCode, FinishReason, RequestFailed
from tests.frontend.conftest import PlayedEngine, greedy

ENDLESS = greedy(100_000, ignore_eos=True)


def test_a_request_that_misses_its_deadline(llm: LLM) -> None:
    """The others of the call finish first; the engine goes on."""
    begin = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"^prompt 1 of 2: the request's deadline has passed"):
        llm.generate([[1], [2]], [greedy(4), ENDLESS], use_tqdm=False, deadline=0.3)
    assert 0.3 <= time.monotonic() - begin < 10
    assert llm.statistics().num_running == 0
    with pytest.raises(DeadlineExceededError):
        llm.chat([{"role": "user", "content": "w1"}], ENDLESS, use_tqdm=False, deadline=0.05)
    (output,) = llm.generate([1], greedy(4, ignore_eos=True), use_tqdm=False, deadline=60)
    assert len(output.outputs[0].token_ids) == 4


def test_a_stream_that_misses_its_deadline() -> None:
    async def run(address: str) -> int:
        llm = AsyncLLM(connect=address)
        count = 0
        with pytest.raises(DeadlineExceededError, match="the request's deadline has passed"):  # noqa: PT012
            async for _ in llm.generate([1], ENDLESS, deadline=1):
                count += 1
        assert [output.finished async for output in llm.generate([1], greedy(1), deadline=60.0)] == [True]
        llm.close()
        return count

    with EngineProcess(EngineConfig(executor="fake")) as process:
        assert asyncio.run(run(process.address)) > 0, "what came before the deadline was shown"


def test_what_is_sent(played_engine: PlayedEngine, played_connection: PlayedEngine) -> None:
    """All requests of a call have one deadline, however late they are submitted."""

    def answer(request: AddRequest) -> None:
        time.sleep(0.02)
        played_engine.feed(request.number, 0, [1], FinishReason.LENGTH)

    played_engine.answers[AddRequest] = answer
    with LLM(connect="ipc:///played", skip_tokenizer_init=True) as llm:
        llm.generate([[1], [2]], greedy(), use_tqdm=False, deadline=60)
        llm.generate([[1], [2]], greedy(), use_tqdm=False, deadline=0.01)
        llm.generate([1], greedy(), use_tqdm=False)
    first, second, short, late, none = (request.deadline_ms for request in played_engine.sent(AddRequest))
    assert 30_000 < second <= first - 20 <= 59_980
    assert (1 <= short <= 10, late, none) == (True, 1, 0)


def test_errors_of_several_kinds(played_engine: PlayedEngine, played_connection: PlayedEngine) -> None:
    """The first one's kind is the call's."""
    codes = [ErrorCode.DEADLINE_EXCEEDED, ErrorCode.RESOURCE_EXHAUSTED]
    played_engine.answers[AddRequest] = lambda request: RequestFailed(request.number, codes[request.number % 2], "why")
    with LLM(connect="ipc:///played", skip_tokenizer_init=True) as llm:
        for prompts, kind in (([[1], [2]], DeadlineExceededError), ([[1]], DeadlineExceededError)):
            with pytest.raises(kind, match="why"):
                llm.generate(prompts, greedy(), use_tqdm=False)
        with pytest.raises(RequestFailedError, match="RESOURCE_EXHAUSTED") as caught:
            llm.generate([[1]], greedy(), use_tqdm=False)
        assert caught.type is RequestFailedError


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf"), True, "5", [5.0], 1e10])
def test_what_is_no_deadline(llm: LLM, deadline: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^deadline must be a number of seconds above 0 .* got"):
        llm.generate([1], greedy(), use_tqdm=False, deadline=deadline)  # type: ignore[arg-type]
