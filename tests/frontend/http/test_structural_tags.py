"""Structural tags as a response_format over HTTP: the demo model's tokenizer and made-up tokens."""

import json
import re
from typing import Any

import jsonschema

from tests.frontend.http.caller import Caller
from tests.frontend.http.test_tools import TOOLS, fold

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag",
    "begin": "<call=weather>",
    "content": {"type": "json_schema", "json_schema": CITY},
    "end": ["</call>", "</stop>"],
}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text", "max_chars": 40}, "end": "</t>"}
CALLS: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<call="], "tags": [CALL], "stop_after_first": True}
ANSWER = re.compile(r"<t>(?s:.{0,40}?)</t><call=weather>(.*)</(?:call|stop)>", re.DOTALL)


def form(*elements: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


def test_an_answer_is_of_its_format_and_so_is_its_stream(served: Caller) -> None:
    body = {"response_format": form(THOUGHT, {**CALLS, "at_least_one": True}), "temperature": 1, "max_tokens": 300}
    for seed in range(4):
        choice = served.chat(seed=seed, **body).json["choices"][0]
        assert choice["finish_reason"] == "stop"
        found = ANSWER.fullmatch(choice["message"]["content"])
        assert found, choice
        jsonschema.validate(json.loads(found[1]), CITY)
        streamed = fold(served.chat(seed=seed, stream=True, **body).events)
        assert streamed["content"] == choice["message"]["content"]
    prompt = {"prompt": "x", "structured_outputs": {"structural_tag": json.dumps(body["response_format"])}}
    text = served.post("/v1/completions", {**prompt, "temperature": 1, "max_tokens": 300}).json["choices"][0]["text"]
    assert ANSWER.fullmatch(text), text


def test_a_tag_stands_alone_beside_tools(served: Caller) -> None:
    answer = served.chat(response_format=form(CALL), tools=TOOLS, max_tokens=100)
    assert answer.json["choices"][0]["message"]["content"].startswith("<call=weather>{")


def test_errors_name_their_place(served: Caller) -> None:
    for element, text in (
        ({"type": "tag", "begin": "<", "end": ">"}, "format.elements[0]: Object missing required field `content`"),
        ({"type": "token", "token": 3}, "format.elements[0]: the format token is not supported by this version"),
    ):
        answer = served.chat(response_format=form(element))
        assert answer.status == 400
        assert text in answer.json["error"]["message"]
    answer = served.chat(response_format=form({"type": "any_text"}, CALL["content"]))
    assert (answer.status, "ambiguous" in answer.json["error"]["message"]) == (400, True)
