"""Spans: an OpenTelemetry span for each request for tokens, made at its end (the extra [otel]); off by default.

The names of spans and attributes are vLLM's. A caller's `traceparent` is the parent. Everything happens in the HTTP
server's process; the engine is not involved. A thread sends them in batches; if they are not accepted, those beyond
2,048 are dropped, and the server continues.
"""

import threading
import time
from typing import Any

from frontend.client.request_events import RequestEvent, time_in_queue
from frontend.http.replies.reply import Part, Reply
from frontend.http.request import Request
from ipc.version import NAME, VERSION
from ipc.wire.scheduling_messages import EventKind

_FLUSH_S = 1.0  # time for the last spans when the server ends
_NS = 1_000_000_000
_PARENT_FIELDS = ("traceparent", "tracestate")


class Spans:
    """The spans of one server. endpoint: URL of a collector's OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.

    OpenTelemetry's environment variables set everything else: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        # Imported here: only this option needs them.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = Resource.create().attributes.get(SERVICE_NAME, "")
        is_named = isinstance(given, str) and not given.startswith("unknown_service")
        resource = Resource.create() if is_named else Resource.create({SERVICE_NAME: NAME})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(NAME, VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._model = model

    def write(self, request: Request, status: int, reply: Reply | None, now: float) -> None:
        """Make the span of a request that has ended. now: monotonic seconds. Requests that do not ask for tokens have
        none.
        """
        if reply is None and (request.method != "POST" or status < 400):
            return
        ended = time.time_ns()
        began = ended - int((now - request.received_at) * _NS)
        given = request.headers
        fields = {name: given[name.encode()].decode("latin-1") for name in _PARENT_FIELDS if name.encode() in given}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(fields),
            kind=self._kind,
            start_time=began,
            attributes={
                "gen_ai.request.id": request.id,
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.latency.e2e": now - request.received_at,
                "http.route": request.route,
                "http.response.status_code": status,
            },
        )
        if reply is not None:
            span.set_attributes(reply_attributes(reply))
            for event, offset_s in first_events(reply):
                span.add_event(event.kind.name.lower(), timestamp=began + int(offset_s * _NS))
        if status >= 400:
            span.set_status(self._failed)
        span.end(ended)

    def close(self) -> None:
        """Send waiting spans for a short time, and stop the thread."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)


def reply_attributes(reply: Reply) -> dict[str, Any]:
    """Return a span's attributes for an answer's tokens and times. Times are in seconds; those that are unknown are
    left out.
    """
    found: dict[str, Any] = {
        "gen_ai.usage.prompt_tokens": reply.usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": reply.usage.completion_tokens,
        "gen_ai.usage.num_sequences": sum(len(part.state.completions) for part in reply.parts),
        "engine_core.cached_tokens": reply.usage.cached_tokens,
        "engine_core.end": reply.cause,
    }
    last = reply.parts[0].last if reply.parts else None
    first_token_at = reply.first_token_at or (0.0 if last is None else last.first_token_time)
    if first_token_at:
        found["gen_ai.latency.time_to_first_token"] = first_token_at - reply.request.received_at
    if reply.parts:
        found |= _part_attributes(reply.parts[0])
    return found


def _part_attributes(part: Part) -> dict[str, Any]:
    """Return the attributes of one engine request: the first one represents several."""
    params, progress = part.params, part.last
    found: dict[str, Any] = {"gen_ai.request.n": params.n, "gen_ai.request.top_p": params.top_p}
    found["gen_ai.request.temperature"] = params.temperature
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if progress is None:
        return found
    found["engine_core.num_preemptions"] = sum(event.kind is EventKind.PREEMPTED for event in progress.events)
    queued = [event for event in progress.events if event.kind is EventKind.QUEUED and event.choice == 0]
    found["engine_core.num_engines"] = len(queued)  # more than one: the others have died
    queued_s = time_in_queue(progress.events)
    if queued_s is not None:
        found["gen_ai.latency.time_in_queue"] = queued_s
    if queued_s is not None and progress.first_token_time:
        scheduled = progress.arrival_time + queued_s
        found["gen_ai.latency.time_in_model_prefill"] = max(0.0, progress.first_token_time - scheduled)
        found["gen_ai.latency.time_in_model_decode"] = progress.last_token_time - progress.first_token_time
        found["gen_ai.latency.time_in_model_inference"] = max(0.0, progress.last_token_time - scheduled)
    return found


def first_events(reply: Reply) -> list[tuple[RequestEvent, float]]:
    """Return the scheduler's events of an answer's first request, with seconds since it was received.

    Only those of the first engine that had it: clocks of engines may differ.
    """
    progress = reply.parts[0].last if reply.parts else None
    if progress is None or not progress.events:
        return []
    first, found = progress.events[0], []
    offset_s = progress.arrival_time - reply.request.received_at
    for event in progress.events:
        if event.kind is EventKind.QUEUED and event.choice == first.choice and event is not first:
            break
        found.append((event, offset_s + event.time - first.time))
    return found
