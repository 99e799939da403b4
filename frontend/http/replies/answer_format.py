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
_encode = msgspec.json.Encoder().encode
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
    """A prompt as an answer may show it."""

    text: str | None
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


def json_bytes(value: object) -> bytes:
    """Return a value as JSON without any character that ends a line. A lone surrogate becomes a question mark."""
    try:
        data = _encode(value)
    except UnicodeEncodeError:  # a model's JSON may have "\ud800", and its parts are read
        data = json.dumps(value, ensure_ascii=False, default=_plain).encode(errors="replace")
    if data.isascii():
        return data
    return _escaped(data) if len(data) <= _LONG_BYTES else b"".join(map(_escaped, _parts(data)))


def raw_list(values: Iterable[object]) -> msgspec.Raw:
    """Return a long list as JSON for a value that json_bytes() takes.

    It is encoded in parts, between which other threads run; `values` may compute its elements lazily.
    """
    iterator = iter(values)
    parts = list[bytes]()
    while part := list(islice(iterator, _EACH_PART)):
        parts.append(json_bytes(part)[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def _plain(value: object) -> Any:
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


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
