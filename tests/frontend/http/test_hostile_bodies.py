"""Mutated bodies of all dialects: each is answered or refused by name, none is an error of the server."""

import asyncio
import copy
import gc
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.http.app import App
from frontend.http.process.options import HttpOptions
from frontend.http.service import Service
from frontend.http.wire.local_caller import LocalCaller
from frontend.http.wire.server import open_engine
from frontend.session import EngineHandle
from tests.frontend.http.caller import Caller
from tests.frontend.http.test_tools import TOOLS

CALL = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": 1}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": []},
            {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        ],
        "tools": [{"type": "function", "name": "get_time", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "get_time"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
        "include": [],
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "c1", "name": "get_time", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "noon"}]},
        ],
        "tools": [{"name": "get_time", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "max_tokens": 3,
    },
    "/api/chat": {
        "model": "",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL]}],
        "tools": TOOLS,
        "format": {"type": "object"},
        "options": {"num_predict": 3},
        "think": True,
    },
}
NESTED: Any = "x"
for _ in range(200):
    NESTED = {"properties": {"a": NESTED}}
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**70, 1e308, 0.5, "", "x", "auto", "function", "\ud800", "a\x00\u2028", [], {}, [None], [[]]),
    *(
        {"a": 1},
        [{}],
        ["x"],
        {"type": "text"},
        {"type": ["x"]},
        {"": ""},
        {"$ref": "#/a"},
        {"$ref": 5},
        "y" * 3000,
        NESTED,
    ),
    *({"name": {}}, {"name": "get_time"}, {"content": {}}, {"role": "user", "content": 5}, {"enum": []}),
]


@pytest.fixture(scope="module")
def engine(served: Caller) -> Iterator[EngineHandle]:
    handle = open_engine(served.connect)
    yield handle
    handle.close()


def places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += [(value, key), *places(value[key])]
    return found


def mutate(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(draw.choice([1, 1, 2, 4])):
        if not (found := places(body)):
            break
        container, key = draw.choice(found)
        match draw.randrange(4):
            case 0:
                del container[key]
            case 1:
                container[key] = copy.deepcopy(draw.choice(places(body) or [({"": 1}, "")])[0])
            case _:
                container[key] = copy.deepcopy(draw.choice(VALUES))
    body["stream"] = draw.random() < 0.3
    return body


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 60), *(pytest.param(seed, 5000, marks=pytest.mark.soak) for seed in range(1, 4))]
)
def test_no_body_is_an_error_of_the_server(engine: EngineHandle, path: str, seed: int, count: int) -> None:
    draw = random.Random(f"{path} {seed}")

    async def run() -> list[int]:
        service = Service(engine, HttpOptions(checks_host=False, reasoning_parser=draw.choice(["none", "qwen3"])))
        caller, statuses = LocalCaller(App(service)), []
        for _ in range(count):
            try:
                body = json.dumps(mutate(draw, BODIES[path])).encode()
            except RecursionError:  # deep values within one another: Python neither copies nor writes them
                continue
            answer = await asyncio.wait_for(caller.post(path, body), 30)
            assert answer.status in (200, 400, 404), (answer.status, answer.body, body)
            assert answer.status == 200 or len(answer.body) <= 2048
            statuses.append(answer.status)
        service.pump.close()
        return statuses

    statuses = asyncio.run(run())
    assert {200, 400} <= set(statuses)


REFUSED: list[dict[str, Any]] = [
    {"prompt": "x " * 40_000, "max_tokens": 1},
    {"prompt": "x " * 40_000, "model": "another"},
    {"prompt": ["x " * 400] * 5000, "n": 1},  # 4 MB
    {"prompt": "x " * 40_000, "temperature": -1},
    {"prompt": "x " * 40_000, "n": "two"},
]


@pytest.mark.parametrize("body", REFUSED)
def test_a_refused_request_is_gone_with_its_answer(engine: EngineHandle, body: dict[str, Any]) -> None:
    """Its error has a traceback, which has the body: in a cycle, both stayed until a full garbage collection."""

    async def run() -> None:
        service = Service(engine, HttpOptions(checks_host=False))
        gc.collect()
        answer = await LocalCaller(App(service)).post("/v1/completions", json.dumps(body).encode())
        assert 400 <= answer.status < 500
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        service.close()

    gc.disable()
    try:
        asyncio.run(run())
        assert [one for one in gc.garbage if isinstance(one, Exception)] == []
    finally:
        gc.garbage.clear()
        gc.enable()
