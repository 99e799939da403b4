"""EngineCollector: a Prometheus collector that asks an engine for its measurements at each scrape."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from frontend.client.client import EngineClient
from ipc.errors import CallFailedError, EngineCoreError
from ipc.wire.messages import ModelInformation, Statistics
from ipc.wire.metrics_messages import STEP_TOKEN_BOUNDS, Histogram, Metrics

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


# An engine's measurements as Prometheus metrics, under vLLM's names if vLLM has the metric.
#
# Dashboards and alerts are written for names, labels and buckets, so these are an interface: none is renamed or
# removed.


#: Labels of every metric except the info ones, as in vLLM. This engine is number 0: replicas differ by their target.
LABELS = ("model_name", "engine")
_ENGINE = "0"

#: Metric -> (field of Statistics, help). A counter's name is exposed with _total.
COUNTERS: dict[str, tuple[str, str]] = {
    "vllm:num_preemptions": ("num_preemptions", "Preemptions of running requests."),
    "vllm:prompt_tokens": ("num_prompt_tokens", "Prompt tokens of requests that began."),
    "vllm:generation_tokens": ("num_generation_tokens", "Tokens sampled."),
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Tokens looked for in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Rows whose draft tokens a step verified."),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens that steps verified."),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Accepted draft tokens."),
    "engine_core_steps": ("num_steps", "Steps."),
    "engine_core_scheduled_rows": ("num_scheduled_rows", "Rows of all steps; by steps: the mean batch size."),
    "engine_core_recomputed_tokens": ("num_recomputed_tokens", "Tokens computed again after a preemption."),
    "engine_core_swapped_out_blocks": ("num_swapped_out_blocks", "KV blocks copied to the host."),
    "engine_core_swapped_in_blocks": ("num_swapped_in_blocks", "KV blocks copied back from the host."),
    "engine_core_host_hit_blocks": ("num_host_hits", "Evicted KV blocks that came back from the host."),
    "engine_core_fetched_blocks": ("num_fetched_blocks", "KV blocks read from files."),
    "engine_core_stored_blocks": ("num_stored_blocks", "KV blocks written to files."),
    "engine_core_encoder_inputs": ("num_encoder_inputs", "Images encoded."),
    "engine_core_encoder_hits": ("num_encoder_hits", "Images whose embeddings the encoder cache had."),
    "engine_core_pins_refused": ("num_pins_refused", "Pins refused, because of a bound or of the model."),
    "engine_core_pins_yielded": (
        "num_pins_yielded",
        "Pins that gave way to a request that could not run otherwise.",
    ),
    "engine_core_skipped": ("num_skipped", "Times a running request wanted tokens and got none."),
}
GAUGES: dict[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("num_running", "Requests that run."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests that wait."),
    "engine_core_requests_on_hold": ("num_on_hold", "Waiting requests whose client does not read."),
    "engine_core_requests_swapped": ("num_swapped", "Waiting requests with a copy on the host."),
    "engine_core_requests_unbegun": ("num_unbegun", "Waiting requests that do not begin because of a pause."),
    "engine_core_host_blocks": ("num_kept_blocks", "Evicted KV blocks kept on the host."),
    "engine_core_free_blocks": ("num_free_blocks", "Free KV blocks, including cached ones."),
    "engine_core_pins": ("num_pins", "Pinned beginnings of prompts."),
    "engine_core_pinned_blocks": ("num_pinned_blocks", "KV blocks held by pins."),
    "engine_core_max_pinned_blocks": ("max_pinned_blocks", "KV blocks that pins may hold."),
    "engine_core_weights_version": ("weights_version", "Version of the weights in use; 0 = those of the start."),
    "engine_core_sleep_level": ("sleep_level", "0 = awake; 1 = without the KV cache, 2 = without weights too."),
}
_HEAD = "num_head_"


class Sighted(NamedTuple):
    """The last known state of an engine. age: seconds since then."""

    model: ModelInformation
    statistics: Statistics
    metrics: Metrics
    epoch: int
    version: str
    age: float


def families(sighted: Sighted) -> Iterator[Metric]:
    """Yield all metrics of an engine."""
    statistics, model = sighted.statistics, sighted.model
    labels = (model.model_name, _ENGINE)
    for name, (field, text) in COUNTERS.items():
        yield _counter(name, text, labels, getattr(statistics, field))
    for name, (field, text) in GAUGES.items():
        yield _gauge(name, text, labels, getattr(statistics, field))
    usable = max(1, statistics.num_blocks - 1)  # the null block belongs to no request
    yield _gauge(
        "vllm:kv_cache_usage_perc", "Share of KV blocks in use.", labels, 1 - statistics.num_free_blocks / usable
    )
    heads = {name: getattr(statistics, name) for name in Statistics.__struct_fields__ if name.startswith(_HEAD)}
    reasons = {name.removeprefix(_HEAD): value for name, value in heads.items()}
    text = "Steps in which the first waiting request did not start."
    yield _counters("engine_core_head_blocked", text, labels, "reason", reasons)
    text = "Accepted draft tokens, by their position among a row's drafts in a step."
    accepted = {str(place): count for place, count in enumerate(statistics.num_accepted_tokens_per_pos)}
    yield _counters("vllm:spec_decode_num_accepted_tokens_per_pos", text, labels, "position", accepted)
    yield from _of_requests(sighted.metrics, labels)
    yield _step_tokens(statistics, labels)
    yield from _about_the_engine(sighted, labels)


def _of_requests(metrics: Metrics, labels: tuple[str, ...]) -> Iterator[Metric]:
    for name, histogram in metrics.histograms.items():
        yield _histogram(f"vllm:{name}", f"{name.replace('_', ' ').capitalize()}.", labels, histogram)
    if metrics.is_measuring:
        text = "Choices of requests that have ended."
        yield _counters("vllm:request_success", text, labels, "finished_reason", metrics.num_finished)
        text = "Requests refused on arrival."
        yield _counters("engine_core_refused", text, labels, "reason", metrics.num_refused)
        yield _gauge("engine_core_sessions", "Clients.", labels, metrics.num_sessions)


def _step_tokens(statistics: Statistics, labels: tuple[str, ...]) -> Metric:
    bounds = [float(bound) for bound in STEP_TOKEN_BOUNDS]
    counts = statistics.step_tokens or [0] * (len(bounds) + 1)
    histogram = Histogram(bounds, counts, statistics.num_scheduled_tokens)
    return _histogram("vllm:iteration_tokens_total", "Tokens of a step.", labels, histogram)


def _about_the_engine(sighted: Sighted, labels: tuple[str, ...]) -> Iterator[Metric]:
    model = sighted.model
    facts = {
        "version": sighted.version,
        "numerics": model.numerics,
        "executor": model.executor,
        "dtype": model.dtype,
        "fingerprint": model.model_fingerprint,
        "max_model_len": str(model.max_model_len),
        "max_num_seqs": str(model.max_num_seqs),
    }
    yield _info("engine_core_info", "The engine and its model.", labels, facts)
    cache = {
        "block_size": str(model.block_size),
        "num_gpu_blocks": str(model.num_blocks),
        "enable_prefix_caching": str(model.enable_prefix_caching),
    }
    yield _info("vllm:cache_config_info", "The KV cache.", labels, cache)
    yield _gauge("engine_core_epoch", "Restarts of the engine under its owner.", labels, sighted.epoch)
    yield _gauge("engine_core_statistics_age_seconds", "Age of these numbers.", labels, sighted.age)


def _counter(name: str, text: str, labels: Iterable[str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=LABELS)
    family.add_metric(list(labels), value)
    return family


def _counters(name: str, text: str, labels: tuple[str, ...], label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(*LABELS, label))
    for each, value in values.items():
        family.add_metric([*labels, each], value)
    return family


def _gauge(name: str, text: str, labels: Iterable[str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=LABELS)
    family.add_metric(list(labels), value)
    return family


def _info(name: str, text: str, labels: tuple[str, ...], facts: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(*LABELS, *facts))
    family.add_metric([*labels, *facts.values()], 1)
    return family


def _histogram(name: str, text: str, labels: Iterable[str], histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text, labels=LABELS)
    buckets, seen = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), seen))
    family.add_metric(list(labels), buckets, histogram.total)
    return family
