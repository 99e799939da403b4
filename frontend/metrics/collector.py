"""EngineCollector: a Prometheus collector that asks an engine for its measurements at each scrape."""

import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.client.client import EngineClient
from frontend.metrics.families import Sighted, families
from ipc.errors import CallFailedError, EngineCoreError
from ipc.wire.messages import ModelInformation
from ipc.wire.metrics_messages import Metrics

_ANSWER_S = 0.25  # in a longer step, this scrape gets the last numbers and their age


class EngineCollector(Collector):
    """The metrics of one engine, for a CollectorRegistry. Scrapes may come from any thread, one after another.

    connect: opens a session with the engine; called at the first scrape, and again after the engine was lost.
    owns_session: whether this collector closes the session.
    """

    def __init__(self, connect: Callable[[], EngineClient], *, owns_session: bool = True) -> None:
        self._connect = connect
        self._owns_session = owns_session
        self._lock = threading.Lock()
        self._client: EngineClient | None = None
        self._model: ModelInformation | None = None
        self._last: tuple[Sighted, float] | None = None  # and when

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics: current ones, or the last ones if the engine does not answer."""
        with self._lock:
            try:
                self._look()
                is_up = True
            except EngineCoreError:
                self._disconnect()
                is_up = False
            last = self._last
        up = GaugeMetricFamily("engine_core_up", "1 while the engine has a session for its metrics.")
        up.add_metric([], float(is_up))
        yield up
        if last is not None:
            yield from families(last[0]._replace(age=time.monotonic() - last[1]))

    def close(self) -> None:
        """End the session. A later scrape opens another."""
        with self._lock:
            self._disconnect()

    def _look(self) -> None:
        """Ask the engine. Errors: those of a lost engine."""
        client = self._client = self._client or self._connect()
        client.raise_if_ended()
        model = self._model = self._model or client.model_information()
        try:
            metrics = client.metrics(_ANSWER_S)
        except CallFailedError:  # of an earlier minor
            metrics = Metrics(0, False)
        try:
            statistics = client.statistics(_ANSWER_S)
        except CallFailedError:
            return
        welcome = client.welcome
        sighted = Sighted(model, statistics, metrics, welcome.epoch, welcome.server_version, 0.0)
        self._last = sighted, time.monotonic()

    def _disconnect(self) -> None:
        if self._client is not None and self._owns_session:
            self._client.close()
        self._client = self._model = None


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """Return a registry with only these collectors."""
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    return registry
