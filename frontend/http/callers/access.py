"""Access: check a request's host, its key and the key's rights, before its body is read."""

import re

from frontend.http.callers.keys import Key, KeyRing
from frontend.http.errors import HttpError
from frontend.http.process.options import HttpOptions
from frontend.http.request import Request

#: Names of this machine in a Host header. Another name means that a browser was led here by a foreign name (DNS
#: rebinding).
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
#: uri-host [":" port] of RFC 9110, 7.2, which may be empty; the content of brackets, and whether the host exists, is
#: not checked.
_HOST = re.compile(rb"(?:\[[A-Za-z0-9.:%~_-]*\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::[0-9]*)?")

#: Names of header fields, with commas between them.
_FIELD_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
#: Headers that scripts may read.
_EXPOSED = (
    b"access-control-expose-headers",
    b"x-request-id, retry-after, retry-after-ms, x-should-retry, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens",
)


def check_host(request: Request, options: HttpOptions) -> None:
    """Check the Host header, including its name if the server listens on this machine only.

    Errors: HttpError 400, 421.
    """
    if request.num_hosts > 1:
        raise HttpError(400, "a request must have exactly one Host header")
    if not _HOST.fullmatch(request.headers.get(b"host", b"")):
        raise HttpError(400, "the Host header is not the name or address of a host, with or without a port")
    if not options.checks_host:
        return
    host = request.headers.get(b"host", b"").decode("latin-1").lower()
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
    if request.num_hosts and name not in _LOCAL and name not in options.allowed_hosts:
        raise HttpError(421, f"this server is not {name!r:.80}; other names need --allowed-hosts")


def find_key(request: Request, ring: KeyRing) -> Key | None:
    """Return the caller's key; None if the server has none. Errors: HttpError 401."""
    if ring.is_empty:
        return None
    scheme, _, secret = request.headers.get(b"authorization", b"").partition(b" ")
    given = secret.strip() if scheme.lower() == b"bearer" else b""
    given = given or request.headers.get(b"x-api-key", b"").strip()
    key = ring.find(given) if given else None
    if key is None:
        text = "the key is unknown" if given else "a key is needed: Authorization: Bearer KEY"
        raise HttpError(401, text, code="invalid_api_key", headers=[(b"www-authenticate", b"Bearer")])
    return key


def origin_headers(request: Request, options: HttpOptions) -> list[tuple[bytes, bytes]]:
    """Return the headers that let a browser show the answer to a page of an allowed origin; usually none."""
    origin = request.headers.get(b"origin")
    if origin is None or not options.allowed_origins:
        return []
    if "*" not in options.allowed_origins and origin.decode("latin-1") not in options.allowed_origins:
        return []
    return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED]


def preflight_headers(request: Request) -> list[tuple[bytes, bytes]]:
    """Return the headers that a page of an allowed origin may send: all that it asks for (Fetch standard, 4.8).

    Clients add their own, such as x-stainless-* and anthropic-version, so a list of names would be out of date.
    """
    asked = request.headers.get(b"access-control-request-headers", b"").strip()
    allowed = asked if _FIELD_NAMES.fullmatch(asked) else b"authorization, content-type, x-api-key, x-request-id"
    return [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", allowed),
        (b"access-control-max-age", b"600"),
    ]
