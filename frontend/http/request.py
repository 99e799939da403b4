"""Request and Response: one HTTP request for handlers, and a complete answer."""

import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from frontend.http.bodies import ChatBody
from frontend.http.callers.keys import Key
from frontend.http.callers.meter import HttpMeter, known_fields
from frontend.http.callers.quotas import Lease
from frontend.http.errors import Headers, HttpError
from frontend.http.holdings import Held
from frontend.http.route import Route
from frontend.http.whole_numbers import convert, is_of_a_float
from frontend.http.wire.exchange import Exchange, Message
from ipc.wire.lora_messages import AdapterId

JSON = b"application/json"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_DEADLINE_HEADER = b"x-deadline-ms"
_MAX_DEADLINE_MS = 2**40
#: Errors of a typed JSON decoder on hostile bytes. DecodeError includes ValidationError.
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)
_PLACE = re.compile(r" - at `\$\.?([A-Za-z_0-9]+)?.*`$")

_T = TypeVar("_T")

_ID_DIGITS = 32
_ids: list[str] = []  # of new_id(), for the next callers


def new_id() -> str:
    """Return an id that cannot be guessed: 128 random bits as 32 hexadecimal digits. Any thread may call it.

    The system is asked for 128 ids at once, because each question is a system call.
    """
    try:
        return _ids.pop()
    except IndexError:
        digits = os.urandom(128 * _ID_DIGITS // 2).hex()
        first, *others = (digits[at : at + _ID_DIGITS] for at in range(0, len(digits), _ID_DIGITS))
        _ids.extend(others)
        return first


class Breakpoint(NamedTuple):
    """A place up to which a chat's prompt is pinned.

    changed: the chat with other text after this place, from which the place in the prompt is found; None = the end.
    """

    ttl_ms: int
    changed: Callable[[], ChatBody] | None


class Response(NamedTuple):
    """An answer with its whole body."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Sequence[tuple[bytes, bytes]] = ()


class LocalAnswer(NamedTuple):
    """An answer to a caller within the process. headers: names in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class WrittenAnswer:
    """The base of an answer that writes itself, as its peer reads."""

    async def write(self) -> None:
        """Write the answer until its end, or until the peer has left."""
        raise NotImplementedError


def _is_of_a_null(error: msgspec.ValidationError) -> bool:
    """Return whether a null that stands for another type is the reason of an error."""
    return "got `null`" in str(error)


def _without_nulls(body: Any) -> Any:
    """Return a body without the fields that are null: these are as if they were absent."""
    return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class Answering(Protocol):
    """What a request knows of the service that answers it."""

    @property
    def max_model_len(self) -> int:
        """Return the most tokens that a prompt and its output may have together."""

    def note(self, request: "Request", answer: Any) -> None:
        """Count a request that has ended."""


class Request:
    """One HTTP request: its headers, and its body once it is complete.

    headers: by lower-case name; the last of several. client: the caller's address, "" if it has none. key: that of the
    caller. target: the part after the path of a route that ends in "/".
    """

    def __init__(
        self,
        method: str,
        path: str,
        raw_path: bytes,
        query: bytes,
        headers: dict[bytes, bytes],
        exchange: Exchange,
        *,
        num_hosts: int,
        client: str = "",
    ) -> None:
        self.method, self.path, self.raw_path, self.query = method, path, raw_path, query
        self.headers = headers
        self.num_hosts = num_hosts
        self.client = client
        self.exchange = exchange
        self.received_at = time.monotonic()
        given = headers.get(b"x-request-id")
        self.id = given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else new_id()
        self.answer_headers: Headers = [(b"x-request-id", self.id.encode())]
        self.body = b""
        self.parts: AsyncIterator[bytes] | None = None  # of the body, for a route that reads it itself
        self.num_stored_bytes = 0  # of what is stored here and read with the body
        self.row: Route | None = None  # of the routing table
        self.key: Key | None = None  # of the caller; of a batch, before the request begins
        self.lease: Lease | None = None  # of its key's quotas, once it is handled
        self.adapter: AdapterId | None = None  # named by the body's model
        self.breakpoints: Sequence[Breakpoint] = ()  # of its chat; see frontend/http/pins.py
        self.wants_receipts = False  # docs/receipts.md; known once its prompts are prepared
        self.service: Answering | None = None  # of the model, once it is known
        self.on_end: Callable[[], None] | None = None  # called once its answer has ended
        self.held: Held | None = None  # for its prompts, until these are submitted
        self.target = ""
        self.route = ""  # path of the row of the routing table
        self.meter: HttpMeter | None = None
        self.error_body: Callable[[HttpError], bytes] = HttpError.body  # of the route's dialect

    @classmethod
    def of(cls, scope: Message, exchange: Exchange) -> "Request":
        """Return the request of an ASGI scope. A path may start with the root path, depending on the proxy."""
        root, fields = scope["root_path"], scope["headers"]
        path, raw_path = scope["path"].removeprefix(root), scope["raw_path"].removeprefix(root.encode())
        if root and path.startswith(f"{root}/"):
            path, raw_path = path.removeprefix(root), raw_path.removeprefix(root.encode())
        num_hosts = [name for name, _ in fields].count(b"host")
        client = scope["client"][0] if scope["client"] else ""
        query, method = scope["query_string"], scope["method"]
        made = cls(method, path, raw_path, query, dict(fields), exchange, num_hosts=num_hosts, client=client)
        made.key = scope["state"].get("key")
        return made

    def end(self) -> None:
        """Give back what it holds: its model, and the memory of prompts that were not submitted."""
        told, self.on_end = self.on_end, None
        held, self.held = self.held, None
        if held is not None:
            held.give_back()
        if told is not None:
            told()

    def decode(self, decoder: "msgspec.json.Decoder[_T]") -> _T:
        """Return the body as the decoder's type. Errors: HttpError 400 that names the field."""
        try:
            try:
                decoded = decoder.decode(self.body)
            except msgspec.ValidationError as error:
                if not (is_of_a_float(error) or _is_of_a_null(error)):
                    raise
                kind: Any = decoder.type  # a type[_T]; msgspec 0.23 says TypeForm[_T], which convert() does not take
                decoded = convert(_without_nulls(msgspec.json.decode(self.body)), kind)
            if self.meter is not None:
                self.meter.count_fields(self.body, known_fields(decoder))
            return decoded
        except msgspec.ValidationError as error:
            text = str(error)
            place = _PLACE.search(text)
            raise HttpError(400, text, param=place[1] if place else None) from None
        except _DECODE_ERRORS as error:
            raise HttpError(400, f"the body is not valid JSON: {error}") from None

    def deadline_s(self) -> float | None:
        """Return the seconds within which the caller wants the answer; None = any. Errors: HttpError 400."""
        given = self.headers.get(_DEADLINE_HEADER)
        if given is None:
            return None
        if not given.isdigit() or not 0 < int(given[:16]) <= _MAX_DEADLINE_MS:
            raise HttpError(400, f"x-deadline-ms must be a whole number of milliseconds above 0; got {given!r:.40}")
        return int(given[:16]) / 1000
