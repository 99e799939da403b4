"""What callers see while a model loads."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from frontend.http.errors import HttpError
from frontend.http.many import waiting
from frontend.http.many.waiting import Asked, read_asked, wait_for_model
from frontend.http.request import Request
from frontend.http.routes import ROUTES
from frontend.http.wire.exchange import Exchange, Message, NoWire


def request_of(path: str, sent: list[Message], body: bytes = b"") -> Request:
    async def send(message: Message) -> None:
        sent.append(message)

    exchange = Exchange({"http_version": "1.1", "method": "POST", "headers": []}, send, NoWire())
    request = Request("POST", path, path.encode(), b"", {}, exchange, num_hosts=0)
    request.row = next(row for row in ROUTES if row.path == path)
    request.error_body, request.body = request.row.error_body, body
    return request


def run(
    path: str,
    asked: Asked,
    end: Callable[[Request, "asyncio.Future[None]"], None],
    monkeypatch: pytest.MonkeyPatch,
    num_first: int = 0,
) -> list[Any]:
    """The messages until a model is loaded, a moment after the first `num_first`, or after the begin."""
    monkeypatch.setattr(waiting, "HEAD_S", 0.001)
    monkeypatch.setattr(waiting, "KEEP_ALIVE_S", 0.002)
    sent = list[Message]()

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        request, loaded = request_of(path, sent), loop.create_future()

        def look() -> None:
            if len(sent) >= num_first:
                loop.call_later(0.02, end, request, loaded)
            else:
                loop.call_later(0.001, look)

        look()
        try:
            await wait_for_model(request, asked, loaded)
        except HttpError as error:
            await request.exchange.send_whole(error.status, [], request.error_body(error))

    asyncio.run(wait())
    return sent


def loads(request: Request, loaded: "asyncio.Future[None]") -> None:
    loaded.set_result(None)


def fails(request: Request, loaded: "asyncio.Future[None]") -> None:
    loaded.set_exception(HttpError(503, "no memory"))


def leaves(request: Request, loaded: "asyncio.Future[None]") -> None:
    request.exchange.leave()


@pytest.mark.parametrize(
    ("path", "asked", "kind", "sign", "end"),
    [
        ("/v1/chat/completions", Asked(stream=True), b"text/event-stream", b": keep-alive\n\n", b"data: [DONE]\n\n"),
        ("/v1/messages", Asked(stream=True), b"text/event-stream", b"event: ping\n", b"}}\n\n"),
        ("/api/chat", Asked(), b"application/x-ndjson", b"", b'{"error":"no memory"}\n'),
    ],
)
def test_a_stream_begins_early_and_has_signs(
    path: str, asked: Asked, kind: bytes, sign: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *signs, last = run(path, asked, fails, monkeypatch, num_first=4 if sign else 1)
    assert head["status"] == 200
    assert dict(head["headers"])[b"content-type"].startswith(kind)
    assert (len(signs) >= 3) is bool(sign)
    assert all(one["body"].startswith(sign) and one["more_body"] for one in signs)
    assert (last["body"].endswith(end), b"no memory" in last["body"], last["more_body"]) == (True, True, False)


@pytest.mark.parametrize(("path", "asked"), [("/v1/completions", Asked()), ("/v1/embeddings", Asked(stream=True))])
def test_other_answers_wait_in_silence(path: str, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(path, asked, loads, monkeypatch) == []
    assert [one.get("status") for one in run(path, asked, fails, monkeypatch)] == [503, None]


def test_a_caller_that_leaves_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    run("/v1/completions", Asked(), leaves, monkeypatch)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 1}', b"[" * 5000, b"\xff", b'{"model": "x\xff"}'])
def test_a_body_without_a_name_says_nothing(body: bytes) -> None:
    assert asyncio.run(read_asked(request_of("/v1/completions", [], body))).model_name is None


def test_a_long_body_is_read() -> None:
    body = b'{"prompt": "%b", "model": "m", "keep_alive": "5m"}' % (b"x" * 100_000)
    asked = asyncio.run(read_asked(request_of("/v1/completions", [], body)))
    assert (asked.model_name, asked.kept_s()) == ("m", 300)
