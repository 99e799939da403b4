"""Ids: of tool calls for a template that wants 9 letters and digits, on all routes and in histories of other servers;
and those of requests and answers."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.http import request as request_module
from frontend.http.request import new_id
from frontend.text.chat_template import fit_call_ids, render_chat
from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving
from tests.frontend.http.conftest import FAKE

#: The checks of Mistral Nemo's template, and its marks.
TEMPLATE = """{%- if tools %}[AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}[TOOL_CALLS]
        {%- for call in m.tool_calls %}
            {%- if not call.id is defined or call.id|length != 9 %}{{ raise_exception("9 characters!") }}{% endif %}
            {{- "call " + call.id + " " + call.function.name }};
        {%- endfor %}
    {%- elif m.role == "tool" %}
        {%- if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}{{ raise_exception("9!") }}{% endif %}
        {{- "result " + m.tool_call_id }};
    {%- else %}{{ m.content }};{% endif %}
{%- endfor %}"""
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOL = {"type": "function", "function": FUNCTION}
NINE = re.compile("[A-Za-z0-9]{9}")
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    path: Path = tmp_path_factory.mktemp("template") / "mistral.jinja"
    path.write_text(TEMPLATE)
    with serving(*FAKE, "-m", str(resolve_model(None)), "--chat-template", str(path)) as caller:
        yield caller


def test_a_call_and_its_result_over_chats(mistral: Caller) -> None:
    body: dict[str, Any] = {"tools": [TOOL], "max_tokens": 60, "temperature": 0}
    answer = mistral.post("/v1/chat/completions", {**body, "messages": ASK, "tool_choice": "required"})
    message = answer.json["choices"][0]["message"]
    identity = message["tool_calls"][0]["id"]
    assert NINE.fullmatch(identity)
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in message["tool_calls"]]
    assert mistral.post("/v1/chat/completions", {**body, "messages": [*ASK, message, *results]}).status == 200


def test_a_call_and_its_result_over_messages(mistral: Caller) -> None:
    tool = {"name": "f", "input_schema": FUNCTION["parameters"]}
    body: dict[str, Any] = {"tools": [tool], "max_tokens": 60, "temperature": 0}
    choice = {"type": "tool", "name": "f"}
    answer = mistral.post("/v1/messages", {**body, "messages": ASK, "tool_choice": choice}).json
    (call,) = answer["content"]
    assert NINE.fullmatch(call["id"])
    for identity in (call["id"], "toolu_c83f00112233445566778899"):
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": identity, "content": "x"}]}
        history = [*ASK, {"role": "assistant", "content": [{**call, "id": identity}]}, result]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert mistral.post(path, {**body, "messages": history}).status == 200


def test_a_call_and_its_result_over_responses(mistral: Caller) -> None:
    body: dict[str, Any] = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 60, "temperature": 0}
    choice = {"type": "function", "name": "f"}
    answer = mistral.post("/v1/responses", {**body, "input": "Hi", "tool_choice": choice}).json
    (call,) = answer["output"]
    assert NINE.fullmatch(call["call_id"])
    for identity in (call["call_id"], "call_0599aabbccddeeff00112233"):
        result = {"type": "function_call_output", "call_id": identity, "output": "x"}
        history = [*ASK, {**call, "call_id": identity}, result]
        assert mistral.post("/v1/responses", {**body, "input": history}).status == 200


def test_ollamas_histories_have_no_ids(mistral: Caller) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    history = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    (name,) = (one["id"] for one in mistral.get("/v1/models").json["data"])
    body = {"model": name, "messages": history, "tools": [TOOL], "stream": False, "options": {"num_predict": 2}}
    assert mistral.post("/api/chat", body).status == 200


def rendered(*messages: dict[str, Any]) -> str:
    return render_chat(TEMPLATE, [*ASK, *messages], add_generation_prompt=False)


def called(*ids: str | None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [{**call, **({"id": one} if one else {})} for one in ids]}


def test_an_id_of_the_wanted_form_stays() -> None:
    shown = rendered(called("abcDEF123"), {"role": "tool", "tool_call_id": "abcDEF123", "content": "x"})
    assert shown.endswith("call abcDEF123 f;result abcDEF123;")


def test_a_foreign_id_is_the_same_for_call_and_result_each_time() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    shown = rendered(called("call_1", "call_2"), result)
    assert shown == rendered(called("call_1", "call_2"), result)
    first, second, answered = re.findall("[a-z]+ ([A-Za-z0-9]{9})(?: f)?;", shown)
    assert first == answered != second


def test_results_without_ids_belong_to_the_calls_in_order() -> None:
    calls = [{"function": {"name": name}} for name in ("f", "g", "f")]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "tool_name": name} for name in ("g", "f", "f")),
        {"role": "tool"},
    ]
    fit_call_ids(messages, 9)
    ids = [call["id"] for call in calls]
    assert [one["tool_call_id"] for one in messages[1:4]] == [ids[1], ids[0], ids[2]]
    assert len({*ids, messages[4]["tool_call_id"]}) == 4
    assert all(NINE.fullmatch(one) for one in ids)


def test_a_template_that_wants_no_length_sees_the_callers_ids() -> None:
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}"
    shown = json.loads(render_chat(template, [called("call_1")], add_generation_prompt=False))
    assert shown[0]["id"] == "call_1"


def test_the_system_is_asked_once_for_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    ask = os.urandom

    def urandom(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return ask(num_bytes)

    monkeypatch.setattr(request_module, "_ids", [])
    monkeypatch.setattr(os, "urandom", urandom)
    ids = {new_id() for _ in range(256)}
    assert len(ids) == 256
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert asked == [2048, 2048]
