"""Beam search over HTTP and through AsyncLLM: the sequences of LLM.beam_search(), the best first."""

import asyncio
from typing import Any

import pytest

from engine_core import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from tests.frontend.http.caller import Caller

FIELDS: dict[str, Any] = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "max_tokens": 12}
PARAMS = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5)


def texts(llm: LLM, ids: list[int], **options: Any) -> list[str]:
    """What the same parameters give in the library."""
    params = SamplingParams(**{"temperature": 0, **FIELDS, **options})
    return [one.text for one in llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs]


def test_completions(served: Caller, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    wanted = texts(llm, ids)
    assert [one.text for one in llm.beam_search({"prompt_token_ids": ids}, PARAMS)[0].sequences] == [
        llm.get_tokenizer().decode(ids) + text for text in wanted
    ]
    answer = served.complete(ids, **FIELDS).json
    assert [choice["text"] for choice in answer["choices"]] == wanted
    best = served.complete(ids, **{**FIELDS, "n": 1, "best_of": 3}).json["choices"]
    assert [choice["text"] for choice in best] == wanted[:1]
    stopping = {"early_stopping": "never", "repetition_penalty": 1.5}
    answer = served.complete(ids, **FIELDS, **stopping).json
    assert [choice["text"] for choice in answer["choices"]] == texts(llm, ids, **stopping)


def test_a_stream_is_the_whole_answer_at_its_end(served: Caller, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    events = served.complete(ids, **FIELDS, stream=True).events
    for index, text in enumerate(texts(llm, ids)):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] in ("stop", "length")


def test_chats_with_log_probabilities(served: Caller) -> None:
    plain = served.chat(**FIELDS).json["choices"]
    told = served.chat(**FIELDS, logprobs=True, top_logprobs=5).json["choices"]
    assert [one["message"]["content"] for one in told] == [one["message"]["content"] for one in plain]
    for choice in told:
        content = choice["logprobs"]["content"]
        assert len(content) == 12
        assert all(len(one["top_logprobs"]) == 5 for one in content)


def test_an_answer_in_a_grammar(served: Caller) -> None:
    choices = ["red", "green", "blue"]
    answer = served.chat(**FIELDS, structured_outputs={"choice": choices}).json
    shown = [one["message"]["content"] for one in answer["choices"]]
    assert set(shown) <= set(choices)
    assert {one["finish_reason"] for one in answer["choices"]} == {"stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_with_fewer_sequences_than_choices(served: Caller, stream: bool) -> None:
    two = {"choice": ["a", "b"]}
    fields = {**FIELDS, "n": 4, "max_tokens": 1, "structured_outputs": two, "logprobs": 1, "stream": stream}
    answer = served.complete([5, 6, 7], **fields)
    assert answer.status == 200, answer.json
    choices = [one for event in answer.events for one in event["choices"]] if stream else answer.json["choices"]
    ends = {one["index"]: one["finish_reason"] for one in choices if one["finish_reason"] is not None}
    assert ends == {0: "length", 1: "length", 2: "abort", 3: "abort"}
    assert [one["text"] for one in choices if one["index"] > 1] == ["", ""]


def test_async_llm(served: Caller, llm: LLM) -> None:
    async def search() -> Any:
        async with AsyncLLM(connect=served.connect) as asynchronous:
            both = [asynchronous.beam_search(text, PARAMS) for text in ("Once upon a time", "Two")]
            return await asyncio.gather(*both)

    wanted = llm.beam_search(["Once upon a time", "Two"], PARAMS)
    found = asyncio.run(asyncio.wait_for(search(), 30))
    assert [[one.text for one in each.sequences] for each in found] == [
        [one.text for one in each.sequences] for each in wanted
    ]
