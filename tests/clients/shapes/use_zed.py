"""httpx sends what Zed sends, by its crates open_ai and ollama: of an OpenAI-compatible provider, and of Ollama.

Its answers are read as strictly as there: a field that Zed's types need must have their type.
"""

import json
import os
from typing import Any

import httpx

MODEL = os.environ["MODEL"]
TOOL = {"name": "read_file", "description": "Reads a file.", "parameters": {"type": "object", "properties": {}}}
TEXTS = [{"type": "text", "text": "Say"}, {"type": "text", "text": " hello."}]


def check(value: Any, **types: Any) -> None:
    """Check that an object has these fields with these types."""
    wrong = {name: value.get(name) for name, kind in types.items() if not isinstance(value.get(name), kind)}
    assert not wrong, (wrong, value)


def chat(client: httpx.Client) -> None:
    """A turn of the agent: it has tools, an earlier call and its result. No tokens are counted as a string."""
    call = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
    body = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": TEXTS},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "hello", "tool_call_id": "call_1"},
            {"role": "user", "content": "Go on."},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 12,
        "temperature": 1.0,
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": TOOL}],
        "prompt_cache_key": "thread-1",
    }
    text, usage = "", None
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"authorization": "Bearer none"}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            check(event, choices=list)
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                check(choice, index=int, delta=dict)
                text += choice["delta"].get("content") or ""
    assert text
    check(usage, prompt_tokens=int, completion_tokens=int, total_tokens=int)


def ollama(client: httpx.Client) -> None:
    """The list of models, what each can do, and a turn that keeps the model in memory."""
    listed = client.get("/api/tags", headers={"accept": "application/json"}).json()["models"]
    for one in listed:
        check(one, name=str, modified_at=str, size=int, digest=str, details=dict)
        check(one["details"], format=str, family=str, parameter_size=str, quantization_level=str)
        shown = client.post("/api/show", json={"model": one["name"]}).json()
        assert "tools" in shown["capabilities"], shown
    assert MODEL in [one["name"] for one in listed]
    options = {"num_ctx": 4096, "num_predict": -1, "stop": ["\n"], "temperature": 1.0, "top_p": None}
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}],
        "stream": True,
        "keep_alive": -1,
        "options": options,
        "tools": [],
        "think": None,
    }
    with client.stream("POST", "/api/chat", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [json.loads(line) for line in answer.iter_lines()]
    for line in lines:
        check(line, model=str, created_at=str, message=dict, done=bool)
        assert line["message"]["role"] == "assistant"
        check(line["message"], content=str)
    assert lines[-1]["done"]
    check(lines[-1], prompt_eval_count=int, eval_count=int)
    client.post("/api/chat", json={"model": MODEL, "messages": [], "keep_alive": "1s"})  # for the next client


with httpx.Client(base_url=os.environ["SERVER"], timeout=120) as found:
    chat(found)
    ollama(found)
