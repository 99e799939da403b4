"""AnswerFormat: how one dialect writes a reply.

Each API (chat, completions, ...) has a file with one or two of these.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import msgspec

from frontend.http.errors import HttpError
from frontend.http.replies.usage import Usage
from frontend.results.outputs import CompletionOutput, TokenLogprobs

EVENT_STREAM = b"text/event-stream; charset=utf-8"
#: Line ends of Python's str.splitlines() that JSON may contain unescaped. Some clients split an event's lines there.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
_LONG_BYTES = 1 << 20  # of JSON: longer texts are escaped in parts
_EACH_PART = 256  # elements of a long list encoded in one piece


class AnswerFormat(Protocol):
    """The bytes of one reply. Choices count over all prompts: prompt * n + choice.

    stream_type: content type of a stream. keep_alive: bytes that a client skips, sent into a silent stream; may be
    empty.
    """

    stream_type: bytes
    keep_alive: bytes

    def opening(self) -> bytes:
        """Return the bytes before the first tokens of a stream."""

    def piece(self, index: int, output: CompletionOutput, usage: Usage) -> bytes:
        """Return the events of a choice's new part; may be empty."""

    def closing(self, usage: Usage) -> bytes:
        """Return the end of a stream."""

    def failure(self, error: HttpError) -> bytes:
        """Return the end of a stream that failed."""

    def whole(self, choices: list[CompletionOutput], prompts: Sequence["PromptSide"], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""


class EchoingFormat:
    """The base of an AnswerFormat whose streams may show the prompts with their log probabilities.

    echoes: whether this reply's stream shows them.
    """

    echoes = False

    def prompt_piece(self, index: int, prompt: "PromptSide") -> bytes:
        """Return the event of the prompt of choice `index`, before its first piece()."""
        return b""


class StoredFormat:
    """The base of an AnswerFormat whose answers may be stored. is_stored: whether this one is.

    takes_each_token: piece() takes one token at a time, so that the events do not depend on how many arrive together.
    """

    is_stored = takes_each_token = False

    async def store(self) -> None:
        """Store the answer, after closing() or whole() and before their bytes are sent. Errors: HttpError."""


class PromptSide(msgspec.Struct):
    """A prompt as an answer may show it. logprobs: of each of its tokens; each is made when it is read."""

    text: str | None
    token_ids: list[int]
    logprobs: Iterable[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


class JsonList:
    """A long list that is JSON already, for a value that json_bytes() takes. parts: the text, in order."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts


class _HasListsError(Exception):
    """A value has a JsonList."""


def _refuse_lists(value: object) -> object:
    if isinstance(value, JsonList):
        raise _HasListsError
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode = msgspec.json.Encoder(enc_hook=_refuse_lists).encode
_MARK = b"\0"  # JSON has no such byte


def json_bytes(value: object) -> bytes:
    """Return a value as JSON without any character that ends a line. A lone surrogate becomes a question mark."""
    try:
        return _one_line(_encode(value))
    except UnicodeEncodeError:  # a model's JSON may have "\ud800", and its parts are read
        return _one_line(json.dumps(value, ensure_ascii=False, default=_plain).encode(errors="replace"))
    except _HasListsError:
        return _joined(value)


def _joined(value: object) -> bytes:
    """Return a value with lists as JSON. Their text is copied once, and without Python's lock: it may be 50 MB."""
    lists = list[JsonList]()

    def mark(one: object) -> msgspec.Raw:
        assert isinstance(one, JsonList), type(one)
        lists.append(one)
        return msgspec.Raw(_MARK)

    try:
        data = msgspec.json.encode(value, enc_hook=mark)
    except UnicodeEncodeError:
        return _one_line(json.dumps(value, ensure_ascii=False, default=_plain).encode(errors="replace"))
    first, *others = _one_line(data).split(_MARK)
    parts = [first]
    for one, behind in zip(lists, others, strict=True):
        parts += one.parts
        parts.append(behind)
    return b"".join(parts)


def raw_list(values: Iterable[object]) -> JsonList:
    """Return a long list as JSON for a value that json_bytes() takes.

    It is encoded in parts, between which other threads run; `values` may compute its elements lazily.
    """
    iterator = iter(values)
    parts = [b"["]
    while part := list(islice(iterator, _EACH_PART)):
        parts += (json_bytes(part)[1:-1], b",")
    if len(parts) > 1:
        parts.pop()
    parts.append(b"]")
    return JsonList(parts)


def _plain(value: object) -> Any:
    if isinstance(value, JsonList):
        return msgspec.json.decode(b"".join(value.parts))
    raise TypeError(f"{type(value).__name__} is not JSON")


def _one_line(data: bytes) -> bytes:
    if data.isascii():
        return data
    return _escaped(data) if len(data) <= _LONG_BYTES else b"".join(map(_escaped, _parts(data)))


def _escaped(data: bytes) -> bytes:
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


def _parts(data: bytes) -> Iterator[bytes]:
    """Yield the parts of a long JSON text; each ends after a quote, so not in the middle of a character."""
    start = 0
    while start < len(data):
        at = data.find(b'"', start + _LONG_BYTES)
        end = at + 1 if at >= 0 else len(data)
        yield data[start:end]
        start = end


def event(value: object) -> bytes:
    """Return a value as one server-sent event."""
    return b"data: %b\n\n" % json_bytes(value)


def error_event(error: HttpError) -> bytes:
    """Return the event that ends a stream of OpenAI's API that failed."""
    return b"%bdata: [DONE]\n\n" % event({"error": error.fields()})
