"""Ids of tool calls in a chat's history, for templates that require ids of a certain length (Mistral's: 9).

A history may come from another server, whose ids have another form, or from an API whose calls have none (Ollama's).
"""

import hashlib
import re
import string
from typing import Any

_LETTERS = string.ascii_letters + string.digits
_Pending = list[tuple[object, str]]  # (function's name, id) of calls whose results have not arrived


def fit_call_ids(messages: list[dict[str, Any]], length: int) -> None:
    """Set the ids of calls and their results, in place, to `length` letters and digits.

    An id of this form is kept. Another is replaced by one that depends on it alone, so a call and its result keep the
    same id, and a chat's prompt is the same each time. A result without an id belongs to the first call without a
    result that has its name, otherwise to the first call without a result.
    """
    pending: _Pending = []
    for index, message in enumerate(messages):
        for at, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = _fitted(call.get("id") or f"{index}.{at}", length)
            function = call.get("function")
            pending.append((function.get("name") if isinstance(function, dict) else call.get("name"), call["id"]))
        if message.get("role") == "tool":
            given = message.get("tool_call_id")
            message["tool_call_id"] = _fitted(given, length) if given else _next(pending, message, length)
            pending = [one for one in pending if one[1] != message["tool_call_id"]]


def _next(pending: _Pending, message: dict[str, Any], length: int) -> str:
    name = message.get("tool_name") or message.get("name")
    named = [identity for function, identity in pending if function == name]
    return next(iter(named or [identity for _, identity in pending]), None) or _fitted("", length)


def _fitted(given: object, length: int) -> str:
    text = str(given)
    if re.fullmatch(rf"[A-Za-z0-9]{{{length}}}", text):
        return text
    number = int.from_bytes(hashlib.sha512(text.encode("utf-8", "surrogatepass")).digest())
    letters = []
    for _ in range(length):
        number, rest = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[rest])
    return "".join(letters)
