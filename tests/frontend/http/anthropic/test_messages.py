"""Anthropic's Messages API: the wire's shapes, and the same answers as those of chats."""

import json
import re
from typing import Any

import pytest

from frontend.llm import LLM
from ipc.params.sampling_params import SamplingParams
from tests.frontend.http.caller import Answer, Caller, wait_for

HELLO: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 20,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Hello"}],
}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
    },
}


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream; each has its type's name."""
    found = []
    for part in answer.body.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def fold(events: list[Any]) -> Any:
    """The message of a stream, whose events come in order."""
    kinds = [event["type"] for event in events]
    shape = (
        r"message_start (content_block_start (content_block_delta )+content_block_stop )*message_delta message_stop "
    )
    assert re.fullmatch(shape, " ".join(kinds) + " "), kinds
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                if delta["type"] == "input_json_delta":
                    block["input"] = json.loads(delta["partial_json"])
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


def num_input(usage: Any) -> int:
    """The tokens of the prompt: each of them is counted once."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(int(usage[name]) for name in names)


def without_ids(message: Any) -> Any:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = message["usage"]
    tokens = (num_input(usage), usage["output_tokens"])
    return {**message, "id": "", "content": content, "usage": tokens}


def both(served: Caller, **fields: Any) -> Any:
    """The message of a whole answer, which is that of its stream."""
    whole = served.post("/v1/messages", {**HELLO, **fields})
    assert whole.status == 200, whole.body
    stream = served.post("/v1/messages", {**HELLO, **fields, "stream": True})
    assert without_ids(fold(events_of(stream))) == without_ids(whole.json)
    return whole.json


def test_a_message_is_a_chats_answer(served: Caller, llm: LLM) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nthere"}]
    wanted = llm.chat(chat, SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)[0]
    blocks = [
        {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "there"},
    ]
    fields = {"system": [{"type": "text", "text": "Be brief."}], "messages": [{"role": "user", "content": blocks}]}
    message = both(served, **fields)
    assert message["content"] == [{"type": "text", "text": wanted.outputs[0].text}]
    assert (message["stop_reason"], message["stop_sequence"], message["role"]) == ("max_tokens", None, "assistant")
    usage = message["usage"]
    assert num_input(usage) == len(wanted.prompt_token_ids)
    assert usage["output_tokens"] == 20
    count = served.post("/v1/messages/count_tokens", {"model": "demo", **fields}).json
    assert count == {"input_tokens": len(wanted.prompt_token_ids)}


def test_stop_sequences(served: Caller) -> None:
    text = both(served)["content"][0]["text"]
    message = both(served, stop_sequences=[text[20:25]])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[20:25])
    assert message["content"][0]["text"] == text[: text.index(text[20:25])]


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}]
)
def test_calls(served: Caller, choice: Any) -> None:
    message = both(served, tools=[TOOL], tool_choice=choice, max_tokens=200)
    (block,) = message["content"]
    assert (block["type"], block["name"], set(block["input"])) == ("tool_use", "get_weather", {"city"})
    assert block["id"].startswith("toolu_")
    assert message["stop_reason"] == "tool_use"


def test_a_cut_call_is_text(served: Caller) -> None:
    message = both(served, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=14)
    assert message["stop_reason"] == "max_tokens"
    assert all(block["type"] == "text" for block in message["content"])


def test_a_schema_and_a_begun_answer(served: Caller) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    message = both(served, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message["content"][0]["text"])["n"] in (1, 2)
    begun = [*HELLO["messages"], {"role": "assistant", "content": [{"type": "text", "text": "The best"}]}]
    counts = [
        served.post("/v1/messages/count_tokens", {"model": "demo", "messages": messages}).json["input_tokens"]
        for messages in (HELLO["messages"], begun)
    ]
    assert counts[1] == counts[0] + 2  # the text, and no end of a turn behind it


def test_calls_and_results_in_history(served: Caller) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}]},
    ]
    assert served.post("/v1/messages", {**HELLO, "messages": messages, "tools": [TOOL]}).status == 200


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "nobody"}, 404, "not_found_error"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "maybe"}, "tools": [TOOL]}, 400, "invalid_request_error"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x " * 6000}]}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_form(served: Caller, fields: Any, status: int, kind: str) -> None:
    answer = served.post("/v1/messages", {**HELLO, **fields, "stream": True})
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (status, "error", kind), answer.body
    assert set(answer.json["error"]) == {"type", "message"}


def test_a_streams_beginning_and_end_count_the_same_prompt(served: Caller) -> None:
    """What a prompt puts into the prefix cache, the next request reads from there."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")

    def counts(body: Any) -> list[int]:
        events = served.post("/v1/messages", {**body, "stream": True}).body.decode().split("\n\n")
        found = [json.loads(one.split("data: ")[1]) for one in events if "data: " in one]
        begin, end = found[0]["message"]["usage"], found[-2]["usage"]
        assert [begin[name] for name in names] == [end[name] for name in names]
        return [int(end[name]) for name in names]

    wait_for(lambda: counts(HELLO)[1] + counts(HELLO)[2] > 0)  # the server has asked for the size of blocks
    body = {**HELLO, "messages": [{"role": "user", "content": "count " * 60}]}
    (rest, created, read), again = counts(body), counts(body)
    assert created > rest
    assert again == [rest, 0, read + created]


def test_models_in_anthropics_form(served: Caller) -> None:
    version = {"anthropic-version": "2023-06-01"}
    found = served.call("GET", "/v1/models", headers=version).json
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "demo", "other/name")
    (card, _) = found["data"]
    assert card == {"type": "model", "id": "demo", "display_name": "demo", "created_at": card["created_at"]}
    assert served.call("GET", "/v1/models/demo", headers=version).json == card
    assert served.get("/v1/models").json["object"] == "list"
