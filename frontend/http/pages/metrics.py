"""/metrics: the engine's measurements and this server's own, for Prometheus (the extra [metrics])."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from frontend.http.callers.meter import BUCKETS
from frontend.http.errors import HttpError
from frontend.http.request import Request, Response
from frontend.http.service import Service

_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_LABELS = ["handler", "method", "status"]


async def get_metrics(service: Service, request: Request) -> Response:
    """Return all metrics as text. A scrape waits for the engine at most half a second, on a separate thread."""
    service.check_model(request, None)
    if service.scrape is None:
        service.scrape = _make_scrape(service)
    return Response(await asyncio.to_thread(service.scrape), content_type=_TYPE)


def _make_scrape(service: Service) -> Callable[[], bytes]:
    """Return the function that makes the page. Errors: HttpError 501 without prometheus_client."""
    try:
        from prometheus_client import generate_latest

        from frontend.metrics.collector import EngineCollector, registry_of
    except ModuleNotFoundError:
        text = "metrics need prometheus_client: pip install prometheus_client, or engine-core with its extra [metrics]"
        raise HttpError(501, text) from None
    engine = EngineCollector(lambda: service.engine.client, owns_session=False)
    registry = registry_of(engine, _collector(service))
    return lambda: generate_latest(registry)


def _collector(service: Service) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector

    class HttpCollector(Collector):
        """The metrics of this server. `handler` is a row of the routing table, never a caller's path."""

        def collect(self) -> Iterator[Metric]:
            requests = CounterMetricFamily("http_requests", "Requests by route.", labels=_LABELS)
            seconds = HistogramMetricFamily(
                "http_request_duration_seconds", "From the head of a request to the end of its answer.", labels=_LABELS
            )
            for labels, found in service.meter.durations():
                counts = list(found.counts)
                requests.add_metric(labels, sum(counts))
                sums = [sum(counts[: index + 1]) for index in range(len(counts))]
                bounds = [*map(str, BUCKETS), "+Inf"]
                seconds.add_metric(labels, list(zip(bounds, sums, strict=True)), found.total_s)
            yield requests
            yield seconds
            unknown = CounterMetricFamily("engine_core_http_unknown_fields", "Fields of bodies that have no effect.")
            unknown.add_metric([], service.meter.num_unknown_fields)
            yield unknown
            streams = GaugeMetricFamily("engine_core_http_replies", "Answers in progress.")
            streams.add_metric([], len(service.pump.replies))
            yield streams
            events = CounterMetricFamily("engine_core_http_events", "Choices that had news, over all wake-ups.")
            events.add_metric([], service.pump.num_events)
            yield events

    return HttpCollector()
