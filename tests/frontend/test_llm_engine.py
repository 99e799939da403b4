"""LLMEngine, EngineArgs and the names of vLLM around them, on the fake executor."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from frontend.async_llm import AsyncLLM
from frontend.engine_args import AsyncEngineArgs, EngineArgs
from frontend.llm import LLM
from frontend.llm_engine import LLMEngine, read_metrics
from frontend.session import EngineHandle
from ipc.errors import ConfigError, EngineDeadError, InvalidRequestError, RequestFailedError
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from tests.fake_tokens import fake_tokens

VOCAB = 32_000
ARGUMENTS = {"executor": "fake", "skip_tokenizer_init": True, "seed": None}


@pytest.fixture(name="llm", scope="module")
def an_llm() -> Iterator[LLM]:
    with LLM.from_engine_args(EngineArgs(**ARGUMENTS)) as llm:
        yield llm


def params(count: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **options)  # type: ignore[arg-type]


def test_requests_are_added_and_their_outputs_fetched(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine is llm.llm_engine
    assert engine.step() == []
    engine.add_request("a", {"prompt_token_ids": [5, 6]}, params(20), priority=1)
    engine.add_request("b", [7], params(3, output_kind=RequestOutputKind.FINAL_ONLY))
    assert engine.get_num_unfinished_requests() == 2
    finished: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
    assert finished == {"a": fake_tokens([5, 6], 20, VOCAB), "b": fake_tokens([7], 3, VOCAB)}


def test_aborted_requests_are_gone(llm: LLM) -> None:
    engine = llm.llm_engine
    for name in "abc":
        engine.add_request(name, [5], params(100_000))
    engine.abort_request(["a", "nobody"])
    engine.abort_request("b")
    assert engine.get_num_unfinished_requests() == 1
    assert {output.request_id for output in engine.step()} == {"c"}
    engine.abort_request("c")
    assert engine.step() == []


@pytest.mark.parametrize(
    ("name", "prompt", "message"),
    [
        (5, [1], "request_id must be a str"),
        ("a", [[1], [2]], r"add_request\(\) takes one prompt; got 2"),
        ("a", [], "takes one prompt; got 0"),
        ("a", [VOCAB], "out of vocabulary"),
    ],
)
def test_a_wrong_request_is_named(llm: LLM, name: object, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.llm_engine.add_request(name, prompt, params(1))  # type: ignore[arg-type]
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_name_is_used_once(llm: LLM) -> None:
    llm.llm_engine.add_request("a", [1], params(100_000))
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
        llm.llm_engine.add_request("a", [1], params(1))
    llm.llm_engine.abort_request("a")


def test_what_the_engine_says_of_itself(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.model_config is engine.get_model_config()
    assert (engine.model_config.max_model_len, engine.model_config.get_vocab_size()) == (131_072, VOCAB)
    assert engine.tokenizer is None
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        engine.get_tokenizer()
    engine.check_health()
    assert not engine.errored
    assert engine.reset_prefix_cache()
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    llm.generate([5, 6], params(4), use_tqdm=False)
    after = {metric.name: metric.value for metric in engine.get_metrics()}
    assert after["vllm:generation_tokens"] == before["vllm:generation_tokens"] + 4
    assert after["vllm:num_requests_running"] == 0
    assert 0 <= after["vllm:kv_cache_usage_perc"] <= 1


def test_metrics_of_speculation_have_vllms_names(llm: LLM) -> None:
    counts = {"num_drafts": 4, "num_draft_tokens": 9, "num_accepted_tokens": 5, "num_accepted_tokens_per_pos": [3, 2]}
    found = {one.name: one for one in read_metrics(msgspec.structs.replace(llm.statistics(), **counts), "m")}
    names = [f"vllm:spec_decode_{name}" for name in counts]
    values = [getattr(found[name], "values" if name.endswith("per_pos") else "value") for name in names]
    assert values == list(counts.values())


def test_a_request_that_fails_is_gone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: EngineHandle, state: object) -> None:
        raise RequestFailedError("no memory")

    llm.llm_engine.add_request("a", [1], params(1))
    monkeypatch.setattr(EngineHandle, "advance", fail)
    with pytest.raises(RequestFailedError, match="no memory"):
        llm.llm_engine.step()
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_that_was_closed_says_so() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(**ARGUMENTS), usage_context="x")
    engine.close()
    assert engine.errored
    with pytest.raises(EngineDeadError):
        engine.check_health()


def test_arguments_are_checked_when_an_engine_is_made_of_them() -> None:
    assert repr(AsyncEngineArgs("m", dtype="auto")) == "AsyncEngineArgs(model='m', dtype='auto')"
    with pytest.raises(ConfigError, match="max_num_seqs must be"):
        LLMEngine.from_engine_args(EngineArgs(**ARGUMENTS, max_num_seqs=0))
    with pytest.raises(ConfigError, match="engine_args must be EngineArgs"):
        LLM.from_engine_args({"model": None})  # type: ignore[arg-type]


def test_the_asynchronous_names() -> None:
    async def use() -> None:
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**ARGUMENTS), start_engine_loop=True)
        assert llm.is_running
        assert not llm.errored
        assert (await llm.get_model_config()).vocab_size == VOCAB
        await llm.check_health()
        llm.shutdown()
        assert llm.errored
        assert isinstance(llm.dead_error, EngineDeadError)

    asyncio.run(use())
