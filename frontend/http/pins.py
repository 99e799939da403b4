"""Pins of HTTP requests: what headers and fields ask the engine to keep of a prompt. docs/http.md lists them."""

from bisect import bisect_left
from collections.abc import Sequence

from frontend.http.bodies import SamplingFields
from frontend.http.errors import HttpError
from frontend.http.request import Request
from ipc.errors import InvalidRequestError
from ipc.wire.pin_messages import MAX_PIN_TTL_MS, Pin, check_pin_name

SESSION_HEADER, TTL_HEADER = b"x-session", b"x-session-ttl"
#: Seconds for which a session's prompt is kept after its last request, if x-session-ttl does not say it.
DEFAULT_TTL_S = 3600
#: What a name in the header may not have: the separators of parameters, of lists, and of paths to /v1/sessions/{name}.
_SEPARATORS = frozenset(";,/")
_RETENTIONS = {"24h": 24 * 3600 * 1000}
_NOT_PINNED = ("in_memory", "in-memory")  # kept as long as there is room, as every prompt is


def pins_of(request: Request, body: SamplingFields) -> tuple[Pin, ...]:
    """Return the pins that a request's headers and fields ask for. Errors: HttpError 400 that names them."""
    name, retention = request.headers.get(SESSION_HEADER), body.prompt_cache_retention
    if name is None and retention is None:  # as nearly always
        return ()
    pins = []
    if name is not None:
        session = session_name(name.decode("utf-8", "replace"))
        if set(session) & _SEPARATORS:
            raise HttpError(400, "x-session is one name, without ; and , and /; its time is the header x-session-ttl")
        pins.append(Pin(session, ttl_ms_of(request.headers.get(TTL_HEADER)), is_required=True))
    if retention is not None and retention not in _NOT_PINNED:
        if retention not in _RETENTIONS:
            text = f"prompt_cache_retention must be in_memory or 24h, got {retention!r:.40}"
            raise HttpError(400, text, param="prompt_cache_retention")
        key = body.prompt_cache_key or ""
        pins.append(Pin(session_name(key) if key else "", _RETENTIONS[retention]))
    return tuple(pins)


def session_name(name: str) -> str:
    """Return the name of a session, checked. Errors: HttpError 400."""
    try:
        check_pin_name(name)
    except InvalidRequestError as error:
        raise HttpError(400, str(error)) from None
    return name


def ttl_ms_of(given: bytes | float | None) -> int:
    """Return a time in ms from one in seconds, of a header or a body. Errors: HttpError 400."""
    try:
        seconds = DEFAULT_TTL_S if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= MAX_PIN_TTL_MS / 1000:
        most = MAX_PIN_TTL_MS // 1000
        raise HttpError(400, f"the time of a session must be from 0.001 to {most} seconds, got {given!r:.40}")
    return int(seconds * 1000)


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many first entries two sequences of one type have in common; of texts, characters."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])
