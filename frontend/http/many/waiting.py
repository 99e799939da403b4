"""What a request shows while its model loads: a stream begins after HEAD_S, and then has a sign every KEEP_ALIVE_S.

A request that is not streamed waits in silence, as it does while an engine is restarted.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from frontend.http.anthropic import messages
from frontend.http.errors import HttpError
from frontend.http.many.catalog import keep_alive_s
from frontend.http.ollama import ollama
from frontend.http.replies.answer_format import EVENT_STREAM
from frontend.http.replies.reply import HEAD_S, KEEP_ALIVE_S
from frontend.http.request import Request

_LONG_BYTES = 64 << 10


class Asked(msgspec.Struct):
    """What a body says about its model. Other fields are checked when the model is known."""

    model: Any = None
    name: Any = None
    stream: Any = None
    keep_alive: Any = None
    prompt: Any = None
    messages: Any = None

    @property
    def model_name(self) -> str | None:
        """Return the model's name; None = none was given."""
        given = self.model or self.name
        return given if isinstance(given, str) else None

    def kept_s(self) -> float | None:
        """Return how long the model stays after the request; None = as configured. Errors: HttpError 400."""
        if self.keep_alive is None:
            return None
        try:
            return keep_alive_s(self.keep_alive)
        except ValueError as error:
            raise HttpError(400, str(error), param="keep_alive") from None


_decoder = msgspec.json.Decoder(Asked)


async def read_asked(request: Request) -> Asked:
    """Return what a body says about its model, or `?model=` without a body.

    A body that is no object says nothing; its handler refuses it.
    """

    def read() -> Asked:
        try:
            return _decoder.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return Asked()

    if not request.body:
        (name,) = parse_qs(request.query.decode("latin-1")).get("model", [None])[:1]
        return Asked(name)
    return read() if len(request.body) <= _LONG_BYTES else await asyncio.to_thread(read)


class _Dialect(NamedTuple):
    """stream_type: content type. sign: bytes that clients skip. wrap: an answer's body as the end of a begun stream."""

    stream_type: bytes
    sign: bytes
    wrap: Callable[[bytes], bytes]


_OPENAI = _Dialect(EVENT_STREAM, b": keep-alive\n\n", lambda body: b"data: %b\n\ndata: [DONE]\n\n" % body)
_OTHERS: dict[Callable[[HttpError], bytes], _Dialect] = {
    messages.error_body: _Dialect(
        EVENT_STREAM, b'event: ping\ndata: {"type":"ping"}\n\n', lambda body: b"event: error\ndata: %b\n\n" % body
    ),
    ollama.error_body: _Dialect(b"application/x-ndjson", b"", lambda body: body.rstrip(b"\n") + b"\n"),
}


async def wait_for_model(request: Request, asked: Asked, loaded: "asyncio.Future[None]") -> None:
    """Wait until a model is loaded. Errors: HttpError of the future; 499 if the caller leaves."""
    dialect = _OTHERS.get(request.error_body, _OPENAI)
    body = None if request.row is None else request.row.body  # a response in the background has no row
    fields = () if body is None else body.__struct_fields__
    by_default = request.error_body is ollama.error_body
    is_streamed = "stream" in fields and (asked.stream is True or (asked.stream is None and by_default))
    request.exchange.on_left = lambda: _leave(loaded)
    pause_s = HEAD_S
    while not loaded.done():
        await asyncio.wait([loaded], timeout=pause_s)
        if is_streamed and not loaded.done():
            if pause_s == HEAD_S:
                head = [(b"content-type", dialect.stream_type), (b"cache-control", b"no-cache")]
                request.exchange.begin([*head, (b"x-accel-buffering", b"no"), *request.answer_headers])
                request.exchange.wrap_whole = dialect.wrap
            request.exchange.write(b"" if pause_s == HEAD_S else dialect.sign)
            pause_s = KEEP_ALIVE_S
    request.exchange.on_left = None
    loaded.result()


def _leave(loaded: "asyncio.Future[None]") -> None:
    if not loaded.done():
        loaded.set_exception(HttpError(499, "the caller has left"))
