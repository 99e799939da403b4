"""AsyncLLM: in process against a played engine, and with engine processes running the fake executor."""

import asyncio
import gc
import os
import signal
import weakref

import numpy as np
import pytest
import uvloop

from frontend.async_llm import AsyncLLM
from ipc.errors import CallFailedError, EngineCoreError, EngineDeadError, InvalidRequestError, RequestFailedError
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import (
    Abort,
    AddRequest,
    CallFailed,
    ErrorCode,
    FinishReason,
    GetStatistics,
    Goodbye,
    RequestFailed,
)

CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
IDS = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture
def llm(played_connection):
    with_engine = AsyncLLM(connect="ipc:///played")
    yield with_engine
    with_engine.shutdown()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    def run_on_loop(coroutine):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(coroutine, 20.0))

    return run_on_loop


def params(kind=CUMULATIVE, **arguments):
    return SamplingParams(output_kind=kind, **arguments)


async def submitted(engine, count=1):
    while len(engine.sent(AddRequest)) < count:
        await asyncio.sleep(0)


async def collect(outputs):
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason) async for one in outputs]


def in_task(outputs):
    return asyncio.create_task(collect(outputs))


async def between(engine, count=1):
    """Let consumers run: until they have submitted, then a few rounds of the loop."""
    await submitted(engine, count)
    for _ in range(5):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (CUMULATIVE, [([5], None), ([5, 6, 7], None), ([5, 6, 7, 8], "stop")]),
        (DELTA, [([5], None), ([6, 7], None), ([8], "stop")]),
        (FINAL, [([5, 6, 7, 8], "stop")]),
    ],
)
def test_each_kind_of_output(llm, played_connection, run, kind, expected):
    async def scenario():
        task = in_task(llm.generate(IDS, params(kind)))
        await between(played_connection)
        for position, tokens, finish in ((0, [5], 0), (1, [6, 7], 0), (3, [8], FinishReason.STOP)):
            played_connection.feed(0, position, tokens, finish)
            await between(played_connection)
        return await task

    assert run(scenario()) == expected
    assert played_connection.sent(Abort) == []
    assert llm.client.num_live == 0


def test_a_consumer_that_lags_gets_merged_updates(llm, played_connection, run):
    async def scenario():
        outputs = llm.generate(IDS, params(DELTA))
        first = asyncio.ensure_future(anext(outputs))
        await between(played_connection)
        played_connection.feed(0, 0, [0])
        await first
        for position in range(1, 500):
            played_connection.feed(0, position, [position])
        await asyncio.sleep(0.01)
        merged = await anext(outputs)
        await outputs.aclose()
        return merged.outputs[0].token_ids

    assert run(scenario()) == list(range(1, 500))


def test_batches_wake_the_loop_once(llm, played_connection, run):
    async def scenario():
        tasks = [in_task(llm.generate(IDS, params(DELTA))) for _ in range(20)]
        await between(played_connection, 20)
        calls = []
        loop = asyncio.get_running_loop()
        schedule = llm._waker.loop.call_soon_threadsafe
        llm._waker.loop = type("Loop", (), {"call_soon_threadsafe": lambda _, call: calls.append(schedule(call))})()
        for position in range(3):
            for number in range(20):
                played_connection.feed(number, position, [7], FinishReason.LENGTH if position == 2 else 0)
        llm._waker.loop = loop
        results = await asyncio.gather(*tasks)
        return len(calls), results

    calls, results = run(scenario())
    assert calls == 1
    assert results == [[([7, 7, 7], "length")]] * 20


@pytest.mark.parametrize("how", ["cancel", "aclose"])
def test_leaving_aborts(llm, played_connection, run, how):
    async def scenario():
        outputs = llm.generate(IDS, params(), "mine")
        if how == "cancel":
            task = in_task(outputs)
            await between(played_connection)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            first = asyncio.ensure_future(anext(outputs))
            await between(played_connection)
            played_connection.feed(0, 0, [1])
            await first
            await outputs.aclose()
        (abort,) = played_connection.sent(Abort)
        assert np.frombuffer(abort.numbers, "<u4").tolist() == [0]
        assert llm.client.num_live == 0
        again = in_task(llm.generate(IDS, params(), "mine"))
        await between(played_connection, 2)
        again.cancel()

    run(scenario())


def test_abort_by_name_ends_the_iterator(llm, played_connection, run):
    async def scenario():
        task = in_task(llm.generate(IDS, params(), "mine"))
        await between(played_connection)
        await llm.abort(["mine", "unknown"])
        (abort,) = played_connection.sent(Abort)
        assert np.frombuffer(abort.numbers, "<u4").tolist() == [0]
        played_connection.feed(0, 0, [], FinishReason.ABORT)
        return await task

    assert run(scenario()) == [([], "abort")]


def test_names(llm, played_connection, run):
    async def scenario():
        tasks = [in_task(llm.generate(IDS, params(), name)) for name in ("a", "0", None)]
        await between(played_connection, 3)
        for name in ("a", "0", "1"):  # that without a name got the next number
            with pytest.raises(InvalidRequestError, match=f"request_id '{name}' is in use by a live request"):
                await collect(llm.generate(IDS, params(), name))
        with pytest.raises(InvalidRequestError, match="request_id must be a str, got int"):
            await collect(llm.generate(IDS, params(), 5))
        for task in tasks:
            task.cancel()

    run(scenario())


def test_wrong_requests(llm, played_connection, run):
    async def scenario():
        for prompt, text in (("text", "no tokenizer"), ([[1], [2]], "one prompt at a time; got 2"), ([], "got 0")):
            with pytest.raises(InvalidRequestError, match=text):
                await collect(llm.generate(prompt, params()))
        with pytest.raises(InvalidRequestError, match="stop strings need a tokenizer"):
            await collect(llm.generate(IDS, params(stop="x")))
        with pytest.raises(InvalidRequestError, match="bad_words need a tokenizer"):
            await collect(llm.generate(IDS, params(bad_words=["x"])))

    run(scenario())
    assert played_connection.sent(AddRequest) == []
    assert llm._numbers == {}


def test_a_request_the_engine_gives_up(llm, played_connection, run):
    async def scenario():
        task = in_task(llm.generate(IDS, params(FINAL)))
        await between(played_connection)
        played_connection.give(RequestFailed(0, ErrorCode.RESOURCE_EXHAUSTED, "no room"))
        with pytest.raises(RequestFailedError, match="no room"):
            await task

    run(scenario())


def test_the_engine_dies(llm, played_connection, run):
    async def scenario():
        tasks = [in_task(llm.generate(IDS, params())) for _ in range(3)]
        await between(played_connection, 3)
        played_connection.feed(1, 0, [4], FinishReason.STOP)
        played_connection.die("killed by signal 9")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for call in (llm.check_health(), collect(llm.generate(IDS, params())), llm.statistics()):
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                await call
        return results

    first, finished, third = run(scenario())
    assert finished == [([4], "stop")]
    assert {type(first), type(third)} == {EngineDeadError}


def test_health_is_an_answer_not_a_process(llm, played_connection, run):
    run(llm.check_health())
    played_connection.answers[GetStatistics] = lambda _: None
    with pytest.raises(CallFailedError, match="did not answer GetStatistics"):
        run(llm.check_health(timeout=0.01))
    played_connection.answers[GetStatistics] = lambda message: CallFailed(message.call, ErrorCode.INTERNAL, "no")
    with pytest.raises(CallFailedError, match="no"):
        run(llm.check_health())


def test_one_open_loop_only(llm, played_connection):
    async def scenario():
        task = in_task(llm.generate(IDS, params()))
        await between(played_connection)
        with pytest.raises(EngineCoreError, match="bound to another event loop that is open"):
            await asyncio.to_thread(asyncio.run, collect(llm.generate(IDS, params())))
        task.cancel()

    asyncio.run(scenario())
    played_connection.feed(0, 0, [1])  # nothing is scheduled on the closed loop


def test_the_next_loop_takes_over_from_a_closed_one(llm, played_connection):
    """As of pytest-asyncio, which has a loop for each test."""

    async def scenario(number):
        task = in_task(llm.generate(IDS, params()))
        await between(played_connection)
        played_connection.feed(number, 0, [1], FinishReason.STOP)
        return await task

    async def leave_one():
        in_task(llm.generate(IDS, params()))
        await between(played_connection)

    assert asyncio.run(scenario(0))
    left = asyncio.new_event_loop()
    left.run_until_complete(leave_one())  # its iterator waits in a loop that is closed without an end of its tasks
    for task in asyncio.all_tasks(left):
        task._log_destroy_pending = False
    left.close()
    played_connection.feed(1, 0, [1])
    assert asyncio.run(scenario(2))


def test_shutdown_ends_the_iterators(llm, played_connection, run):
    async def scenario():
        task = in_task(llm.generate(IDS, params()))
        await between(played_connection)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="closed"):
            await task

    run(scenario())
    assert len(played_connection.sent(Goodbye)) == 1


def test_a_forgotten_llm_closes(played_connection):
    async def scenario(llm):
        task = in_task(llm.generate(IDS, params()))
        await between(played_connection)
        played_connection.feed(0, 0, [1], FinishReason.STOP)
        await task

    llm = AsyncLLM(connect="ipc:///played")
    asyncio.run(scenario(llm))
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert played_connection.closed


# --- engine processes -------------------------------------------------------------------------------------------


def test_a_real_engine(run):
    """Cancelling aborts, concurrent requests get what they get alone, a killed engine is known at once."""

    async def scenario():
        async with await AsyncLLM.create(executor="fake", max_num_seqs=8, restart_engine=False) as llm:
            alone = await collect(llm.generate(IDS, params(FINAL, max_tokens=50, temperature=0.0)))
            together = await asyncio.gather(
                *(collect(llm.generate(IDS, params(kind, max_tokens=50, temperature=0.0))) for kind in (DELTA, FINAL))
            )
            assert [token for ids, _ in together[0] for token in ids] == alone[0][0]
            assert together[1] == alone
            long = in_task(llm.generate(IDS, params(DELTA, max_tokens=100_000, ignore_eos=True)))
            while (await llm.statistics()).num_running == 0:
                await asyncio.sleep(0.01)
            long.cancel()
            while (counts := await llm.statistics()).num_running + counts.num_waiting:
                await asyncio.sleep(0.01)
            long = in_task(llm.generate(IDS, params(DELTA, max_tokens=100_000, ignore_eos=True)))
            while (await llm.statistics()).num_running == 0:
                await asyncio.sleep(0.01)
            os.kill(llm.client.welcome.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):  # its death is seen, not a silence
                await long
            with pytest.raises(EngineDeadError):
                await llm.check_health()

    run(scenario())
