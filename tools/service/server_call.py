"""call_server: one request to a running HTTP server, for commands that use one."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import IO, Any

from ipc.errors import ConfigError
from tools.flags.options import ArgumentParser

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 60.0


class UnreachableError(ConfigError):
    """No server answers, or it takes no requests now: later it may."""


def add_url(parser: ArgumentParser) -> None:
    """Add the flag that names the server."""
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        metavar="URL",
        help="the server's address; ENGINE_CORE_API_KEY is its key; default: %(default)s",
    )


def call_server(url: str, method: str, path: str, body: object = None) -> Any:
    """Return the JSON of an answer. Errors: ConfigError for a server that is not there, or that refuses."""
    data = None if body is None else json.dumps(body).encode()
    with open_server(url, method, path, data, {"content-type": "application/json"}) as answer:
        try:
            return json.load(answer)
        except (OSError, ValueError) as error:
            raise UnreachableError(f"the answer of {url} cannot be read: {error}") from None


def open_server(url: str, method: str, path: str, data: Any, headers: Mapping[str, str]) -> IO[bytes]:
    """Return the body of an answer, to be read and closed. data: the body of the request: bytes, parts, or None.

    Errors: UnreachableError for a server that is not there; ConfigError for one that refuses.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must be a URL such as {DEFAULT_URL}; got {url!r:.80}")
    key = os.environ.get("ENGINE_CORE_API_KEY")
    given = {**headers, **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url.rstrip("/") + path, data, given, method=method)
    try:
        opened: IO[bytes] = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        kind = UnreachableError if error.code == 503 else ConfigError
        raise kind(f"{url} answered {error.code}: {_message(error.read())}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnreachableError(f"no server answers at {url}: {getattr(error, 'reason', error)}") from None
    return opened


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
