"""/v1/chat/completions in real processes: answers equal those of the Python client of the same engine."""

from typing import Any

import pytest

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import Caller

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def expected(llm: LLM, text: str = "Hello", **params: Any) -> Any:
    chat = [{"role": "user", "content": text}]
    return llm.chat(chat, SamplingParams(**params), use_tqdm=False)[0]


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_whole_answer(served: Caller, llm: LLM) -> None:
    answer = served.chat(max_tokens=20, temperature=0)
    output = expected(llm, max_tokens=20, temperature=0)
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.outputs[0].text, "reasoning": None}
    assert (body["prompt_logprobs"], body["prompt_token_ids"], choice["token_ids"]) == (None, None, None)
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(output.prompt_token_ids)
    assert (usage["completion_tokens"], usage["total_tokens"]) == (20, 20 + usage["prompt_tokens"])
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_whole_answer(served: Caller, llm: LLM, n: int) -> None:
    sampling = {"max_tokens": 40, "temperature": 0.7, "seed": 5, "n": n}
    whole = served.chat(**sampling).json
    stream = served.chat(**sampling, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-accel-buffering"] == "no"
    events = stream.events
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    output = expected(llm, **sampling)
    for index in range(n):
        deltas = [c for event in events for c in event["choices"] if c["index"] == index]
        assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in deltas if c["finish_reason"]] == ["length"]
        assert text_of(events, index) == whole["choices"][index]["message"]["content"] == output.outputs[index].text


def test_usage_comes_last_and_only_where_it_is_asked_for(served: Caller) -> None:
    events = served.chat(max_tokens=5, stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert all("usage" not in event for event in events[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = served.chat(max_tokens=5, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    cached = [event["usage"]["prompt_tokens_details"]["cached_tokens"] for event in events[1:]]
    assert set(cached) == {16}  # the chat before was the same: its whole block is known from the first event on


def test_the_newer_name_of_max_tokens_counts(served: Caller) -> None:
    body = served.chat(max_tokens=9, max_completion_tokens=2).json
    assert body["usage"]["completion_tokens"] == 2


def test_stop_strings_cut_and_count(served: Caller, llm: LLM) -> None:
    text = expected(llm, max_tokens=60, temperature=0).outputs[0].text
    stop = text[40:46]
    output = expected(llm, max_tokens=60, temperature=0, stop=[stop]).outputs[0]
    body = served.chat(max_tokens=60, temperature=0, stop=stop).json
    choice = body["choices"][0]
    assert choice["message"]["content"] == output.text == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert body["usage"]["completion_tokens"] == len(output.token_ids)
    events = served.chat(max_tokens=60, temperature=0, stop=[stop], stream=True).events
    assert text_of(events) == output.text
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_ends_one_choice_of_two(served: Caller, llm: LLM) -> None:
    sampling = {"max_tokens": 50, "temperature": 1.0, "seed": 3, "n": 2}
    first, second = expected(llm, **sampling).outputs
    stop = next(first.text[i : i + 5] for i in range(20, 60) if first.text[i : i + 5] not in second.text)
    body = served.chat(**sampling, stop=[stop]).json
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert body["choices"][1]["message"]["content"] == second.text


def test_logprobs(served: Caller, llm: LLM) -> None:
    output = expected(llm, max_tokens=6, temperature=0, logprobs=2).outputs[0]
    for stream in (False, True):
        answer = served.chat(max_tokens=6, temperature=0, logprobs=True, top_logprobs=2, stream=stream)
        choices = [c for event in answer.events for c in event["choices"]] if stream else answer.json["choices"]
        rows = [row for choice in choices for row in (choice["logprobs"] or {"content": []})["content"]]
        assert [row["logprob"] for row in rows] == [
            pytest.approx(likely[token].logprob)
            for token, likely in zip(output.token_ids, output.logprobs, strict=True)
        ]
        assert "".join(row["token"] for row in rows) == output.text
        assert all(len(row["top_logprobs"]) == 2 for row in rows)
        assert b"".join(bytes(row["bytes"]) for row in rows) == output.text.encode()


def test_the_final_message_is_continued(served: Caller, llm: LLM) -> None:
    chat = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    answer = served.post(
        "/v1/chat/completions",
        {"messages": chat, "continue_final_message": True, "max_tokens": 5, "return_token_ids": True, "temperature": 0},
    ).json
    text = llm.get_tokenizer().decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert text.endswith("assistant\nThe answer is")
    params = SamplingParams(max_tokens=5, temperature=0)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
    assert llm.chat(chat, params, **options)[0].outputs[0].text == answer["choices"][0]["message"]["content"]


def test_the_request_id_is_the_callers_or_ours(served: Caller) -> None:
    for given in ("abc-1.2_3", None, "x" * 200, "a b"):
        answer = served.post(
            "/v1/chat/completions",
            {"messages": HELLO, "max_tokens": 1},
            {"x-request-id": given} if given is not None else None,
        )
        shown = answer.headers["x-request-id"]
        assert (shown == given) is (given == "abc-1.2_3")
        assert 0 < len(shown) <= 128


def test_a_seed_means_one_text(served: Caller) -> None:
    texts = [
        served.chat(max_tokens=20, temperature=1, seed=seed).json["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_deadline_is_kept(served: Caller) -> None:
    body = {"messages": HELLO, "max_tokens": 3900, "ignore_eos": True}
    late = served.post("/v1/chat/completions", {**body, "n": 60}, {"x-deadline-ms": "1"})
    assert late.status == 504
    assert late.headers["x-should-retry"] == "false"
    assert served.post("/v1/chat/completions", {**body, "max_tokens": 1}, {"x-deadline-ms": "20000"}).status == 200
    assert served.post("/v1/chat/completions", body, {"x-deadline-ms": "soon"}).status == 400
