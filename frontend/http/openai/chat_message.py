"""The message of a chat's answer in OpenAI's form, complete and in parts.

A field without a value is left out, because clients misread `tool_calls: null` or an empty list. The reasoning has both
names that clients read.
"""

import string
from collections.abc import Callable

from frontend.calls.delta import Delta, Kind, Message
from frontend.http.request import new_id

_LETTERS = string.ascii_letters + string.digits
Fields = dict[str, object]


class CallIds:
    """The ids of one answer's calls. length: letters and digits that the model's template requires; None = any.

    prefix: of ids of any length. draw: returns 32 hexadecimal digits, other ones each time.
    """

    def __init__(self, length: int | None = None, prefix: str = "call_", *, draw: Callable[[], str] = new_id) -> None:
        self._length, self._prefix, self._draw = length, prefix, draw

    def make(self) -> str:
        """Return a new id."""
        if self._length is None:
            return f"{self._prefix}{self._draw()[:24]}"
        number = int(self._draw(), 16)  # templates ask for 9 letters at most
        return "".join(_LETTERS[number // len(_LETTERS) ** at % len(_LETTERS)] for at in range(self._length))


def delta_fields(delta: Delta, ids: CallIds) -> Fields:
    """Return the fields of a delta. Id and name of a call come once, with the first part of its arguments."""
    match delta.kind:
        case Kind.REASONING:
            return reasoning_fields(delta.text)
        case Kind.CONTENT:
            return {"content": delta.text}
        case Kind.CALL:
            function: Fields = {"name": delta.text, "arguments": ""}
            return {"tool_calls": [{"index": delta.call, **_call(ids, function)}]}
        case Kind.ARGUMENTS:
            return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}


def message_fields(message: Message, ids: CallIds) -> Fields:
    """Return the fields of a complete message."""
    content = message.content or (None if message.calls else "")
    fields: Fields = {"role": "assistant", "content": content}
    if message.reasoning:
        fields |= reasoning_fields(message.reasoning)
    if message.calls:
        fields["tool_calls"] = [_call(ids, {"name": one.name, "arguments": one.arguments}) for one in message.calls]
    return fields


def reasoning_fields(text: str) -> Fields:
    """Return reasoning under vLLM's and DeepSeek's names."""
    return {"reasoning": text, "reasoning_content": text}


def _call(ids: CallIds, function: Fields) -> Fields:
    return {"id": ids.make(), "type": "function", "function": function}
