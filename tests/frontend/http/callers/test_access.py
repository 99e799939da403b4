"""Who may: the routing table without a key, keys and their limits, hosts and origins."""

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.http.callers.access_log import AccessLog
from frontend.http.callers.keys import Key, KeyRing, digest_of, read_keys
from frontend.http.callers.meter import HttpMeter
from frontend.http.callers.quotas import Quotas
from frontend.http.errors import HttpError
from frontend.http.request import Request
from frontend.http.route import Access
from frontend.http.routes import ROUTES
from ipc.errors import ConfigError
from ipc.keys.bucket import Bucket
from tests.frontend.http.caller import Caller, serving, wait_for

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def line(name: str, secret: str, limits: str = "") -> str:
    return f"{name} {digest_of(secret)} {limits}\n"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Caller, Path]]:
    """A server with keys, on the fake executor without a tokenizer, and its keys file."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(
        "# a comment\n"
        + line("alice", "secret-a")
        + line("bob", "secret-b", "models=small max_tokens=5 min_priority=0")
        + line("carol", "secret-c", "rpm=3")
        + line("dave", "secret-d")
    )
    options = (
        "--executor",
        "fake",
        "--api-key-file",
        str(path),
        "--served-model-name",
        "large",
        "small",
        "--access-log",
    )
    with serving(*options) as caller:
        yield caller, path


def ids(secret: str, served: Caller, **fields: Any) -> int:
    return served.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, **fields}, bearer(secret)).status


def test_every_operation_of_the_description_without_a_key(keyed: tuple[Caller, Path]) -> None:
    """The document that the table makes says which operations need a key, and each of those answers 401 without."""
    served, _ = keyed
    assert served.get("/openapi.json").status == 401
    paths = served.get("/openapi.json", bearer("secret-a")).json["paths"]
    assert len(paths) > 20
    for path, operations in paths.items():
        for method, operation in operations.items():
            body = b"{}" if method == "post" else None
            answer = served.call(method.upper(), path.replace("{name}", "large"), body)
            assert (answer.status == 401) == bool(operation["security"]), (method, path, answer.status)


def test_every_route_without_a_key(keyed: tuple[Caller, Path]) -> None:
    served, _ = keyed
    opened = {route.path for route in ROUTES if route.access is Access.OPEN}
    assert opened == {"/health", "/ping", "/live", "/ready", "/", "/page/{name}"}
    for route in ROUTES:
        path = route.path + "large" if route.path.endswith("/") and len(route.path) > 1 else route.path
        path = path.replace("/page/{name}", "/page/page.css")
        for headers in ({}, bearer("wrong"), bearer(""), {"x-api-key": "wrong"}, {"authorization": "Basic x"}):
            answer = served.call(route.method, path, b"{}" if route.method == "POST" else None, headers)
            if route.access is Access.OPEN:
                assert answer.status == 200, path
                continue
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.json["error"]  # Ollama's is a text
            assert isinstance(error, str) or error["type"] in ("AuthenticationError", "authentication_error"), path
        for other in (f"/{path}", f"{path}/", path.replace("/", "%2f"), path.upper(), f"{path};x", f"/.{path}"):
            if other not in {route.path for route in ROUTES}:
                assert served.call(route.method, other, b"{}" if route.method == "POST" else None).status in (
                    400,
                    401,
                    404,
                )


def test_a_key_is_known_by_both_headers(keyed: tuple[Caller, Path]) -> None:
    served, _ = keyed
    assert served.get("/v1/models", bearer("secret-a")).status == 200
    assert served.get("/v1/models", {"authorization": "bearer secret-a"}).status == 200
    assert served.get("/v1/models", {"x-api-key": "secret-a"}).status == 200


def test_a_keys_limits(keyed: tuple[Caller, Path]) -> None:
    served, _ = keyed
    assert [card["id"] for card in served.get("/v1/models", bearer("secret-b")).json["data"]] == ["small"]
    assert ids("secret-a", served, model="large") == 200
    assert ids("secret-b", served, model="large") == 403
    assert ids("secret-b", served, model="small") == 200
    assert ids("secret-b", served, model="none") == 404
    assert ids("secret-b", served, max_tokens=6) == 403
    assert ids("secret-b", served, priority=-1) == 403
    assert ids("secret-b", served, priority=1) == 200


def test_a_quota_is_429_with_the_time_to_wait(keyed: tuple[Caller, Path]) -> None:
    served, _ = keyed
    assert [ids("secret-c", served) for _ in range(4)] == [200, 200, 200, 429]
    answer = served.post("/v1/completions", {"prompt": [5]}, bearer("secret-c"))
    assert answer.json["error"]["type"] == "RateLimitError"
    assert 1 <= int(answer.headers["retry-after"]) <= 20
    assert answer.headers["x-ratelimit-limit-requests"] == "3"
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"


def test_the_file_is_read_again(keyed: tuple[Caller, Path]) -> None:
    served, path = keyed
    before = path.read_text()
    assert ids("new", served) == 401
    path.write_text(before + line("new", "new"))
    wait_for(lambda: ids("new", served) == 200)
    path.write_text("this is no keys file\n")
    time.sleep(1.5)
    assert ids("new", served) == 200  # the keys stay as they were
    path.write_text(before)
    wait_for(lambda: ids("new", served) == 401)
    assert ids("secret-a", served) == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
    ],
)
def test_the_host_is_this_machine(served: Caller, host: str, status: int) -> None:
    assert served.get("/v1/models", {"host": host}).status == status


def test_a_request_has_one_host(served: Caller) -> None:
    answer = served.raw(b"GET /live HTTP/1.1\r\nhost: localhost\r\nhost: other\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("target", [b"GET /live", b"GET /v1/models", b"POST /v1/completions", b"OPTIONS /", b"GET /no"])
def test_a_request_of_http_1_1_has_a_host(served: Caller, target: bytes) -> None:
    answer = served.raw(target + b" HTTP/1.1\r\n\r\nGET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Host header" in answer
    assert b"HTTP/1.1 200 " not in answer  # the connection is closed
    assert served.raw(b"GET /live HTTP/1.0\r\n\r\n").split(b"\r\n", 1)[0].endswith(b" 200 OK")


@pytest.mark.parametrize("host", ["a b", "a/b", "u@localhost", "localhost:80:80", "localhost:x", "[::1", "\xe9"])
def test_a_host_has_the_form_of_one(served: Caller, host: str) -> None:
    answer = served.raw(b"GET /live HTTP/1.1\r\nconnection: close\r\nhost: %b\r\n\r\n" % host.encode("latin-1"))
    assert answer.startswith(b"HTTP/1.1 400 "), answer


def test_no_origin_is_allowed_unless_asked_for(served: Caller) -> None:
    answer = served.get("/v1/models", {"origin": "http://page.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert served.call("OPTIONS", "/v1/models", None, {"origin": "http://page.example"}).status == 405


def test_other_machines_need_keys() -> None:
    from tools.cli import main

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        assert main(["serve", "--executor", "fake", "--http", "0.0.0.0:0"]) == 1
    finally:
        for number, handler in handlers.items():  # the command's own, which it takes early
            signal.signal(number, handler)


@pytest.mark.parametrize(
    "text",
    [
        "alice",
        "alice 12",
        f"alice {'x' * 64}",
        line("a", "b", "rpm=x"),
        line("a", "b", "rpm=--5"),  # ended the server, as did the next one
        line("a", "b", "tpm=\N{SUPERSCRIPT TWO}"),
        line("a", "b", "rpm=0"),  # meant no limit, as did the next one
        line("a", "b", "rpm=-5"),
        line("a", "b", "speed=3"),
        line("a", "b") * 2,
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"line|hex|taken") as error:
        read_keys(str(path))
    assert hashlib.sha256(b"b").hexdigest() not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(path=str(tmp_path / "none"))


def test_a_missing_file_keeps_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(line("a", "b"))
    ring = KeyRing(path=str(path))
    os.unlink(path)
    ring.refresh()
    assert ring.find(b"b") is not None
    assert not ring.is_empty


def test_buckets_are_exact() -> None:
    """10,000 arrivals in 10 minutes: never more than the size and what has refilled."""
    now, taken = 0.0, 0
    bucket = Bucket(60, now)
    for step in range(10_000):
        now = step * 0.06
        if not bucket.wait_s(1, now):
            bucket.take(1, now)
            taken += 1
        assert taken <= 60 + now + 1e-6
    assert 655 <= taken <= 660


def test_quotas_give_back_what_was_not_used() -> None:
    clock = [0.0]
    quotas = Quotas(lambda: clock[0])
    key = Key("k", b"", concurrent=2, tpm=100)
    lease = quotas.begin(key)
    lease.reserve(90)
    other = quotas.begin(key)
    with pytest.raises(HttpError) as full:
        other.reserve(20)
    assert full.value.status == 429
    other.end()
    lease.end(10)
    lease.end(10)  # counts once
    first, second = quotas.begin(key), quotas.begin(key)
    first.reserve(20)
    second.reserve(20)
    for too_many in (quotas.begin, quotas.check):
        with pytest.raises(HttpError) as many:
            too_many(key)
        assert many.value.status == 429
    with pytest.raises(HttpError) as never:
        second.check_tokens(101)
    assert never.value.status == 403
    second.end(20)
    first.end(20)
    clock[0] = 60.0
    quotas.check(key)
    quotas.begin(key).reserve(100)


def test_a_key_with_other_limits_keeps_what_runs() -> None:
    quotas = Quotas(lambda: 0.0)
    lease = quotas.begin(Key("k", b"", concurrent=1))
    with pytest.raises(HttpError):
        quotas.begin(Key("k", b"", concurrent=1, rpm=9))
    lease.end()
    quotas.begin(Key("k", b"", concurrent=1, rpm=9))


def test_the_keys_name_is_the_tenant(keyed: tuple[Caller, Path]) -> None:
    """So no key sees what is in the prefix cache of another, whatever salt its caller sends."""
    served, _ = keyed

    def cached(secret: str, **fields: Any) -> int:
        body = {"prompt": list(range(1000, 1064)), "max_tokens": 1, **fields}
        answer = served.post("/v1/completions", body, bearer(secret))
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("secret-a") == 0
    assert cached("secret-a") >= 32
    assert cached("secret-d") == 0
    assert cached("secret-d", cache_salt="alice") == 0
    assert cached("secret-d", cache_salt="alice") >= 32
    assert cached("secret-a", cache_salt="alice") == 0


def test_the_access_log_has_a_line_for_each_request(keyed: tuple[Caller, Path]) -> None:
    served, _ = keyed
    assert served.process.stderr is not None
    fd = served.process.stderr.fileno()
    os.set_blocking(fd, False)
    found = b""

    def logged(*parts: str) -> bool:
        nonlocal found
        with contextlib.suppress(BlockingIOError):
            found += os.read(fd, 1 << 20)
        return any(all(part in text for part in parts) for text in found.decode().splitlines())

    assert not logged("log1")  # the lines of earlier tests are taken, which may have filled the pipe
    served.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3}, {**bearer("secret-a"), "x-request-id": "log1"})
    served.call("GET", "/nothing/here?secret", None, {"x-request-id": "log2"})
    served.post("/v1/completions", {"prompt": [5], "stream": 5}, {**bearer("secret-a"), "x-request-id": "log3"})
    wait_for(
        lambda: logged(
            "engine-core: http POST route=/v1/completions status=200",
            "request_id=log1 key=alice end=finished",
            "prompt_tokens=2",
            "completion_tokens=3",
        )
    )
    wait_for(lambda: logged("http GET route=none status=404", "request_id=log2"))
    wait_for(lambda: logged("status=400", "request_id=log3 key=alice"))
    assert b"nothing/here" not in found


def test_unknown_fields_and_metrics(keyed: tuple[Caller, Path]) -> None:
    served, _ = keyed
    for _ in range(2):
        assert ids("secret-a", served, vibe="good") == 200
    answer = served.get("/metrics", bearer("secret-a"))
    assert answer.status == 200
    page = answer.body.decode()
    assert "engine_core_http_unknown_fields_total 2.0" in page
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}' in page
    assert 'http_request_duration_seconds_bucket{handler="/v1/completions",le="+Inf"' in page
    assert "vllm:num_requests_running" in page
    assert "vllm:e2e_request_latency_seconds_count" in page
    assert "engine_core_up 1.0" in page


def test_a_log_that_nobody_reads_is_dropped() -> None:
    reader, writer = os.pipe()
    try:
        log = AccessLog("json", writer)
        for _ in range(1000):
            log.write(_request(), 404, None)
        assert log.num_dropped > 0
        first = json.loads(os.read(reader, 1 << 16).splitlines()[0])
    finally:
        os.close(reader)
        os.close(writer)
    assert first["message"] == "http GET"
    assert (first["route"], first["status"], first["request_id"]) == ("none", 404, "r-1")


def _request() -> Request:
    unused: Any = None
    return Request("GET", "/x", b"/x", b"", {b"x-request-id": b"r-1"}, unused, num_hosts=1)


def test_field_names_are_logged_once_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    meter = HttpMeter()
    for index in range(300):
        meter.count_fields(json.dumps({"known": 1, f"f{index % 200}": 2, "x" * 200: 3}).encode(), ("known",))
    assert meter.num_unknown_fields == 600
    assert len(caplog.records) == 100
    assert all(len(record.getMessage()) < 140 for record in caplog.records)
