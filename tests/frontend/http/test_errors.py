"""What is wrong gets its status and the one error body, and harms nobody else."""

import gzip
import json
from typing import Any

import pytest

from frontend.http.errors import HttpError, http_error
from ipc.errors import (
    CallFailedError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
)
from tests.frontend.http.caller import Caller

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "x"}, "max_tokens"),
        *(({name: "root ::= x"}, name) for name in ("grammar", "json_schema", "regex", "ebnf", "guided_json")),
        ({"max_tokens": -1}, None),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, None),
        ({"logit_bias": {"x": 1}}, None),
        ({"messages": []}, None),
        ({"messages": [{"content": "x"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10_000}, None),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True, "beam_width": 2}, "beam_width"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"jsn": {}}}, "jsn"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, None),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "stop": ["x"]}, "stop"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, None),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_a_bad_field_is_named(served: Caller, fields: dict[str, Any], param: str | None) -> None:
    answer = served.post("/v1/chat/completions", {**CHAT, **fields})
    error = answer.json["error"]
    assert (answer.status, error["type"], error["code"]) == (400, "BadRequestError", 400), error
    assert error["message"]
    if param is not None:
        assert error["param"] == param


def test_fields_without_an_effect_are_taken(served: Caller) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": 1},
        "store": False,
        "service_tier": "auto",
        "unknown_field": [1],
        "n": None,
    }
    neutral = {
        "best_of": 1,
        "use_beam_search": False,
        "suffix": None,
        "tools": [],
        "functions": [],
        "top_logprobs": None,
    }
    assert served.post("/v1/chat/completions", {**CHAT, **fields, **neutral}).status == 200


def test_suffix_is_refused_by_name(served: Caller) -> None:
    assert served.complete("x", suffix="y").json["error"]["param"] == "suffix"
    assert served.complete("x", suffix="").status == 200


def test_a_prompt_that_is_too_long(served: Caller) -> None:
    fits, too_long = [5] * 4095, [5] * 4096
    assert served.complete(fits, max_tokens=1).status == 200
    answer = served.complete(too_long, max_tokens=1)
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert answer.json["error"]["message"].startswith("This model's maximum context length is 4096 tokens")
    assert answer.json["error"]["message"].count("4096 tokens") == 2  # of the limit, and of the prompt
    assert answer.json["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/models/none", None, 404),
        ("GET", "//v1/models", None, 404),
        ("GET", "/v1/../v1/models", None, 404),
        ("GET", "/v1%2fmodels", None, 404),
        ("GET", "/v1/models?x=1", None, 200),
        ("POST", "/v1/models", b"{}", 405),
        ("GET", "/v1/chat/completions", None, 405),
        ("OPTIONS", "/v1/models", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b'{"prompt": null}', 400),
        ("POST", "/v1/completions", b'{"prompt": []}', 400),
        ("POST", "/v1/completions", b'{"prompt": [[]]}', 400),
        ("POST", "/v1/completions", b'{"prompt": [1, "x"]}', 400),
        ("POST", "/v1/completions", b'{"prompt": [99999999]}', 400),
        ("POST", "/v1/completions", b'{"prompt": "x", "model": "gpt-4"}', 404),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/tokenize", b"{}", 400),
        ("POST", "/detokenize", b'{"tokens": [-1]}', 400),
        ("POST", "/detokenize", b'{"tokens": [49152]}', 400),
        ("GET", "/v1/models/", None, 404),
    ],
)
def test_each_wrong_call(served: Caller, method: str, path: str, body: bytes | None, status: int) -> None:
    answer = served.call(method, path, body)
    assert answer.status == status, answer.body
    if status != 200:
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_taken_from_pages_and_programs_may_call_it_anything(served: Caller, kind: str) -> None:
    for of_page in ({"origin": "https://elsewhere.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert served.post("/v1/chat/completions", CHAT, {"content-type": kind, **of_page}).status == 415
    assert served.post("/v1/chat/completions", CHAT, {"content-type": kind}).status == 200


def test_a_body_is_taken_as_it_stands(served: Caller) -> None:
    packed = gzip.compress(json.dumps(CHAT).encode())
    answer = served.post("/v1/chat/completions", packed, {"content-encoding": "gzip"})
    assert (answer.status, answer.json["error"]["message"].split(": ")[0]) == (415, "bodies are not decompressed here")
    assert served.post("/v1/chat/completions", CHAT, {"content-encoding": "identity"}).status == 200
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    assert b" 415 " in served.raw(head + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n")


def test_an_image_is_refused_wherever_it_stands(served: Caller) -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "a view"}, url]}
    history = [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]}
    blocks = [*CHAT["messages"], {"role": "assistant", "content": [use]}, results]
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url["image_url"]["url"]}]}
    for path, body in (
        ("/v1/chat/completions", {"messages": history}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": blocks}),
        ("/v1/responses", {"input": [item]}),
    ):
        answer = served.post(path, body)
        assert answer.status == 400
        assert "text only" in answer.json["error"]["message"]


def test_a_content_type_may_have_parameters(served: Caller) -> None:
    assert served.post("/v1/chat/completions", CHAT, {"content-type": "Application/JSON; charset=utf-8"}).status == 200


def test_an_error_is_short_and_names_no_path(served: Caller) -> None:
    for fields in ({"model": "x" * 100_000}, {"stop": ["y" * 5000] * 20}, {"messages": [{"role": "\ud800" * 3000}]}):
        answer = served.post("/v1/chat/completions", {**CHAT, **fields})
        assert answer.status in (400, 404)
        assert len(answer.body) < 2048
        assert b"/site-packages" not in answer.body
        assert b"Traceback" not in answer.body


def test_the_table_of_the_engines_errors() -> None:
    failed = RequestFailedError("full")
    failed.code, failed.retry_after_ms = "RESOURCE_EXHAUSTED", 1500
    internal = RequestFailedError("bug")
    internal.code = "INTERNAL"
    poison = RequestFailedError("the engine died")
    poison.code = "QUARANTINED"
    table = [
        (InvalidRequestError("n must be 1"), 400),
        (PromptTooLongError("long"), 400),
        (DeadlineExceededError("late"), 504),
        (failed, 503),
        (internal, 500),
        (poison, 422),
        (EngineDeadError("gone"), 503),
        (CallFailedError("busy"), 503),
        (HttpError(418 - 14, "x"), 404),
        (ZeroDivisionError("secret"), 500),
    ]
    for error, status in table:
        assert http_error(error, max_model_len=10).status == status
    assert http_error(poison, max_model_len=10).code == "quarantined"
    found = http_error(failed, max_model_len=10)
    assert (b"retry-after-ms", b"1500") in found.headers
    assert (b"retry-after", b"2") in found.headers
    assert (b"x-should-retry", b"false") in http_error(internal, max_model_len=10).headers
    assert b"secret" not in http_error(ZeroDivisionError("secret"), max_model_len=10).body()
    worst = HttpError(400, "\x00" * 5000).body()
    assert len(worst) < 2600
    assert json.loads(worst)["error"]["code"] == 400
