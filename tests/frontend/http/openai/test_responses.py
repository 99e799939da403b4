"""OpenAI's Responses API: the wire's shapes, and the same answers as those of chats."""

import json
from typing import Any

import pytest

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import Answer, Caller

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream: each has its type's name, and they are numbered."""
    found = []
    for part in answer.body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def fold(events: list[Any]) -> Any:
    """The response at the end of a stream, whose items are those that the events make."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    texts: dict[str, str] = {}
    items: list[Any] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "output_item.done":
            items[event["output_index"]] = event["item"]
        elif kind.endswith(".delta"):
            assert items[event["output_index"]]["id"] == event["item_id"]
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif kind.endswith((".done", ".added")) and not kind.startswith("content_part"):
            assert texts[event["item_id"]] == event.get("text", event.get("arguments"))
    assert events[-1]["response"]["output"] == items
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    return events[-1]["response"]


def without_ids(response: Any) -> Any:
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    usage = {k: v for k, v in response["usage"].items() if k != "input_tokens_details"}
    return {**response, "id": "", "created_at": 0, "output": items, "usage": usage}


def both(served: Caller, **fields: Any) -> Any:
    """The whole response, which is that of its stream."""
    body = {"temperature": 0, "max_output_tokens": 20, **fields}
    whole = served.post("/v1/responses", body)
    assert whole.status == 200, whole.body
    stream = served.post("/v1/responses", {**body, "stream": True})
    assert without_ids(fold(events_of(stream))) == without_ids(whole.json)
    return whole.json


def test_a_response_is_a_chats_answer(served: Caller, llm: LLM) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    wanted = llm.chat(chat, SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)[0]
    response = both(served, model="demo", instructions="Be brief.", input="Hello", tools=[], include=[])
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [
        {"type": "output_text", "text": wanted.outputs[0].text, "annotations": [], "logprobs": []}
    ]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (response["model"], response["store"], response["tool_choice"]) == ("demo", False, "auto")
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(wanted.prompt_token_ids), 20)
    parts = [{"type": "input_text", "text": "Hello"}]
    items = [{"role": "developer", "content": "Be brief."}, {"type": "message", "role": "user", "content": parts}]
    assert both(served, input=items)["output"][0]["content"] == item["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_calls(served: Caller, choice: Any) -> None:
    response = both(
        served, input="Hi", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200
    )
    (item,) = response["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "get_weather", "completed")
    assert set(json.loads(item["arguments"])) == {"city"}
    assert response["status"] == "completed"
    assert response["tools"] == [TOOL]
    history = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        item,
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"},
    ]
    assert both(served, input=history, tools=[TOOL])["output"]


def test_a_schema(served: Caller) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"enum": [1, 2]}, "strict": True}
    response = both(served, input="Hi", text={"format": form})
    assert json.loads(response["output"][0]["content"][0]["text"]) in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
        ({"input": 5}, "input"),
    ],
)
def test_what_is_not_supported_is_named(served: Caller, fields: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/responses", {"input": "Hi", "stream": True, **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def parts_of(response: Any) -> list[Any]:
    return [part for item in response["output"] if item["type"] == "message" for part in item["content"]]


@pytest.mark.parametrize("fields", [{"seed": 5}, {"seed": 5, "stop": ["zz", "qq"]}, {"temperature": 0}])
def test_log_probabilities_are_those_of_chats(served: Caller, fields: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
    wanted = served.post("/v1/chat/completions", {**chat, **fields}).json["choices"][0]
    body = {"input": "Hi", "max_output_tokens": 40, **LOGPROBS, **fields}
    (part,) = parts_of(served.post("/v1/responses", body).json)
    assert (part["text"], part["logprobs"]) == (wanted["message"]["content"], wanted["logprobs"]["content"])
    events = events_of(served.post("/v1/responses", {**body, "stream": True}))
    assert parts_of(fold(events)) == [part]
    deltas = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert deltas == part["logprobs"]
    (done,) = (event["logprobs"] for event in events if event["type"] == "response.output_text.done")
    assert done == part["logprobs"]


def test_tokens_that_end_an_answer_have_none(served: Caller) -> None:
    body = {"input": "Hi", **LOGPROBS, "structured_outputs": {"choice": ["yes"]}}
    (part,) = parts_of(served.post("/v1/responses", body).json)
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"] == "yes"
    assert all(len(one["top_logprobs"]) <= 2 for one in part["logprobs"])
