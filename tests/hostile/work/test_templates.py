"""A caller's chat template over HTTP: the same prompt as the model's own, in a process that ends with the server."""

from pathlib import Path
from typing import Any

from ipc.files.model_files import resolve_model
from tests.frontend.http.caller import Caller, serving
from tests.hostile.work.test_witness import http_pid

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi \N{SNOWMAN}"}], "max_tokens": 4, "temperature": 0}


def children(pid: int) -> list[int]:
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for part in found for child in part]


def test_templates_of_callers() -> None:
    model = ("-m", str(resolve_model(None)), "--executor-option", "vocab_size=49152", "--allow-request-templates")
    with serving("--executor", "fake", *model) as caller:
        template = caller.get("/tokenizer_info").json["chat_template"]
        wanted = content_of(caller, {})
        assert children(http_pid(caller)) == []
        assert content_of(caller, {"chat_template": "default"}) == wanted  # a name: the model's own
        assert children(http_pid(caller)) == []
        assert content_of(caller, {"chat_template": template}) == wanted
        assert content_of(caller, {"chat_template": "{{ messages[0].content }}"}) != wanted
        for wrong in ("{% if %}", "{{ raise_exception('not so') }}"):
            answer = caller.post("/v1/chat/completions", {**CHAT, "chat_template": wrong})
            assert answer.status == 400
            assert "template" in answer.json["error"]["message"]
        (process,) = children(http_pid(caller))
    assert not Path(f"/proc/{process}").exists()


def content_of(caller: Caller, fields: dict[str, Any]) -> tuple[int, str]:
    """The tokens of the prompt, and the answer, which depends on them all."""
    answer = caller.post("/v1/chat/completions", {**CHAT, **fields}).json
    return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]
