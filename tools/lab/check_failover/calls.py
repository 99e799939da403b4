"""Requests to an OpenAI-compatible service, and what came of each: text, end and the time of each piece.

A service may send anything: every answer is bounded in bytes and in time, and is text to compare, nothing else. What
is shown of it is escaped, so that it cannot control a terminal.
"""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from ipc.errors import ConfigError, EngineCoreError
from ipc.wire.messages import DECODE_ERRORS

_MAX_LINE_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 4 << 20
_MAX_ERROR_CHARS = 200
_PROBE_TOKENS = 1
_PROBE_EVERY_S = 0.05
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}


class ServiceError(EngineCoreError):
    """The service cannot be checked: it does not answer undisturbed, or the kill command failed."""


class _Part(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Part | None = None
    message: _Part | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """An answer, or an event of a stream: the fields that are compared. Others are passed over."""

    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Request(NamedTuple):
    """One request of the check."""

    api: str  # chat | completions
    is_streamed: bool
    is_seeded: bool  # drawn with a temperature and a seed; else greedy
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What kind of request it is, in words."""
        words = self.api, "streamed" if self.is_streamed else "whole", "seeded" if self.is_seeded else "greedy"
        return " ".join(words)


class Received(NamedTuple):
    """What came of a request. Times are of the monotonic clock, in seconds."""

    text: str
    finish: str  # finish_reason; "" = the answer did not end
    error: str  # why there is no more; "" = nothing was wrong
    begin: float
    times: Sequence[float]  # of the pieces of a stream
    end: float


class Service:
    """Where the service is, and the key that it wants. Errors: ConfigError, for a URL or a key that is none."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r:.200}: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.username or parts.query:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000; got {url!r:.200}")
        self._is_secure = parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        if not (key.isascii() and key.isprintable()):  # an error of http.client would show it
            raise ConfigError("OPENAI_API_KEY has characters that no header can have")
        self._fields = {"content-type": "application/json"}
        if key:
            self._fields["authorization"] = f"Bearer {key}"

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """Return a connection, not yet open."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout)

    def send(self, connection: http.client.HTTPConnection, api: str, body: Mapping[str, Any]) -> None:
        """Send a request. Errors: OSError, http.client.HTTPException."""
        connection.request("POST", self._base + _PATHS[api], json.dumps(body).encode(), self._fields)

    def first_model(self, patience: float) -> str:
        """Return the name of the first model that the service lists. Errors: ServiceError."""
        with contextlib.closing(self.connection(patience)) as connection:
            try:
                connection.request("GET", f"{self._base}/models", headers=self._fields)
                data = connection.getresponse().read(_MAX_LINE_BYTES)
                return msgspec.json.decode(data, type=_Models).data[0].id
            except (OSError, http.client.HTTPException, IndexError, *DECODE_ERRORS) as error:
                text = f"{self._base}/models lists no model ({str(error)!r:.{_MAX_ERROR_CHARS}}): name one with --model"
                raise ServiceError(text) from None


class Call:
    """A request on a connection and a thread of its own. on_news is called, in that thread, whenever there is more."""

    def __init__(self, service: Service, request: Request, patience: float, on_news: Callable[[], None]) -> None:
        self._service, self._request, self._on_news = service, request, on_news
        self._connection = service.connection(patience)
        self._peer: socket.socket | None = None
        self._texts, self.times = list[str](), list[float]()
        self._finish = self._error = ""
        self._num_bytes = 0
        self._begin = time.monotonic()
        self._end: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return self._end is None

    def join(self, deadline: float) -> Received:
        """Wait for the end, until this time of the monotonic clock at most, and return what came."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._error = self._error or "it did not end in time"
            self.cut()
        end = time.monotonic() if self._end is None else self._end
        return Received("".join(self._texts), self._finish, self._error, self._begin, self.times, end)

    def cut(self) -> None:
        """Give the request up."""
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._connection.connect()
            self._peer = self._connection.sock  # http.client drops it as soon as an answer has begun that ends with it
            self._service.send(self._connection, self._request.api, self._request.body)
            response = self._connection.getresponse()
            if response.status != 200:
                detail = response.read(_MAX_LINE_BYTES).decode(errors="replace")
                self._error = f"status {response.status}: {detail!r:.{_MAX_ERROR_CHARS}}"
            elif self._request.is_streamed:
                self._read_events(response)
            else:
                self._take(response.read(_MAX_ANSWER_BYTES))
        except (OSError, http.client.HTTPException, *DECODE_ERRORS) as error:
            self._error = self._error or f"{type(error).__name__}: {str(error)!r:.{_MAX_ERROR_CHARS}}"
        finally:
            self._connection.close()
            self._end = time.monotonic()
            self._on_news()

    def _read_events(self, response: http.client.HTTPResponse) -> None:
        # http.client ends the lines of a cut chunked answer as those of a whole one, so the end is the finish_reason.
        while line := response.readline(_MAX_LINE_BYTES):
            self._num_bytes += len(line)
            if self._num_bytes > _MAX_ANSWER_BYTES or not line.endswith(b"\n"):
                self._error = "the connection ended inside a line, or the answer is too long"
                return
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                self._take(data)
                if self._error:
                    return

    def _take(self, data: bytes) -> None:
        answer = msgspec.json.decode(data, type=_Answer)
        if bytes(answer.error) != b"null":
            self._error = f"error {bytes(answer.error).decode(errors='replace')!r:.{_MAX_ERROR_CHARS}}"
        for choice in answer.choices[:1]:
            part = choice.delta or choice.message or _Part()
            text = (choice.text or "") + (part.reasoning_content or "") + (part.content or "")
            self._finish = choice.finish_reason or self._finish
            if text:
                self._texts.append(text)
                self.times.append(time.monotonic())
                self._on_news()


def wait_until_back(service: Service, request: Request, patience: float) -> float | None:
    """Ask again and again for one token; return when an answer came, by the monotonic clock; None = it did not."""
    deadline = time.monotonic() + patience
    body = {**request.body, "max_tokens": _PROBE_TOKENS, "stream": False}
    probe = Request(request.api, False, request.is_seeded, body)
    while (now := time.monotonic()) < deadline:
        got = Call(service, probe, deadline - now, lambda: None).join(deadline)
        if got.finish and not got.error:
            return got.end
        time.sleep(_PROBE_EVERY_S)
    return None
