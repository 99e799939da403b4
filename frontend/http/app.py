"""App: the application behind all connections. It finds the route, checks the caller, and sends complete answers.

An answer of tokens is a Reply, which the pump writes without waiting here.
"""

import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from frontend.http.callers.access import check_host, find_key, origin_headers, preflight_headers
from frontend.http.errors import HttpError, http_error
from frontend.http.hints import hint
from frontend.http.intake import Intake
from frontend.http.pages.openapi import describe
from frontend.http.replies.answer_format import json_bytes
from frontend.http.replies.reply import Reply
from frontend.http.request import JSON, Request, Response, WrittenAnswer
from frontend.http.route import Access, Route
from frontend.http.routes import ROUTES
from frontend.http.served import Served
from frontend.http.service import MODEL_NOT_FOUND, Service
from frontend.http.wire.exchange import Exchange, Message, Receive, Send

_NAMED = re.compile(r"\{[a-z]+\}")  # a part of a path that is not fixed
_log = logging.getLogger("engine_core.http")


class Consumed(Protocol):
    """The memory of a body (frontend/http/wire/held_bodies.py)."""

    def consume(self, num_bytes: int) -> None:
        """Stop counting bytes that were read."""


class App:
    """The application of one server. A path must be spelled as in the table."""

    def __init__(self, served: Served, routes: Sequence[Route] = ROUTES) -> None:
        self._served, self._shared = served, served.shared
        served.description = json_bytes(describe(routes, self._shared.options.root_path))
        self._methods: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._methods.setdefault(route.path, {})[route.method] = route
        self._with_target: list[tuple[re.Pattern[str], dict[str, Route]]] = []  # those that end in "/" last
        for path, methods in sorted(self._methods.items(), key=lambda one: "{name}" not in one[0]):
            if "{" in path:
                self._with_target.append((re.compile(_NAMED.sub("([^/]+)", path)), methods))
            elif path.endswith("/") and len(path) > 1:
                self._with_target.append((re.compile(f"{path}(.+)", re.DOTALL), methods))
        self._num_requests = 0  # being handled
        self._intake = Intake()

    @property
    def is_idle(self) -> bool:
        """Return whether no request is being handled; replies are the pump's."""
        return not self._num_requests

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI). The pump writes an answer of tokens, whose end is awaited."""
        state = scope["state"]
        exchange = Exchange(scope, send, state["wire"])
        request = Request.of(scope, exchange)
        try:
            try:
                answer = await self._result(request, receive, state["body"])
            finally:
                state["body"].release()
            if isinstance(answer, Response):
                fields = [(b"content-type", answer.content_type), *request.answer_headers, *answer.headers]
                await exchange.send_whole(answer.status, fields, answer.body)
                self._note(request, answer)
            elif isinstance(answer, Reply):
                await _until_end(answer, receive)
            elif isinstance(answer, WrittenAnswer):
                await answer.write()
        finally:
            request.end()

    def _note(self, request: Request, answer: Response | Reply) -> None:
        """Count and log a request that has ended."""
        if request.service is None:  # it was refused before that
            self._shared.note(request, answer, time.monotonic())
        else:
            request.service.note(request, answer)

    async def _result(
        self, request: Request, receive: Receive, body: Consumed
    ) -> Response | Reply | WrittenAnswer | None:
        """Return the answer to a request; None if its body does not arrive, or its peer has left."""
        try:
            self._judge(request)
        except HttpError as error:
            return _failure(request, error)
        assert request.row is not None, request.path
        if request.row.is_upload:
            request.parts = _parts(request, receive, body)
        elif not await _read_body(request, receive):
            return None
        if request.row.access is not Access.OPEN:
            await self._intake.turn(len(request.body))
        if request.exchange.has_left:
            return None
        self._num_requests += 1
        try:
            answer = await self._handle(request.row, request)
        except Exception as error:
            answer = self._failed(request, error)
        finally:
            self._num_requests -= 1
        request.body = b""
        if isinstance(answer, Reply):
            self._attend(request, answer)
        elif request.lease is not None:
            request.lease.end()
        return answer

    def _failed(self, request: Request, error: Exception) -> Response:
        """Return the answer to an error of a handler.

        Not in _result(): as one of its variables, the answer's error would be in a cycle with its own traceback, which
        keeps all that the handler read until a full garbage collection.
        """
        assert request.row is not None, request.path
        length = 0 if request.service is None else request.service.max_model_len
        failure = http_error(error, max_model_len=length, prompt_param=_prompt_field(request.row))
        if failure.status == 500:
            _log.exception("request %s failed", request.id)
        return _failure(request, failure)

    async def _handle(self, row: Route, request: Request) -> Response | Reply | WrittenAnswer:
        """Return the handler's answer, if the key's quota and the body's size allow it."""
        if row.method == "POST":
            request.lease = self._shared.quotas.begin(request.key)
        if row.is_of_server:
            answer: Response | Reply | WrittenAnswer = await row.handler(self._served, request)
            return answer
        service = request.service = await self._served.service_for(request)
        if row.method == "POST":
            await service.check_size(request)
        return await self._answer(service, row, request)

    def _attend(self, request: Request, reply: Reply) -> None:
        """Register a reply's end, and end it when its peer leaves."""
        reply.on_closed = lambda: self._note(request, reply)
        if reply.is_ended:
            reply.on_closed()
        elif request.exchange.has_left:
            reply.leave()
        else:
            request.exchange.on_left = reply.leave

    def _judge(self, request: Request) -> None:
        """Check a request's headers: host, route, key, content type. Errors: HttpError."""
        shared = self._shared
        request.meter = shared.meter
        check_host(request, shared.options)
        request.answer_headers += origin_headers(request, shared.options)
        if request.method == "OPTIONS" and len(request.answer_headers) > 1:
            request.row = _PREFLIGHT_ROUTE
            return
        row = request.row = self._route(request)
        request.route, request.error_body = row.path, row.error_body
        if row.access is Access.KEY:
            request.key = request.key or find_key(request, shared.keys)
            if row.method == "POST":
                shared.quotas.check(request.key)
        if row.method == "POST":
            self._served.standing.refuse_requests()
            _check_content_type(request)
            _check_encoding(request)

    async def _answer(self, service: Service, row: Route, request: Request) -> Response | Reply | WrittenAnswer:
        """Return the handler's answer. An unknown model may be an adapter that was just loaded."""
        await service.adapters.catch_up()
        try:
            answer: Response | Reply | WrittenAnswer = await row.handler(service, request)
        except HttpError as error:
            before = service.adapters.names
            if error.code == MODEL_NOT_FOUND:
                await service.adapters.look()
            if service.adapters.names == before:
                raise
            answer = await row.handler(service, request)
        return answer

    def _route(self, request: Request) -> Route:
        """Return the request's route. Errors: HttpError 404, 405."""
        path = request.raw_path.decode("ascii")
        methods = self._methods.get(path)
        if methods is None:
            methods, request.target = self._prefixed(request.path)
        elif path.endswith("/") and len(path) > 1:  # the part after it is missing
            methods = None
        if methods is None:
            raise HttpError(404, f"no route {path!r:.200}{hint(path, self._methods)}")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = ", ".join(methods)
            raise HttpError(405, f"{request.path} takes {allowed}", headers=[(b"allow", allowed.encode())])
        return methods[method]

    def _prefixed(self, path: str) -> tuple[dict[str, Route] | None, str]:
        """Return the routes with a target that have this path, and the target."""
        for pattern, methods in self._with_target:
            if (found := pattern.fullmatch(path)) is not None:
                return methods, "/".join(found.groups())
        return None, ""


#: Headers that browsers send with a POST from a page. curl and other programs send none of them.
_OF_PAGES = (b"origin", b"sec-fetch-site")


def _check_content_type(request: Request) -> None:
    """Accept only JSON from web pages: a browser sends other types to other sites without asking.

    Programs may name another type, or none: `curl -d` sends JSON as a form, and so do users of Ollama.
    """
    given = request.headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
    if given != JSON and any(name in request.headers for name in _OF_PAGES):
        kind = given.decode("latin-1")
        raise HttpError(415, f"a page must send JSON with content-type: application/json; got {kind!r:.80}")


def _check_encoding(request: Request) -> None:
    """Accept only bodies that are not compressed: the size of a compressed one does not show the memory that it takes.

    With a transfer encoding whose last part is not "chunked" the body has no end: the parser of the headers refuses
    that.
    """
    given = request.headers.get(b"content-encoding", b"identity").strip().lower()
    encodings = request.headers.get(b"transfer-encoding", b"").lower()
    *others, last = encodings.split(b",")
    if given not in (b"identity", b""):
        raise HttpError(415, f"bodies are not decompressed here: send it without {given.decode('latin-1')!r:.40}")
    if others and last.strip() == b"chunked":
        raise HttpError(
            415, f"bodies are not decompressed here: send it chunked; got {encodings.decode('latin-1')!r:.40}"
        )


async def _answer_preflight(served: Served, request: Request) -> Response:
    """Allow requests from a page of an allowed origin."""
    return Response(b"", 204, headers=preflight_headers(request))


_PREFLIGHT_ROUTE = Route("OPTIONS", "*", _answer_preflight, Access.OPEN, is_of_server=True)


async def _read_body(request: Request, receive: Receive) -> bool:
    """Read the whole body; return whether it arrived."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return False
        parts.append(message["body"])
        if not message.get("more_body"):
            request.body = parts[0] if len(parts) == 1 else b"".join(parts)
            request.exchange.is_received = True
            return True


async def _parts(request: Request, receive: Receive, body: Consumed) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive. Errors: HttpError 499 if its peer leaves."""
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            raise HttpError(499, "the caller has left")
        has_more = message.get("more_body", False)
        body.consume(len(message["body"]))
        yield message["body"]
    request.exchange.is_received = True


async def _until_end(reply: Reply, receive: Receive) -> None:
    """Wait until a reply has ended and its last part was sent, or its peer has left."""
    while (await receive())["type"] != "http.disconnect":
        continue
    reply.leave()


def _prompt_field(row: Route) -> str | None:
    """Return the field of a route's body with the prompt, for errors about the prompt."""
    fields = () if row.body is None else row.body.__struct_fields__
    return next((name for name in ("input", "prompt", "messages") if name in fields), None)


def _failure(request: Request, error: HttpError) -> Response:
    return Response(request.error_body(error), error.status, headers=error.headers)
