"""Request and Response: one HTTP request as handlers see it, and an answer that is complete at once."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from frontend.http.connection import Connection
from frontend.http.errors import Headers, HttpError
from frontend.http.keys import Key

JSON = b"application/json"
_T = TypeVar("_T")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_DEADLINE_HEADER = b"x-deadline-ms"
_MAX_DEADLINE_MS = 2**40
#: Errors of a typed JSON decoder on hostile bytes. DecodeError includes ValidationError.
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)
_PLACE = re.compile(r" - at `\$\.?([A-Za-z_0-9]+)?.*`$")

Send = Callable[[Any], Coroutine[Any, Any, None]]
Receive = Callable[[], Awaitable[Any]]


class Response(NamedTuple):
    """An answer with its whole body."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()


class Request:
    """One HTTP request. `key` is that of the caller; `target` is what follows the path of a route that ends in "/"."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.num_hosts = sum(name == b"host" for name, _ in scope["headers"])
        self.connection: Connection = scope["extensions"]["engine_core.connection"]
        self.receive, self.send = receive, send
        self.received_at = time.monotonic()
        given = self.headers.get(b"x-request-id", b"")
        self.id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self.body = b""
        self.key: Key | None = None
        self.answer_headers: Headers = [(b"x-request-id", self.id.encode())]
        self.target = ""

    def decode(self, decoder: "msgspec.json.Decoder[_T]") -> _T:
        """Return the body as the decoder's type. Errors: HttpError 400 that names the field."""
        try:
            return decoder.decode(self.body)
        except msgspec.ValidationError as error:
            text = str(error)
            place = _PLACE.search(text)
            raise HttpError(400, text, param=place[1] if place else None) from None
        except _DECODE_ERRORS as error:
            raise HttpError(400, f"the body is not valid JSON: {error}") from None

    def deadline_s(self) -> float | None:
        """Return the seconds in which the caller wants the answer; None = any. Errors: HttpError 400."""
        given = self.headers.get(_DEADLINE_HEADER)
        if given is None:
            return None
        if not given.isdigit() or not 0 < int(given[:16]) <= _MAX_DEADLINE_MS:
            raise HttpError(400, f"x-deadline-ms must be a whole number of milliseconds above 0; got {given!r:.40}")
        return int(given[:16]) / 1000
