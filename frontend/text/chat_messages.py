"""Chat messages: what a caller may write, checked and brought to the form that chat templates are written for.

- content: a str, or a list of {"type": "text", "text": ...}, which is joined by newlines for a template that takes
  strings only, and in a message of role "tool". None is an empty text, as in vLLM. A message with tool calls needs no
  content: it is None for a template that asks whether it is none, else an empty text, since None would be printed.
- tool_calls: a list of {"function": {"name", "arguments"}}; arguments are a mapping, or a JSON object as text, as
  OpenAI's clients send it, which becomes a mapping. No text at all is a call without arguments. A list without calls,
  or None, is left out: to many templates its presence is a call.

Everything is copied; the caller's messages stay as they are.
"""

import json
from typing import Any

import msgspec

from ipc.errors import InvalidRequestError


def read_messages(
    messages: object, *, keep_parts: bool, keep_none: bool, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Return the messages as plain data for a template.

    keep_parts, keep_none: whether the template handles content that is a list, that is None. arguments_as_text: leave
    arguments of tool calls that are text as they are. Errors: InvalidRequestError naming the message.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError(
            f'messages must be a list of {{"role": ..., "content": ...}} with at least one entry; got {messages!r:.80}'
        )
    read = []
    for index, given in enumerate(messages):
        where = f"messages[{index}]"
        message = _read_message(given, where)
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        elif not arguments_as_text:
            _parse_arguments(message["tool_calls"], where)
        _read_content(message, where, keep_parts=keep_parts and message["role"] != "tool", keep_none=keep_none)
        read.append(message)
    return read


def plain_data(value: Any, where: str) -> Any:
    """A copy made of scalars, dicts, lists and tuples only: the sandbox cannot judge foreign objects."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_scalar)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} must be plain data (str, numbers, list, dict): {error}") from error


def _read_message(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidRequestError(f'{where} must be a dict {{"role": ..., "content": ...}}; got {given!r:.80}')
    message: dict[str, Any] = plain_data(given, where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f'{where}["role"] must be a str such as "user"; got {role!r:.80}')
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, (list, tuple)) and all(isinstance(call, dict) for call in calls)):
        raise InvalidRequestError(
            f'{where}["tool_calls"] must be a list of {{"type": "function", "function": {{"name": ..., "arguments": '
            f"...}}}}; got {calls!r:.80}"
        )
    return message


def _read_content(message: dict[str, Any], where: str, *, keep_parts: bool, keep_none: bool) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and ("content" in message or "tool_calls" in message):
        message["content"] = None if keep_none and "tool_calls" in message else ""
        return
    if not isinstance(content, (list, tuple)):
        raise InvalidRequestError(
            f'{where}["content"] must be a str or a list of {{"type": "text", "text": ...}}; got {content!r:.80}'
        )
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f'{where}["content"] has a part that is not {{"type": "text", "text": ...}}: {part!r:.80}; '
                "this version takes text only"
            )
    if not keep_parts:
        message["content"] = "\n".join(part["text"] for part in content)


def _parse_arguments(calls: list[dict[str, Any]], where: str) -> None:
    """Calls may have their function's fields directly, as transformers' users write them."""
    for index, call in enumerate(calls):
        place = f'{where}["tool_calls"][{index}]'
        if isinstance(call.get("function"), dict):
            call, place = call["function"], f'{place}["function"]'
        elif "arguments" not in call:
            continue
        arguments = call.get("arguments")
        if arguments is None or isinstance(arguments, str):
            call["arguments"] = _parse_object(arguments, f'{place}["arguments"]')


def _parse_object(text: str | None, where: str) -> dict[str, Any]:
    if text is None or not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{where} must be a dict or a JSON object as text: {error}; got {text!r:.80}"
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where} must be a dict or a JSON object as text; got {text!r:.80}")
    return value


def _plain_scalar(value: object) -> object:
    """Subclasses of str, int and float (NumPy's float64 among them) lose what they add."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"got {type(value).__name__}")
