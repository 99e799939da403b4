"""Each field of a chat that is obeyed shows its effect: in the engine's request, or in the answer."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from frontend.http.app import App
from frontend.http.bodies import ChatBody, refused_fields
from frontend.http.errors import HttpError
from frontend.http.process.options import HttpOptions
from frontend.http.routes import ROUTES
from frontend.http.service import Service
from frontend.http.wire.local_caller import LocalCaller
from frontend.http.wire.server import open_engine
from frontend.session import EngineHandle, PreparedRequest
from ipc.params.sampling_params import NUMBERS, RequestOutputKind
from ipc.wire.pin_messages import Pin
from tests.frontend.http.caller import Caller
from tests.frontend.http.test_sampling_fields import VALUES

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
DAY_MS = 24 * 3600 * 1000
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
#: Fields that have no effect on an answer by their meaning: they name the caller, or ask for what is always so.
INERT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "session_id"),
    *("stream_interval", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "sse_ping_interval", "dynatemp_exponent"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta"),
    "adaptive_decay",
}


@pytest.fixture(scope="module")
def engine(served: Caller) -> Iterator[EngineHandle]:
    handle = open_engine(served.connect)
    yield handle
    handle.close()


class Told(Service):
    """A server that submits nothing, and keeps what it would have submitted."""

    prepared: Sequence[PreparedRequest] = ()

    async def submit(self, request: Any, prepared: Sequence[PreparedRequest], answer: Any) -> Any:
        self.prepared = prepared
        raise HttpError(503, "enough")


def asked(engine: EngineHandle, *bodies: dict[str, Any]) -> list[PreparedRequest]:
    """The engine's request of a chat with each of these fields."""

    async def run() -> list[PreparedRequest]:
        service, found = Told(engine, HttpOptions(checks_host=False, allow_request_templates=True)), []
        caller = LocalCaller(App(service))
        for fields in bodies:
            answer = await caller.post("/v1/chat/completions", json.dumps({"messages": HI, **fields}).encode())
            assert answer.status == 503, answer.body
            found += service.prepared
        service.close()
        return found

    return asyncio.run(run())


def of_params(name: str, value: Any) -> Callable[[PreparedRequest], bool]:
    return lambda request: bool(getattr(request.params, name) == value)


def shows(text: str) -> Callable[[PreparedRequest], bool]:
    return lambda request: text in str(request.prompt.text)


def ends_with(text: str) -> Callable[[PreparedRequest], bool]:
    return lambda request: str(request.prompt.text).rstrip("\n").endswith(text)


def is_held_to(name: str, value: Any) -> Callable[[PreparedRequest], bool]:
    return lambda request: bool(getattr(request.params.structured_outputs, name, None) == value)


#: Field -> fields with it, and what the engine's request is then and is not without it.
REQUESTS: dict[str, tuple[dict[str, Any], Callable[[PreparedRequest], bool]]] = {
    **{
        name: ({name: VALUES[one.name]}, of_params(one.name, VALUES[one.name]))
        for one in NUMBERS.values()
        for name in (one.name, *one.parameter.names)
    },
    "messages": ({"messages": [{"role": "user", "content": "elephant"}]}, shows("elephant")),
    "max_completion_tokens": ({"max_completion_tokens": 7, "max_tokens": 9}, of_params("max_tokens", 7)),
    "logprobs": ({"logprobs": True}, of_params("logprobs", 0)),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 3}, of_params("logprobs", 3)),
    "tools": ({"tools": TOOLS}, shows("get_weather")),
    "tool_choice": ({"tools": TOOLS, "tool_choice": "required"}, lambda one: one.params.structured_outputs is not None),
    "add_generation_prompt": ({"add_generation_prompt": False}, ends_with("Hi<|im_end|>")),
    "continue_final_message": (
        {"continue_final_message": True, "messages": [*HI, {"role": "assistant", "content": "Well"}]},
        ends_with("assistant\nWell"),
    ),
    "chat_template": ({"chat_template": "seen {{ messages[0].content }}"}, shows("seen Hi")),
    "chat_template_kwargs": (
        {"chat_template": "{{ x | default(5) }}", "chat_template_kwargs": {"x": "seen"}},
        shows("seen"),
    ),
    "reasoning_effort": ({"chat_template": "effort {{ reasoning_effort }}", "reasoning_effort": "low"}, shows("low")),
    "documents": (
        {"chat_template": "{{ (documents or [{'text': 5}])[0].text }}", "documents": [{"text": "seen"}]},
        shows("seen"),
    ),
    "stop": ({"stop": ["x"]}, of_params("stop", ["x"])),
    "stop_token_ids": ({"stop_token_ids": [7]}, of_params("stop_token_ids", [7])),
    "ignore_eos": ({"ignore_eos": True}, of_params("ignore_eos", True)),
    "prompt_logprobs": ({"prompt_logprobs": 2}, of_params("prompt_logprobs", 2)),
    "skip_special_tokens": ({"skip_special_tokens": False}, of_params("skip_special_tokens", False)),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, of_params("include_stop_str_in_output", True)),
    "logit_bias": ({"logit_bias": {"7": 2.5}}, of_params("logit_bias", {7: 2.5})),
    "allowed_token_ids": ({"allowed_token_ids": [7, 9]}, of_params("allowed_token_ids", [7, 9])),
    "bad_words": ({"bad_words": ["x"]}, lambda one: bool(one.params.bad_words_token_ids)),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 3}, lambda one: len(one.prompt.token_ids) == 3),
    "use_beam_search": ({"use_beam_search": True, "n": 2}, of_params("use_beam_search", True)),
    "best_of": ({"use_beam_search": True, "best_of": 3}, of_params("best_of", 3)),
    "length_penalty": ({"use_beam_search": True, "n": 2, "length_penalty": 0.5}, of_params("length_penalty", 0.5)),
    "early_stopping": ({"use_beam_search": True, "n": 2, "early_stopping": True}, of_params("early_stopping", True)),
    "stream": ({"stream": True}, of_params("output_kind", RequestOutputKind.DELTA)),
    "response_format": ({"response_format": {"type": "json_object"}}, is_held_to("json_object", True)),
    "structured_outputs": ({"structured_outputs": {"choice": ["a", "b"]}}, is_held_to("choice", ["a", "b"])),
    "priority": ({"priority": 4}, lambda one: one.priority == 4),
    "cache_salt": ({"cache_salt": "x"}, lambda one: one.prompt.cache_salt == "x"),
    "prompt_cache_retention": ({"prompt_cache_retention": "24h"}, lambda one: one.pins == (Pin("", DAY_MS),)),
    "prompt_cache_key": (
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h"},
        lambda one: one.pins == (Pin("x", DAY_MS),),
    ),
}
#: Field -> fields with it, and what the answer is then and is not without it.
ANSWERS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "model": ({"model": "other/name"}, lambda answer: answer["model"] == "other/name"),
    "return_token_ids": ({"return_token_ids": True}, lambda answer: len(answer["choices"][0]["token_ids"] or ()) == 2),
    "receipt": ({"receipt": True}, lambda answer: len(answer.get("receipts") or ()) == 1),
    "return_tokens_as_token_ids": (
        {"logprobs": True, "return_tokens_as_token_ids": True},
        lambda answer: "token_id:" in str(answer["choices"][0]["logprobs"]),
    ),
}
#: Fields with tests of their own, since they show in a stream or in a comparison alone.
ELSEWHERE = {"stream_options", "parallel_tool_calls"}


def without(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {given: value for given, value in fields.items() if given != name}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_field_reaches_the_engines_request(engine: EngineHandle, name: str) -> None:
    fields, is_obeyed = REQUESTS[name]
    absent = without(name, fields) if name != "messages" else {}
    found = asked(engine, fields, absent, {**absent, name: None} if name != "messages" else {})
    assert [is_obeyed(one) for one in found] == [True, False, False]


@pytest.mark.parametrize("name", ANSWERS)
def test_a_field_shows_in_the_answer(served: Caller, name: str) -> None:
    fields, is_obeyed = ANSWERS[name]
    assert is_obeyed(served.chat(max_tokens=2, **fields).json)
    assert not is_obeyed(served.chat(max_tokens=2, **without(name, fields)).json)


def test_a_stream_reports_what_its_options_say(served: Caller) -> None:
    for options, wanted in (({"include_usage": True}, 1), ({"include_usage": True, "continuous_usage_stats": True}, 4)):
        events = served.chat(max_tokens=4, stream=True, stream_options=options).events
        assert sum(bool(event.get("usage")) for event in events) >= wanted
    assert not any(event.get("usage") for event in served.chat(max_tokens=4, stream=True).events)


def test_one_call_or_several(engine: EngineHandle) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    one, several = asked(engine, {**fields, "parallel_tool_calls": False}, fields)
    assert one.params.structured_outputs != several.params.structured_outputs


def test_every_field_of_chats_is_obeyed_refused_or_inert() -> None:
    refused = refused_fields(ChatBody).keys()
    known = {*REQUESTS, *ANSWERS, *ELSEWHERE, *refused, *INERT}
    assert {*ChatBody.__struct_fields__} == known
    assert not {*REQUESTS, *ANSWERS} & {*refused, *INERT}


@pytest.mark.parametrize("name", sorted(refused_fields(ChatBody)))
def test_a_field_that_is_refused_is_named(served: Caller, name: str) -> None:
    answer = served.chat(max_tokens=1, **{name: {"some": ["thing"]}})
    assert answer.status == 400
    assert name in answer.json["error"]["message"]


#: What the bodies need.
NEEDED: dict[str, dict[str, Any]] = {
    "ChatBody": {"messages": HI},
    "MessagesBody": {"messages": HI, "max_tokens": 3},
    "CountBody": {"messages": HI},
    "ResponsesBody": {"input": "Hi"},
    "ScoreBody": {"text_1": "a", "text_2": "b"},
    "RerankBody": {"query": "a", "documents": ["b"]},
    "OllamaChatBody": {"model": "demo", "messages": HI, "stream": False, "options": {"num_predict": 3}},
    "OllamaGenerateBody": {"model": "demo", "prompt": "Hi", "stream": False, "options": {"num_predict": 3}},
    "OllamaEmbedBody": {"model": "demo", "input": "Hi"},
    "OllamaOldBody": {"model": "demo", "prompt": "Hi"},
    "CompletionBody": {"prompt": "Hi"},
    "LlamaCppBody": {"prompt": "Hi"},
    "InfillBody": {"input_prefix": "a", "input_suffix": "b"},
    "EmbeddingBody": {"input": "Hi"},
    "PoolingBody": {"input": "Hi"},
    "ClassifyBody": {"input": "Hi"},
    "TokenizeBody": {"prompt": "Hi"},
    "DetokenizeBody": {"tokens": [5]},
    "ForkBody": {"to": "x"},
    "ConversationBody": {},
    "ItemsBody": {"items": []},
    "BatchBody": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
BODIES = {route.body.__name__: (route.path, route.body) for route in ROUTES if route.body is not None}


@pytest.mark.parametrize("name", BODIES)
def test_a_field_that_is_null_is_as_if_it_were_absent(served: Caller, name: str) -> None:
    path, body = BODIES[name]
    needed = {**NEEDED[name], **({"max_tokens": 3} if "max_tokens" in body.__struct_fields__ else {})}
    nulls = dict.fromkeys(without_needed(body, needed))
    plain, given = served.post(path, needed), served.post(path, {**nulls, **needed})
    assert given.status == plain.status, given.body
    # of another kind of model; there is no such session; there is no store
    others = ("ClassifyBody", "InfillBody", "ForkBody", "ConversationBody", "ItemsBody", "BatchBody")
    assert given.status == 200 or name in others
    if plain.status != 200:
        assert given.json == plain.json


def without_needed(body: type[msgspec.Struct], needed: dict[str, Any]) -> list[str]:
    return [name for name in body.__struct_encode_fields__ if name not in needed]
