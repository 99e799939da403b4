"""Reasoning and other formats of calls in all dialects: servers without a socket, on the engine of the other tests."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.http.app import App
from frontend.http.process.options import HttpOptions
from frontend.http.service import Service
from frontend.http.wire.local_caller import LocalAnswer, LocalCaller
from frontend.http.wire.server import open_engine
from frontend.session import EngineHandle
from tests.frontend.http.anthropic.test_messages import fold as fold_message
from tests.frontend.http.caller import Caller
from tests.frontend.http.openai.test_responses import fold as fold_response
from tests.frontend.http.test_tools import TOOLS, fold

MESSAGES = [{"role": "user", "content": "Hi"}]
THOUGHT = "<think>\nIt is a greeting.\n</think>\n\nHello"


@pytest.fixture(scope="module")
def engine(served: Caller) -> Iterator[EngineHandle]:
    handle = open_engine(served.connect)
    yield handle
    handle.close()


def ask(engine: EngineHandle, path: str, body: Any, **options: Any) -> LocalAnswer:
    """The answer of a server with these options."""

    async def run() -> LocalAnswer:
        service = Service(engine, HttpOptions(checks_host=False, **{"reasoning_parser": "qwen3", **options}))
        answer = await LocalCaller(App(service)).post(path, json.dumps(body).encode())
        service.pump.close()
        return answer

    return asyncio.run(run())


def events_of(answer: LocalAnswer) -> list[Any]:
    lines = [line for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def exactly(text: str) -> dict[str, Any]:
    """Fields that make this text the answer. Beside tools a structural tag stands alone."""
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
    return {"structured_outputs": {"structural_tag": tag}, "max_tokens": 200}


def chat(engine: EngineHandle, text: str, *, tools: Any = None, **options: Any) -> Any:
    """The message of a chat whose answer is this text, which is that of its stream."""
    body = {"messages": MESSAGES, "tools": tools, **exactly(text)}
    whole = ask(engine, "/v1/chat/completions", body, **options)
    assert whole.status == 200, whole.body
    message = json.loads(whole.body)["choices"][0]["message"]
    stream = fold(events_of(ask(engine, "/v1/chat/completions", {**body, "stream": True}, **options)))
    assert stream["content"] == (message["content"] or "")
    assert stream.get("reasoning") == message.get("reasoning")
    assert stream["tool_calls"] == [call["function"] for call in message.get("tool_calls", [])]
    return message


def test_chats_have_both_names_of_reasoning(engine: EngineHandle) -> None:
    message = chat(engine, THOUGHT)
    expected = {"role": "assistant", "content": "Hello"} | dict.fromkeys(
        ("reasoning", "reasoning_content"), "It is a greeting."
    )
    plain = {"role": "assistant", "reasoning": None}
    assert message == expected
    assert chat(engine, "Hello") == {**plain, "content": "Hello"}
    assert chat(engine, THOUGHT, reasoning_parser="none") == {**plain, "content": THOUGHT}
    earlier = [*MESSAGES, expected, {"role": "user", "content": "And?"}]
    assert ask(engine, "/v1/chat/completions", {"messages": earlier, "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    ("parser", "text", "mark"),
    [
        ("qwen3", THOUGHT, "</think>"),
        ("qwen3", "Hello", None),
        ("qwen3", "<think>\nIt goes on", ""),
        (
            "openai",
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            "<|end|>",
        ),
    ],
)
def test_tokens_of_reasoning_are_counted(engine: EngineHandle, parser: str, text: str, mark: str | None) -> None:
    """Up to the token that completes the mark; in a stream they are as many. None = there is no reasoning."""
    body = {"messages": MESSAGES, "return_token_ids": True, **exactly(text)}
    whole = json.loads(ask(engine, "/v1/chat/completions", body, reasoning_parser=parser).body)
    ids = whole["choices"][0]["token_ids"]
    assert engine.tokenizer is not None
    texts = [engine.tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(len(ids) + 1)]
    expected = 0 if mark is None else len(ids)
    if mark:
        expected = next(count for count, one in enumerate(texts) if mark in one)
    if parser == "openai":
        expected -= next(count for count, one in enumerate(texts) if "<|message|>" in one)
    assert (expected > 0) == (mark is not None)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    for usage in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        asked = {**body, "stream": True, "stream_options": usage}
        events = events_of(ask(engine, "/v1/chat/completions", asked, reasoning_parser=parser))
        counts = [one["usage"]["completion_tokens_details"]["reasoning_tokens"] for one in events if one.get("usage")]
        assert counts[-1] == expected
        assert counts == sorted(counts)


def test_tokens_of_reasoning_of_a_response(engine: EngineHandle) -> None:
    counts = set()
    for number in range(8):
        asked = {"input": f"Hi {number}", "max_output_tokens": 40, "temperature": 0}
        asked |= {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}}}
        whole = json.loads(ask(engine, "/v1/responses", asked).body)
        details = whole["usage"]["output_tokens_details"]
        assert (details["reasoning_tokens"] > 0) == any(item["type"] == "reasoning" for item in whole["output"])
        assert details["reasoning_tokens"] <= whole["usage"]["output_tokens"]
        (last,) = [
            one["response"]
            for one in events_of(ask(engine, "/v1/responses", {**asked, "stream": True}))
            if one["type"] in ("response.completed", "response.incomplete")
        ]
        assert last["usage"] == whole["usage"] | {"input_tokens_details": last["usage"]["input_tokens_details"]}
        counts.add(details["reasoning_tokens"])
    assert len(counts) > 1


def test_a_schema_holds_behind_the_reasoning(engine: EngineHandle) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    seen = set()
    for seed in range(8):
        body = {"messages": MESSAGES, "response_format": form, "seed": seed, "max_tokens": 60, "temperature": 1}
        choice = json.loads(ask(engine, "/v1/chat/completions", body).body)["choices"][0]
        seen.add(choice["message"]["reasoning"] is not None)
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in (1, 2)
    assert seen == {True, False}


def test_the_other_dialects_have_reasoning_of_their_own(engine: EngineHandle) -> None:
    """Their bodies have no regex: the grammar leaves a choice between thinking and not, and the prompts make both."""
    schema = {"enum": [1]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    kinds: set[str] = set()
    for number in range(12):
        messages = [{"role": "user", "content": f"Hi {number}"}]
        body = {"messages": messages, "max_tokens": 40, "temperature": 0, "output_config": config, "stream": True}
        message = fold_message(events_of(ask(engine, "/v1/messages", body)))
        asked = {"input": f"Hi {number}", "text": text, "max_output_tokens": 40, "temperature": 0, "stream": True}
        response = fold_response(events_of(ask(engine, "/v1/responses", asked)))
        options = {"temperature": 0, "num_predict": 40}
        ollama = {"model": "", "messages": messages, "format": schema, "options": options, "stream": False}
        whole = json.loads(ask(engine, "/api/chat", ollama).body)["message"]
        kinds |= {block["type"] for block in message["content"]} | {item["type"] for item in response["output"]}
        kinds |= {name for name in ("thinking", "content") if whole.get(name)}
    assert kinds == {"thinking", "text", "reasoning", "message", "content"}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Bern", "days": 1}}'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}]'),
        ("pythonic", "[get_weather(city='Bern', days=1)]"),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>,days:1}<tool_call|>'),
        (
            "openai",
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions."
            'get_weather <|constrain|>json<|message|>{"city": "Bern", "days": 1}',
        ),
    ],
)
def test_other_formats(engine: EngineHandle, parser: str, text: str) -> None:
    message = chat(engine, text, tools=TOOLS, tool_call_parser=parser)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern", "days": 1}
    assert re.fullmatch("[A-Za-z0-9]{9}" if parser == "mistral" else "call_[0-9a-f]{24}", call["id"])
    assert message.get("reasoning") == ("Look." if parser == "openai" else None)


@pytest.mark.parametrize("parser", ["llama3_json", "mistral", "pythonic", "openai"])
def test_forced_calls_in_other_formats(engine: EngineHandle, parser: str) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(3):
        answer = ask(
            engine,
            "/v1/chat/completions",
            {**body, "max_tokens": 300, "seed": seed, "temperature": 1},
            tool_call_parser=parser,
            reasoning_parser="none",
        )
        choice = json.loads(answer.body)["choices"][0]
        if choice["finish_reason"] == "length" and parser == "openai":
            continue  # it thought for too long
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_log_probabilities_of_its_text_alone(engine: EngineHandle, stream: bool) -> None:
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], "stream": stream, **exactly(THOUGHT)}
    answer = ask(engine, "/v1/responses", body)
    response = fold_response(events_of(answer)) if stream else json.loads(answer.body)
    (part,) = response["output"][-1]["content"]
    assert part["text"] == "Hello"
    assert "".join(one["token"] for one in part["logprobs"]).strip() == "Hello"
