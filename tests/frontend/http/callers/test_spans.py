"""Spans, as a collector receives them: OTLP over HTTP, decoded with OpenTelemetry's own types."""

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ipc.errors import ConfigError
from tests.frontend.http.caller import Caller, serving
from tools.commands import http as options

PATIENCE_S = 30.0
FAKE = (
    "--executor",
    "fake",
    "--executor-option",
    "vocab_size=1000",
    "--executor-option",
    "max_model_len=4096",
    "--max-num-seqs",
    "1",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

collected = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.sdk.trace")


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it is sent. answers: it answers while this is set."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = collected.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        assert isinstance(self.server, Collector)
        for resource in request.resource_spans:
            self.server.resources.append({one.key: one.value.string_value for one in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.server.answers.wait(PATIENCE_S)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.02,))
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Caller]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with serving(*FAKE, "--otlp-traces-endpoint", collector.url) as caller:
            yield caller


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def wait_for(collector: Collector, count: int) -> list[Any]:
    end = time.monotonic() + PATIENCE_S
    while len(collector.spans) < count:
        assert time.monotonic() < end, collector.spans
        time.sleep(0.02)
    return collector.spans


def test_each_request_has_a_span_with_vllms_names(traced: Caller, collector: Collector) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "temperature": 0.5, "n": 2, "ignore_eos": True}
    begin = time.time_ns()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "request-1"}
    assert traced.post("/v1/completions", body, headers).status == 200
    assert traced.post("/v1/completions", {"prompt": [1], "max_tokens": -1}).status == 400
    assert traced.get("/health").status == 200
    span, refused = wait_for(collector, 2)
    found = attributes(span)
    assert (span.name, span.kind, span.status.code) == ("llm_request", 2, 0)  # a server's
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert begin < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    times = {name.removeprefix("gen_ai.latency."): found.pop(name) for name in list(found) if ".latency." in name}
    assert abs(times["e2e"] - took_s) < 1e-6
    assert 0 < times["time_to_first_token"] <= times["e2e"]
    assert 0 <= times["time_in_queue"] < times["e2e"]
    parts = times["time_in_model_prefill"] + times["time_in_model_decode"]
    assert times["time_in_model_inference"] == pytest.approx(parts, abs=1e-6)
    assert found == {
        "gen_ai.request.id": "request-1",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.n": 2,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 18,
        "gen_ai.usage.num_sequences": 2,
        "engine_core.cached_tokens": 0,
        "engine_core.num_engines": 1,
        "engine_core.num_preemptions": 0,
        "engine_core.end": "finished",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert [event.name for event in span.events][:2] == ["queued", "scheduled"]
    assert all(span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano for event in span.events)
    assert (refused.status.code, refused.parent_span_id) == (2, b"")  # an error, of no other span
    assert attributes(refused)["http.response.status_code"] == 400
    assert collector.resources[0]["service.name"] == "engine-core"


def test_a_collector_that_does_not_answer_delays_nothing(traced: Caller, collector: Collector) -> None:
    collector.answers.clear()
    before = len(collector.spans)
    for _ in range(5):
        begin = time.monotonic()
        assert traced.post("/v1/completions", {"prompt": [5], "max_tokens": 2}).status == 200
        assert time.monotonic() - begin < PATIENCE_S / 3
        wait_for(collector, before + 1)
    collector.answers.set()


def test_what_is_wrong_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as http://127"):
        options.otlp_endpoint("127.0.0.1:4318")
    monkeypatch.setattr(options, "_has_open_telemetry", lambda: False)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk .*with its extra \[otel\]"):
        options.otlp_endpoint("http://127.0.0.1:4318/v1/traces")
    assert options.otlp_endpoint(None) is None
