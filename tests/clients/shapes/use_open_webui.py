"""httpx sends what Open WebUI 0.12.4 sends, by its routers openai.py and ollama.py and its tasks.

That is a connection of each kind: the lists, a chat with an image for a model that takes none, the title of the chat.
"""

import json
import os
from typing import Any

import httpx

MODEL = os.environ["MODEL"]
HEADERS = {
    "authorization": "Bearer none",
    "x-openwebui-user-name": "A%20User",
    "x-openwebui-user-id": "1",
    "x-openwebui-user-email": "user@example.org",
    "x-openwebui-user-role": "user",
    "x-openwebui-chat-id": "2",
}
TITLE = '### Task:\nGenerate a title.\n### Output:\nJSON format: { "title": "..." }\n<chat_history>Hello</chat_history>'


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, which must end as OpenAI's do."""
    assert answer.status_code == 200, answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def openai(client: httpx.Client) -> None:
    """A connection with OpenAI's API."""
    assert MODEL in [one["id"] for one in client.get("/v1/models").json()["data"]]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
    body = {"stream": True, "model": MODEL, "messages": said, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        found = events(answer)
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in found if one["choices"])
    assert found[-1]["usage"]["total_tokens"] > 0
    title = {"model": MODEL, "messages": [{"role": "user", "content": TITLE}], "stream": False, "max_tokens": 20}
    assert client.post("/v1/chat/completions", json=title).json()["choices"][0]["message"]["content"]
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, pixel]}]
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "image" in refused.json()["error"]["message"]


def ollama(client: httpx.Client) -> None:
    """A connection with Ollama's API."""
    assert client.get("/api/version").json()["version"]
    assert MODEL in [one["model"] for one in client.get("/api/tags").json()["models"]]
    client.get("/api/ps").raise_for_status()
    client.post("/api/show", json={"model": MODEL}).raise_for_status()
    said = [{"role": "user", "content": "Say hello."}]
    options = {"temperature": 0.5, "num_predict": 12, "stop": ["END"]}
    body = {"model": MODEL, "messages": said, "options": options, "stream": True, "keep_alive": "5m"}
    with client.stream("POST", "/api/chat", json=body) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert "".join(line["message"]["content"] for line in lines)
    assert lines[-1]["done"]
    assert lines[-1]["eval_count"] == 12 or lines[-1]["done_reason"] == "stop"
    loaded = [one["model"] for one in client.get("/api/ps").json()["models"]]
    assert MODEL in loaded
    client.post("/api/generate", json={"model": MODEL, "keep_alive": 0}).raise_for_status()  # its button "unload"


with httpx.Client(base_url=os.environ["SERVER"], timeout=120, headers=HEADERS) as found:
    openai(found)
    ollama(found)
