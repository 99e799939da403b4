"""The metrics of an engine as Prometheus reads them: names, labels, buckets, values."""

from collections.abc import Iterator

import pytest
from msgspec.structs import fields
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from core.border.meter import RequestMeter
from frontend.metrics.collector import COUNTERS, GAUGES, Sighted, families
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, ErrorCode, ModelInformation, RequestFailed, Statistics
from ipc.wire.metrics_messages import STEP_TOKEN_BOUNDS, Histogram

MODEL = ModelInformation(0, "m", "ab", "L2", "fake", "float32", 1000, [2], 4096, 8, 512, 101, 16, True)
STATISTICS = Statistics(
    **{field.name: 10 * number for number, field in enumerate(fields(Statistics)) if field.type is int}
    | {"num_blocks": 101, "num_free_blocks": 75, "num_scheduled_tokens": 5000},
    step_tokens=[1, 2] + [0] * 11 + [3],
    num_accepted_tokens_per_pos=[5, 4],
)


def sighted() -> Sighted:
    """An engine that has refused a request: every family has a sample."""
    meter = RequestMeter(MODEL.max_model_len)
    refused = RequestFailed(1, ErrorCode.RESOURCE_EXHAUSTED, "")
    meter.note_request(1, AddRequest(1, b"", SamplingParams(), 0), refused, 0.0)
    return Sighted(MODEL, STATISTICS, meter.metrics(0, 3), epoch=2, version="1.2", age=0.5)


class Fixed(Collector):
    def collect(self) -> Iterator[Metric]:
        yield Metric("engine_core_up", "", "gauge")
        yield from families(sighted())


def text() -> str:
    registry = CollectorRegistry()
    registry.register(Fixed())
    return generate_latest(registry).decode()


def exposed() -> dict[str, set[str]]:
    """Sample name -> its labels, as Prometheus reads the page."""
    found: dict[str, set[str]] = {"engine_core_up": set()}
    for family in text_string_to_metric_families(text()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def values() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text())
        for sample in family.samples
    }


LABELS = (("engine", "0"), ("model_name", "m"))


def test_counters_and_gauges_have_the_engines_numbers() -> None:
    found = values()
    for name, (field, _) in COUNTERS.items():
        assert found[f"{name}_total", LABELS] == getattr(STATISTICS, field), name
    for name, (field, _) in GAUGES.items():
        assert found[name, LABELS] == getattr(STATISTICS, field), name
    assert found["vllm:kv_cache_usage_perc", LABELS] == pytest.approx(0.25)
    assert found["engine_core_epoch", LABELS] == 2
    assert found["engine_core_sessions", LABELS] == 3
    refused = (("engine", "0"), ("model_name", "m"), ("reason", "RESOURCE_EXHAUSTED"))
    assert found["engine_core_refused_total", refused] == 1


def test_a_histogram_is_cumulative_and_has_its_sum() -> None:
    found = values()
    name = "vllm:iteration_tokens_total"
    bounds = [*map(str, map(float, STEP_TOKEN_BOUNDS)), "+Inf"]
    counts = [found[f"{name}_bucket", tuple(sorted((*LABELS, ("le", bound))))] for bound in bounds]
    assert counts == [1] + [3] * 12 + [6]
    assert found[f"{name}_count", LABELS] == 6
    assert found[f"{name}_sum", LABELS] == 5000


def test_an_engine_of_an_earlier_minor_has_no_step_histogram() -> None:
    """step_tokens is empty there; the page is made all the same."""
    old = sighted()._replace(statistics=Statistics(0, *range(16)))
    (histogram,) = [one for one in families(old) if one.name == "vllm:iteration_tokens_total"]
    assert histogram.samples[-2].value == 0


@pytest.mark.parametrize(
    ("counts", "median", "last"), [([0, 0, 0], None, None), ([3, 1, 0], 0.5, 1.0), ([0, 0, 4], 1.0, 1.0)]
)
def test_a_quantile_is_the_bound_of_its_bucket(counts: list[int], median: float | None, last: float | None) -> None:
    histogram = Histogram([0.5, 1.0], counts, 0.0)
    assert (histogram.quantile(0.5), histogram.quantile(1.0)) == (median, last)
