"""Tools in the prompt of a model whose chat template does not handle them, in the form of Hermes models.

The system message gets the tools, calls in earlier answers become text, and results of tools become messages of the
user, since such a template may not support another role.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = """These tools can be called. Each line describes one of them:
<tools>
"""
_TAIL = """
</tools>
To call a tool, write only this, with the tool's name and its arguments:
<tool_call>
{"name": "NAME", "arguments": {"KEY": VALUE}}
</tool_call>"""


def with_tools(messages: Sequence[Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the messages with these tools, all as plain text. Messages of another form are not changed."""
    head = _HEAD + "\n".join(_json(tool) for tool in tools) + _TAIL
    system, rest = "", list(messages)
    if rest and isinstance(rest[0], Mapping) and rest[0].get("role") in ("system", "developer"):
        content = rest[0].get("content")
        if content is None or isinstance(content, str):
            system = content or ""
            del rest[0]
    first = {"role": "system", "content": f"{system}\n\n{head}" if system else head}
    return [first, *without_calls(rest)]


def without_calls(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with calls and results of tools as text."""
    shown: list[Any] = []
    results: list[Any] = []  # texts, and other parts
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "tool":
            content = message.get("content")
            results.append(f"<tool_response>\n{_text(content)}\n</tool_response>")
            results += _other_parts(content)
            continue
        if results:
            shown.append(_result_message(results))
            results = []
        shown.append(_as_text(message))
    if results:
        shown.append(_result_message(results))
    return shown


def _result_message(results: Sequence[Any]) -> dict[str, Any]:
    """Return the message with the results of tools; images follow their result's text."""
    is_text = all(isinstance(one, str) for one in results)
    return {"role": "user", "content": "\n".join(results) if is_text else results}


def _as_text(message: Any) -> Any:
    """Return a message whose calls are part of its text."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return message
    parts = [text] if (text := _text(message.get("content"))) else []
    for call in calls:
        function = call.get("function") or call
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        text = arguments if isinstance(arguments, str) else _json(arguments or {})
        name = _json(function.get("name") if isinstance(function, Mapping) else None)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {text or "{}"}}}\n</tool_call>')
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(parts)}


def _other_parts(content: Any) -> list[Any]:
    """Return the parts of a content that are not text, such as images; a model that takes no images refuses them."""
    return [part for part in content if _text_of_part(part) is None] if isinstance(content, list) else []


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(text for part in content if (text := _text_of_part(part)) is not None)
    return content if isinstance(content, str) else ""


def _text_of_part(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
