"""Tools over HTTP: the demo model's tokenizer, made-up tokens, and a grammar where the text has to be a certain one."""

import json
from typing import Any

import pytest

from frontend.llm import LLM
from tests.frontend.http.caller import Caller

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def exactly(text: str) -> dict[str, Any]:
    """Fields that make this text the answer. Beside tools a structural tag stands alone."""
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
    return {"structured_outputs": {"structural_tag": tag}, "max_tokens": 300}


def fold(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message of a stream."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for part in value:
                    if part["index"] == len(message["tool_calls"]):
                        assert part["id"]
                        assert part["type"] == "function"
                        assert part["function"]["arguments"] == ""
                        message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
                    else:
                        assert set(part) == {"index", "function"}
                        assert set(part["function"]) == {"arguments"}
                    message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            elif name != "role":
                message[name] = message.get(name, "") + value
        message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


def shown(choice: Any) -> dict[str, Any]:
    """A whole message in the form of fold()."""
    calls = [one["function"] for one in choice["message"].get("tool_calls", [])]
    content = choice["message"]["content"]
    assert (content is None) <= bool(calls)
    return {"content": content or "", "tool_calls": calls, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize(
    ("fields", "names", "reason"),
    [
        ({"tool_choice": "required"}, {"get_weather", "get_time"}, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False, "n": 2}, {"get_weather", "get_time"}, "tool_calls"),
        ({"tool_choice": NAMED}, {"get_weather"}, "stop"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            {"get_weather"},
            "tool_calls",
        ),
    ],
)
def test_calls_that_a_grammar_forces(served: Caller, fields: Any, names: set[str], reason: str) -> None:
    body = {"tools": TOOLS, "max_tokens": 400, "seed": 4, "temperature": 1, **fields}
    whole = served.chat(**body)
    assert whole.status == 200, whole.body
    events = served.chat(**body, stream=True).events
    for choice in whole.json["choices"]:
        message = shown(choice)
        assert message == fold(events, choice["index"])
        assert message["finish_reason"] == reason
        assert message["tool_calls"]
        assert fields["tool_choice"] == "required" or len(message["tool_calls"]) == 1
        for call in message["tool_calls"]:
            assert call["name"] in names
            arguments = json.loads(call["arguments"])
            assert set(arguments) == ({"city", "days"} if call["name"] == "get_weather" else set())
        ids = [one["id"] for one in choice["message"]["tool_calls"]]
        assert len(set(ids)) == len(ids)


def test_calls_in_a_free_answer(served: Caller) -> None:
    text = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}\n</tool_call>'
    whole = served.chat(tools=TOOLS, **exactly(text)).json["choices"][0]
    assert shown(whole) == {
        "content": "I look.",
        "tool_calls": [{"name": "get_weather", "arguments": '{"city": "Bern", "days": 1}'}],
        "finish_reason": "tool_calls",
    }
    events = served.chat(tools=TOOLS, stream=True, logprobs=True, top_logprobs=1, **exactly(text)).events
    assert fold(events) == shown(whole)
    rows = [row for e in events for c in e["choices"] for row in (c["logprobs"] or {"content": []})["content"]]
    assert "".join(row["token"] for row in rows).removesuffix("<|im_end|>") == text
    for free in ({}, {"tools": TOOLS, "tool_choice": "none"}):  # no tools: all of it is content
        choice = served.chat(**free, **exactly(text)).json["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_broken_arguments_are_text_and_no_error(served: Caller) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": Bern}}</tool_call>'
    choice = served.chat(tools=TOOLS, **exactly(text)).json["choices"][0]
    assert shown(choice)["tool_calls"] == [{"name": "get_weather", "arguments": '{"city": Bern}'}]
    broken = '<tool_call>{"nam": "get_weather"'
    assert served.chat(tools=TOOLS, **exactly(broken)).json["choices"][0]["message"]["content"] == broken


def test_a_model_may_write_what_no_utf_8_has(served: Caller) -> None:
    """Half of a surrogate pair, as JSON may escape it: once this answer and all streams beside it were lost."""
    text = '<tool_call>{"name": "\\ud800", "arguments": {"a": "\\ud800"}}</tool_call>'
    body = {"tools": TOOLS, **exactly(text)}
    whole = shown(served.chat(**body).json["choices"][0])
    assert [call["name"] for call in whole["tool_calls"]] == ["?"]
    assert fold(served.chat(**body, stream=True).events) == whole


def test_an_answer_of_a_schema_or_calls(served: Caller) -> None:
    """Both are possible where tools and a response_format are given, as agents with a typed result send them."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    kinds = set()
    for seed in range(12):
        answer = served.chat(
            tools=TOOLS, response_format=form, seed=seed, temperature=1, max_tokens=400, parallel_tool_calls=False
        )
        choice = answer.json["choices"][0]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["n"] in (1, 2)
    assert kinds == {"stop", "tool_calls"}


def test_tools_are_shown_to_a_model_whose_template_has_no_place_for_them(served: Caller, llm: LLM) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    with_tools = served.post("/v1/chat/completions", {**body, "tools": TOOLS}).json
    prompt = llm.get_tokenizer().decode(with_tools["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nThese tools")
    assert json.dumps(TOOLS[0]) in prompt
    assert '<tool_call>\n{"name": "get_time", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in prompt
    without = served.post("/v1/chat/completions", body).json
    assert without["usage"]["prompt_tokens"] < with_tools["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": TOOLS}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, None),
        ({"tools": TOOLS * 100}, "tools"),
        ({"tool_choice": "required", "tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_bad_tools_are_errors_of_their_request(served: Caller, fields: Any, param: str | None) -> None:
    answer = served.chat(max_tokens=1, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body


def test_a_schema_that_no_grammar_can_hold_is_named(served: Caller) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    answer = served.chat(tools=[tool], tool_choice="required")
    assert answer.status == 400
    assert "not" in answer.json["error"]["message"]


def test_ollamas_calls_are_objects(served: Caller) -> None:
    """Either the format or a call; the seeds give both."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "format": {"enum": [1]}}
    names: set[str] = set()
    for seed in range(12):
        options = {"seed": seed, "num_predict": 300}
        whole = served.post("/api/chat", {**body, "options": options, "stream": False}).json["message"]
        lines = served.post("/api/chat", {**body, "options": options}).body.splitlines()
        parts = [json.loads(line)["message"] for line in lines]
        calls = [call["function"] for part in parts for call in part.get("tool_calls", [])]
        assert calls == [call["function"] for call in whole.get("tool_calls", [])]
        assert "".join(part["content"] for part in parts) == whole["content"] == ("" if calls else "1")
        assert all(isinstance(call["arguments"], dict) for call in calls)
        names |= {call["name"] for call in calls} or {""}
    assert names == {"", "get_weather", "get_time"}
