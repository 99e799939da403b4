"""The lines of batch files in OpenAI's format: requests, and their answers.

A request: `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. An answer: `{"id",
"custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
"""

from collections.abc import Sequence

import msgspec

from frontend.http.bodies import Json
from ipc.errors import ConfigError

#: Of requests for tokens, then of requests for vectors and scores.
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
)
MAX_LINE_BYTES = 8 << 20
_MAX_ID_CHARS = 512


class BatchRequest(msgspec.Struct):
    """One line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _BodyHead(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None


_request_decoder = msgspec.json.Decoder(BatchRequest)
_head_decoder = msgspec.json.Decoder(_BodyHead)


def read_line(line: bytes, urls: Sequence[str] = URLS) -> BatchRequest:
    """Return the request of a line. urls: that it may name. Errors: ConfigError."""
    try:
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{len(line)} bytes; at most {MAX_LINE_BYTES} are allowed")
        request = _request_decoder.decode(line)
        head = _head_decoder.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(error)) from None
    if not 0 < len(request.custom_id) <= _MAX_ID_CHARS:
        raise ConfigError(f"a custom_id has 1 to {_MAX_ID_CHARS} characters")
    if request.method != "POST" or request.url not in urls:
        raise ConfigError(f"{request.method} {request.url!r:.80}; known: POST {', '.join(urls)}")
    if head.stream:
        raise ConfigError("an answer in a file is not streamed; leave out stream")
    if head.background:
        raise ConfigError("an answer in a file is whole; leave out background")
    return request


def answer_line(line_id: str, custom_id: str, response: Json | None, error: Json | None = None) -> bytes:
    """Return a line of the output. response: status_code, request_id and body."""
    return msgspec.json.encode({"id": line_id, "custom_id": custom_id, "response": response, "error": error}) + b"\n"


def response_of(status: int, request_id: str, body: bytes) -> Json:
    """Return the `response` of a line. body: JSON."""
    return {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
