"""/v1/sessions: the named pins of a caller, to look at, release and fork."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from frontend.http.errors import HttpError
from frontend.http.pins import session_name, ttl_ms_of
from frontend.http.replies.answer_format import json_bytes
from frontend.http.request import Request, Response
from frontend.http.service import Service, tenant_of
from ipc.errors import CallFailedError
from ipc.wire.pin_messages import PinState

_Result = TypeVar("_Result")


class ForkBody(msgspec.Struct, kw_only=True):
    """The body of /v1/sessions/{name}/fork. ttl: seconds; None = an hour. model: read by a server with many models."""

    to: str
    ttl: float | None = None
    model: str | None = None


_decoder = msgspec.json.Decoder(ForkBody)


async def list_sessions(service: Service, request: Request) -> Response:
    """Return the caller's pins, and how much it may pin."""
    found = await _call(lambda: service.engine.client.pins(tenant_of(request)))
    body = {
        "object": "list",
        "data": [_shown(one) for one in found.pins],
        "has_more": found.num_left_out > 0,
        "pinned_tokens": found.num_pinned_tokens,
        "max_pinned_tokens": found.max_pinned_tokens,
    }
    return Response(json_bytes(body))


async def release_session(service: Service, request: Request) -> Response:
    """End a session's pin."""
    name = session_name(request.target)
    await _call(lambda: service.engine.client.release_pin(name, tenant_of(request)))
    return Response(json_bytes({"id": name, "object": "session", "released": True}))


async def fork_session(service: Service, request: Request) -> Response:
    """Pin what a session has for another one too."""
    body, name = request.decode(_decoder), session_name(request.target)
    new_name, ttl_ms = session_name(body.to), ttl_ms_of(body.ttl)
    await _call(lambda: service.engine.client.fork_pin(name, new_name, ttl_ms, tenant_of(request)))
    return Response(json_bytes({"id": new_name, "object": "session", "forked_from": name}))


def _shown(pin: PinState) -> dict[str, object]:
    """Return a pin as an object; one without a name has none here either."""
    return {
        "id": pin.name or None,
        "object": "session",
        "pinned_tokens": pin.num_tokens,
        "held_tokens": pin.num_held_tokens,
        "expires_in": pin.left_ms / 1000,
    }


async def _call(ask: Callable[[], _Result]) -> _Result:
    """Return the engine's answer. Errors: HttpError 404 for an unknown pin, 429 if there is no room for one."""
    try:
        return await asyncio.to_thread(ask)
    except CallFailedError as error:
        text = str(error).partition(": ")[2] or str(error)
        if error.code == "PIN_REFUSED":
            raise HttpError(429, text, code="pin_refused") from None
        if error.code == "INVALID_ARGUMENT":
            raise HttpError(404, text) from None
        raise
