"""Pins from Python: what a caller asks for, what its outputs say, and calls on named pins."""

import asyncio
from collections.abc import Iterator

import pytest

from engine_core import LLM, AsyncLLM, CallFailedError, InvalidRequestError, Pin, RequestFailedError, SamplingParams
from tests.fake_options import fake_options

ONE = SamplingParams(max_tokens=1, temperature=0)
PROMPT = {"prompt_token_ids": list(range(5, 105))}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = fake_options(vocab_size=1000, max_model_len=512)
    with LLM(executor="fake", executor_options=options, num_blocks_override=41, max_model_len=320) as llm:
        yield llm


def test_a_pinned_prompt_is_found_after_others(llm: LLM) -> None:
    session = Pin("s", 60_000)
    (first,) = llm.generate(PROMPT, ONE, pins=[session])
    assert [(one.num_tokens, one.num_promised, one.refusal) for one in first.pins] == [(96, 0, "")]
    llm.generate([{"prompt_token_ids": [number, *range(200, 400)]} for number in range(10, 20)], ONE)
    (again,) = llm.generate({"prompt_token_ids": [*PROMPT["prompt_token_ids"], 9]}, ONE, pins=[session])
    assert (again.num_cached_tokens, again.pins[0].num_promised) == (96, 96)
    llm.fork_pin("s", "branch", 30_000)
    llm.release_pin("s")
    (branch,) = llm.pins().pins
    assert (branch.name, branch.num_held_tokens, branch.left_ms <= 30_000) == ("branch", 96, True)
    with pytest.raises(CallFailedError, match="there is no pin 's'"):
        llm.release_pin("s")
    llm.release_pin("branch")


def test_what_is_required_fails_with_the_bound(llm: LLM) -> None:
    long = {"prompt_token_ids": list(range(5, 255))}
    with pytest.raises(RequestFailedError, match=r"its share is 160 .*PIN_REFUSED"):
        llm.generate(long, ONE, pins=[Pin("s", 60_000, is_required=True)])
    (output,) = llm.generate(long, ONE, pins=[Pin("s", 60_000)])
    assert (output.pins[0].num_tokens, "its share is 160" in output.pins[0].refusal) == (0, True)


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        (Pin("s", 0), "a pin's time must be from 1 ms"),
        (Pin("n" * 300, 5), "has 300 characters"),
        (Pin("", 5, 101), "a pin of 101 tokens: the prompt has 100"),
    ],
)
def test_wrong_pins_are_refused(llm: LLM, pin: Pin, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(PROMPT, ONE, pins=[pin])


def test_a_name_is_of_one_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="a pin with a name is of one prompt"):
        llm.generate([PROMPT, PROMPT], ONE, pins=[Pin("s", 5)])
    with pytest.raises(InvalidRequestError, match="9 pins; at most 8"):
        llm.generate(PROMPT, ONE, pins=[Pin("", 5)] * 9)


def test_the_asynchronous_client_has_them_too() -> None:
    async def run() -> None:
        options = fake_options(vocab_size=1000, max_model_len=512)
        engine = await AsyncLLM.create(
            executor="fake", executor_options=options, num_blocks_override=41, max_model_len=320
        )
        try:
            async for output in engine.generate(PROMPT, ONE, pins=[Pin("s", 60_000)], tenant="t"):
                assert output.pins[0].num_tokens == 96
            await engine.fork_pin("s", "branch", 1000, "t")
            await engine.release_pin("s", "t")
            assert [one.name for one in (await engine.pins("t")).pins] == ["branch"]
            assert (await engine.pins()).pins == []
        finally:
            engine.close()

    asyncio.run(run())
