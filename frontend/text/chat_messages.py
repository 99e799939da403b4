"""Chat messages: check a caller's messages and convert them to the form that chat templates expect.

- content: a str, or a list of {"type": "text", "text": ...}; texts in the form of the Responses API (input_text,
  output_text, refusal) and plain strings become such parts. The list is joined by newlines in a message of role "tool"
  and for a template that takes only strings. None is an empty text, as in vLLM. The model's own messages need no
  content: with tool calls it is None for a template that tests for none, otherwise an empty text, since None would be
  printed.
- role "developer", which OpenAI's clients send for "system": if the template does not name it, all such messages are
  joined to the system message at the beginning, as in vLLM. If it does, system and developer messages at the beginning
  become one, because templates that support the role (gpt-oss') read only the first.
- tool_calls: a list of {"function": {"name", "arguments"}}. Arguments are a mapping, or a JSON object as text, as
  OpenAI's clients send it, which becomes a mapping. Empty text or None means a call without arguments. An empty list or
  None is left out, because many templates read its presence as a call.

Everything is copied; the caller's messages are not changed.
"""

import json
from typing import Any

import msgspec

from frontend.images.chat_images import IMAGE_PART
from ipc.errors import InvalidRequestError

_SYSTEM_ROLES = ("system", "developer")
#: Types of content parts that are text -> the field with the text.
_TEXT_KINDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(
    messages: object,
    *,
    keep_parts: bool,
    keep_none: bool,
    keep_developer: bool = True,
    image_mark: str | None = None,
    arguments_as_text: bool = False,
) -> list[dict[str, Any]]:
    """Return the messages as plain data for a template.

    keep_parts, keep_none: whether the template handles content that is a list, or None. keep_developer: whether it
    names the role "developer". image_mark: text for an image (a part that is IMAGE_PART) if a template takes only text;
    None = the model takes no images. arguments_as_text: do not change arguments of tool calls that are text. Errors:
    InvalidRequestError naming the message.
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
        keeps = keep_parts and (message["role"] != "tool" or _has_images(message))
        takes_parts = image_mark is not None and keeps
        if takes_parts and isinstance(message.get("content"), str):  # templates of such models may not accept a str
            message["content"] = [{"type": "text", "text": message["content"]}]
        _read_content(message, where, keep_parts=keeps, keep_none=keep_none, image_mark=image_mark)
        read.append(message)
    return _join_developer(read, keep_developer=keep_developer)


def plain_data(value: Any, where: str) -> Any:
    """Return a copy made of scalars, dicts, lists and tuples only, because the sandbox cannot judge foreign objects.

    Errors: InvalidRequestError that names the position `where`.
    """
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


def _has_images(message: dict[str, Any]) -> bool:
    """Return whether the content has an image: only the template knows what is around one in a tool's result."""
    content = message.get("content")
    return isinstance(content, (list, tuple)) and IMAGE_PART in content


def _read_content(
    message: dict[str, Any], where: str, *, keep_parts: bool, keep_none: bool, image_mark: str | None
) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None and ("content" in message or message["role"] == "assistant"):
        message["content"] = None if keep_none and "tool_calls" in message else ""
        return
    if not isinstance(content, (list, tuple)):
        raise InvalidRequestError(
            f'{where}["content"] must be a str or a list of {{"type": "text", "text": ...}}; got {content!r:.80}'
        )
    takes_images = image_mark is not None
    parts = [_read_part(part, where, takes_images=takes_images) for part in content]
    if not keep_parts:
        parts = [{"type": "text", "text": image_mark} if part == IMAGE_PART else part for part in parts]
    message["content"] = parts if keep_parts else "\n".join(map(_text_of_part, parts))


def _read_part(part: object, where: str, *, takes_images: bool) -> dict[str, Any]:
    """Return a part of a message's content in the form for templates. Errors: InvalidRequestError."""
    if takes_images and part == IMAGE_PART:
        return dict(IMAGE_PART)
    if isinstance(part, str):
        return {"type": "text", "text": part}
    field = _TEXT_KINDS.get(str(part.get("type"))) if isinstance(part, dict) else None
    text = part.get(field) if isinstance(part, dict) and field is not None else None
    if not isinstance(part, dict) or not isinstance(text, str):
        raise InvalidRequestError(
            f'{where}["content"] has a part that is not {{"type": "text", "text": ...}}: {part!r:.80}; '
            f"this model takes {'text and images' if takes_images else 'text'} only"
        )
    return part if part["type"] == "text" else {"type": "text", "text": text}


def _join_developer(messages: list[dict[str, Any]], *, keep_developer: bool) -> list[dict[str, Any]]:
    """Return the messages with those of role "developer" at the positions where the template reads them."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    begin = 0
    while begin < len(messages) and messages[begin]["role"] in _SYSTEM_ROLES:
        begin += 1
    first, rest = messages[:begin], messages[begin:]
    if keep_developer and len(first) < 2:
        return messages
    role = first[0]["role"] if keep_developer else "system"
    if not keep_developer:
        first += [message for message in rest if message["role"] == "developer"]
        rest = [message for message in rest if message["role"] != "developer"]
    return [{"role": role, "content": "\n\n".join(map(_text_of, first))}, *rest]


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(map(_text_of_part, content or ()))


def _text_of_part(part: dict[str, Any]) -> str:
    return "" if part == IMAGE_PART else str(part["text"])


def _parse_arguments(calls: list[dict[str, Any]], where: str) -> None:
    """Replace JSON text with mappings in the calls' arguments.

    A call may have its function's fields directly, as users of transformers write it.
    """
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
    """Return the plain str, int or float of a subclass such as NumPy's float64; TypeError for another type."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"got {type(value).__name__}")
