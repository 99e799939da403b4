"""Requests without sampling parameters: the model's recommendation, for every client of an engine."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from frontend.async_llm import AsyncLLM
from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, FinishReason
from tests.fake_options import fake_options
from tests.frontend.conftest import PlayedEngine, greedy

RECOMMENDED = {"temperature": 0.0, "max_new_tokens": 5, "repetition_penalty": 1.5}
EXPECTED = SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def model(text_side: Path) -> Path:
    """A folder that the fake executor takes for a model, with a tokenizer and a recommendation."""
    (text_side / "config.json").write_text("{}")
    (text_side / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return text_side


def test_of_a_model_started_here(model: Path) -> None:
    with LLM(model=model, executor="fake", executor_options=fake_options(vocab_size=64)) as llm:
        assert llm.get_default_sampling_params() == EXPECTED
        for sampling_params in (None, llm.get_default_sampling_params()):
            (output,) = llm.generate("w1 w2", sampling_params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) <= 5
        (chat,) = llm.chat([{"role": "user", "content": "w1"}], use_tqdm=False)
        assert len(chat.outputs[0].token_ids) <= 5
        (explicit,) = llm.generate("w1 w2", greedy(7, ignore_eos=True), use_tqdm=False)
        assert len(explicit.outputs[0].token_ids) == 7, "what is given is taken as it is"


@pytest.mark.parametrize(("option", "expected"), [("auto", EXPECTED), ("vllm", SamplingParams())])
def test_clients_that_connect_have_the_same(model: Path, option: str, expected: SamplingParams) -> None:
    """Clients use the engine's tokenizer, another one or none."""
    config = EngineConfig(model=str(model), executor="fake", generation_config=option)
    with EngineProcess(config) as process:
        for options in ({}, {"tokenizer": model}, {"skip_tokenizer_init": True}):
            with LLM(connect=process.address, **options) as llm:
                assert llm.get_default_sampling_params() == expected
                (output,) = llm.generate([1, 2], use_tqdm=False)
                assert len(output.outputs[0].token_ids) <= (expected.max_tokens or 0)


def test_what_is_sent(played_engine: PlayedEngine, played_connection: PlayedEngine) -> None:
    """A parameter of a later version is left out."""
    recommended = {"temperature": 0.5, "top_k": 3, "max_tokens": 9, "of_a_later_version": 1}
    played_engine.welcome = msgspec.structs.replace(played_engine.welcome, default_sampling=recommended)
    played_engine.answers[AddRequest] = lambda request: played_engine.feed(request.number, 0, [1], FinishReason.LENGTH)
    expected = {"temperature": 0.5, "top_k": 3, "max_tokens": 9}
    with LLM(connect="ipc:///played", skip_tokenizer_init=True) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**expected)
        llm.generate([[1], [2]], use_tqdm=False)
        llm.generate([3], SamplingParams(), use_tqdm=False)

    async def one() -> None:
        llm = AsyncLLM(connect="ipc:///played", skip_tokenizer_init=True)
        assert await llm.get_default_sampling_params() == SamplingParams(**expected)
        assert [output.finished async for output in llm.generate([4])] == [True]
        llm.shutdown()

    asyncio.run(one())
    sent = [message.params for message in played_engine.sent(AddRequest)]
    assert [(one.temperature, one.top_k, one.max_tokens) for one in sent] == [
        (0.5, 3, 9),
        (0.5, 3, 9),
        (1.0, 0, 16),
        (0.5, 3, 9),
    ]
