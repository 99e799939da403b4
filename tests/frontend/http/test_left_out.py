"""Tools that only a hosted service has: left out, named in the log, and refused where a tool_choice wants one."""

import logging
from typing import Any

import pytest

from frontend.http.callers.meter import HttpMeter
from frontend.http.left_out import is_hosted_block, is_hosted_item
from tests.frontend.http.caller import Caller

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
SHELL = {"type": "function", "name": "shell", "description": "Run it.", "strict": False, "parameters": SCHEMA}
#: Tools of the types that codex-cli 0.171.0 sends by itself (function, namespace, web_search), and a custom one.
CODEX_TOOLS: list[dict[str, Any]] = [
    SHELL,
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [{**SHELL, "name": "spawn"}]},
    {"type": "web_search", "external_web_access": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": ""},
    },
]
CHAT_SHELL = {"type": "function", "function": {"name": "shell", "parameters": SCHEMA}}
ASK = [{"role": "user", "content": "Hi"}]
SHORT = {"temperature": 0, "max_output_tokens": 4}
ITEMS: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "call_id": "call_1", "name": "apply_patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
    {"type": "local_shell_call", "call_id": "call_2", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "x", "tools": []},
]


def test_a_turn_of_codex(served: Caller) -> None:
    """A request of that shape, not a recorded one: instructions, a developer's message, tools, a stream."""
    body = {
        "model": "demo",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]},
        ],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x": "y"},
        "max_output_tokens": 4,
    }
    answer = served.post("/v1/responses", body)
    assert answer.status == 200, answer.body
    assert b"event: response.incomplete" in answer.body


def test_what_is_left_out_is_not_in_the_prompt(served: Caller) -> None:
    def prompt_tokens(**fields: Any) -> int:
        answer = served.post("/v1/responses", {"input": "Hi", **SHORT, **fields})
        assert answer.status == 200, answer.body
        return int(answer.json["usage"]["input_tokens"])

    assert prompt_tokens(tools=CODEX_TOOLS) == prompt_tokens(tools=[SHELL])
    assert prompt_tokens(tools=CODEX_TOOLS[1:]) == prompt_tokens()
    assert prompt_tokens(input=[*ASK, *ITEMS]) == prompt_tokens(input=ASK)


def test_over_chats(served: Caller) -> None:
    custom = {"type": "custom", "custom": {"name": "apply_patch"}}
    with_both = served.chat(max_tokens=1, tools=[CHAT_SHELL, custom, {"type": "web_search"}])
    alone = served.chat(max_tokens=1, tools=[CHAT_SHELL])
    assert with_both.json["usage"]["prompt_tokens"] == alone.json["usage"]["prompt_tokens"]


def test_over_messages(served: Caller) -> None:
    tool = {"name": "shell", "input_schema": SCHEMA}
    hosted = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    blocks = [
        {"type": "text", "text": "Yes."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
    ]

    def input_tokens(tools: list[Any], content: Any) -> int:
        history = [*ASK, {"role": "assistant", "content": content}, *ASK]
        answer = served.post("/v1/messages", {"max_tokens": 1, "messages": history, "tools": tools})
        assert answer.status == 200, answer.body
        usage = answer.json["usage"]
        return sum(int(usage[f"{kind}input_tokens"]) for kind in ("", "cache_creation_", "cache_read_"))

    assert input_tokens([tool, *hosted], blocks) == input_tokens([tool], "Yes.")


def test_a_found_tool_is_named_in_the_result_of_a_search(served: Caller) -> None:
    result = [{"type": "tool_reference", "tool_name": "shell"}]
    history = [
        *ASK,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result}]},
    ]
    assert served.post("/v1/messages", {"max_tokens": 1, "messages": history}).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": "Hi", "tools": CODEX_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("/v1/responses", {"input": "Hi", "tools": CODEX_TOOLS[1:], "tool_choice": "required"}, "tool_choice"),
        (
            "/v1/responses",
            {
                "input": "Hi",
                "tools": CODEX_TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            },
            "tool_choice",
        ),
        ("/v1/chat/completions", {"messages": ASK, "tools": CODEX_TOOLS[1:], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_choice_that_wants_one_is_refused(served: Caller, path: str, fields: Any, param: str) -> None:
    answer = served.post(path, {"model": "demo", **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_that_allows_one_among_others(served: Caller, mode: str) -> None:
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "web_search"}, SHELL]}
    body = {"input": "Hi", "tools": CODEX_TOOLS, "tool_choice": allowed, **SHORT}
    assert served.post("/v1/responses", body).status == 200


def test_what_is_no_tools_item_is_not_left_out() -> None:
    own = ("message", "function_call", "function_call_output", "reasoning", "item_reference", "compaction", None, 5)
    assert not any(map(is_hosted_item, own))
    assert not any(map(is_hosted_block, ("text", "tool_use", "tool_result", "thinking", "image", "document", None)))


def test_each_is_named_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    meter = HttpMeter()
    with caplog.at_level(logging.WARNING, "engine_core.http"):
        for number in range(300):
            meter.note_left_out("tools of type 'web_search'")
            meter.note_left_out(f"tools of type 'x{number}'")
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("left out of requests: tools of type 'web_search'")
    assert len(texts) == 100  # a caller that makes up names does not fill the log
