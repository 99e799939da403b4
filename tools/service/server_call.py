"""Requests to a running HTTP server, for commands that use its models: call_server, open_server and stream_chat."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any

from ipc.errors import ConfigError, EngineCoreError, PromptTooLongError
from tools.flags.options import ArgumentParser

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 60.0  # a stream has a sign of life every 15 s
_TOO_LONG = "context_length_exceeded"
_JSON = {"content-type": "application/json"}


class ServerError(ConfigError):
    """A server does not answer, or refuses. status: of HTTP; 0 = it does not answer."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Return whether the same request may succeed later: nothing answers, or the server takes no requests now."""
        return self.status in (0, 503)


def add_url(parser: ArgumentParser, default: str | None = DEFAULT_URL, text: str = "the server's address") -> None:
    """Add the flag that names the server."""
    shown = "" if default is None else "; default: %(default)s"
    parser.add_argument("--url", default=default, metavar="URL", help=f"{text}; ENGINE_CORE_API_KEY is its key{shown}")


def call_server(url: str, method: str, path: str, body: object = None) -> Any:
    """Return the JSON of an answer. Errors: those of open_server()."""
    with open_server(url, method, path, None if body is None else json.dumps(body).encode()) as answer:
        try:
            return json.load(answer)
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(f"the answer of {url} cannot be read: {error}") from None


def stream_chat(url: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Yield the events of a chat in OpenAI's form. The server ends the request if the iterator is closed.

    Errors: those of open_server(); ServerError for a stream that breaks.
    """
    with open_server(url, "POST", "/v1/chat/completions", json.dumps(body).encode()) as answer:
        try:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    return
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise _error_of(event, 200, url)
                yield event
        except (OSError, HTTPException, ValueError) as error:
            raise ServerError(f"the stream of {url} broke: {error}") from None
    raise ServerError(f"the stream of {url} ended before the answer did")


def open_server(url: str, method: str, path: str, data: Any, headers: Mapping[str, str] = _JSON) -> HTTPResponse:
    """Return an answer, to be read and closed. data: the body of the request: bytes, an iterable of them, or None.

    Errors: ConfigError for a URL that is none; ServerError for a server that does not answer, or that refuses;
    PromptTooLongError.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must be a URL such as {DEFAULT_URL}; got {url!r:.80}")
    key = os.environ.get("ENGINE_CORE_API_KEY")
    given = {**headers, **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url.rstrip("/") + path, data, given, method=method)
    try:
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise _error_of(_parsed(error.read()), error.code, url) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"no server answers at {url} (`engine-core serve --models`): {reason}") from None
    return answer


def _parsed(body: bytes) -> Any:
    """Return the JSON of a refusal; a text in the same form if it is none, as of a proxy."""
    try:
        return json.loads(body)
    except ValueError:
        return {"error": body.decode(errors="replace")[:200]}


def _error_of(answer: Any, status: int, url: str) -> EngineCoreError:
    """Return the error of a refusal: in OpenAI's form, or a text as in Ollama's."""
    error = answer.get("error") if isinstance(answer, dict) else answer
    text = str(error.get("message") if isinstance(error, dict) else error)
    if isinstance(error, dict) and error.get("code") == _TOO_LONG:
        return PromptTooLongError(text)
    return ServerError(f"{url} answered {status}: {text}" if status != 200 else f"{url}: {text}", status)
