"""App: the ASGI application. It finds the route, judges the caller, reads the body and writes the answer.

An answer of tokens is a Reply: the pump writes it, and the task of its request only waits for the peer to leave.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.http.access import check_host, find_key, origin_headers
from frontend.http.answer_format import json_bytes
from frontend.http.errors import HttpError, http_error
from frontend.http.openapi import describe
from frontend.http.reply import Reply
from frontend.http.request import JSON, Receive, Request, Response, Send
from frontend.http.routes import ROUTES, Access, Route
from frontend.http.service import Service

_PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, POST"),
    (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, x-deadline-ms"),
]
_log = logging.getLogger("engine_core.http")


class App:
    """The application of one service. A path has to be written as in the table: no other spelling is that route."""

    def __init__(self, service: Service, routes: Sequence[Route] = ROUTES) -> None:
        self._service = service
        service.description = json_bytes(describe(routes))
        self._methods: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._methods.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        try:
            answer = await self._answer(request)
        except Exception as error:
            failure = http_error(error, max_model_len=self._service.max_model_len)
            if failure.status == 500:
                _log.exception("request %s failed", request.id)
            answer = Response(failure.body(), failure.status, headers=failure.headers)
        if isinstance(answer, Reply):
            await _wait_for_end(answer, receive)
        else:
            await _write(request, answer)

    async def _answer(self, request: Request) -> Response | Reply:
        service = self._service
        check_host(request, service.options)
        request.answer_headers += origin_headers(request, service.options)
        if request.method == "OPTIONS" and len(request.answer_headers) > 1:
            return Response(b"", 204, headers=_PREFLIGHT)
        route = self._route(request)
        if route.access is Access.KEY:
            request.key = find_key(request, service.keys)
        if route.method == "POST":
            _check_content_type(request)
        request.body = await _read_body(request)
        return await route.handler(self._service, request)

    def _route(self, request: Request) -> Route:
        """Return the request's route. Errors: HttpError 404, 405."""
        path = request.raw_path.decode("ascii")
        methods = self._methods.get(path)
        if methods is None:
            methods, request.target = self._prefixed(request.path)
        if methods is None:
            raise HttpError(404, f"no route {path!r:.200}")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = ", ".join(methods)
            raise HttpError(405, f"{request.path} takes {allowed}", headers=[(b"allow", allowed.encode())])
        return methods[method]

    def _prefixed(self, path: str) -> tuple[dict[str, Route] | None, str]:
        """Return the routes whose path ends in "/" and begins this one, and the rest of it."""
        for known, methods in self._methods.items():
            if known.endswith("/") and len(known) > 1 and path.startswith(known) and len(path) > len(known):
                return methods, path[len(known) :]
        return None, ""


def _check_content_type(request: Request) -> None:
    """Take JSON only: what a browser sends to other sites without asking is of another type."""
    given = request.headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
    if given != JSON:
        raise HttpError(415, f"the content type must be application/json; got {given.decode('latin-1')!r:.80}")


async def _read_body(request: Request) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise HttpError(408, "the peer left before its request was complete")
        parts.append(message["body"])
        if not message["more_body"]:
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _wait_for_end(reply: Reply, receive: Receive) -> None:
    """Wait until the reply is written, or its peer has left."""
    while not reply.is_ended:
        message = await receive()
        if message["type"] == "http.disconnect":
            reply.end("disconnected")


async def _write(request: Request, answer: Response) -> None:
    headers = [
        (b"content-type", answer.content_type),
        (b"content-length", b"%d" % len(answer.body)),
        *request.answer_headers,
        *answer.headers,
    ]
    await request.send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await request.send({"type": "http.response.body", "body": answer.body})
