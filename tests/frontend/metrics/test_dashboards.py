"""Every metric and label that a dashboard or an alert uses is one that the page has: ours, and vLLM's public ones."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.metrics.test_families import exposed

pytestmark = pytest.mark.checkout  # dashboards/

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "dashboards" / "engine-core.json"
ALERTS = ROOT / "dashboards" / "alerts.yml"

#: What the dashboards in vLLM's repository ask for, as of its version 0.33; their variables as Grafana fills them in.
VLLM_EXPRESSIONS = (
    'histogram_quantile(0.99, sum by(le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name="m"}[1m])))',
    "rate(vllm:e2e_request_latency_seconds_sum[1m]) / rate(vllm:e2e_request_latency_seconds_count[1m])",
    'rate(vllm:prompt_tokens_total{model_name="m"}[1m])',
    'rate(vllm:generation_tokens_total{model_name="m"}[1m])',
    'histogram_quantile(0.99, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket{model_name="m"}[1m])))',
    'rate(vllm:inter_token_latency_seconds_sum{model_name="m"}[1m])',
    'rate(vllm:inter_token_latency_seconds_count{model_name="m"}[1m])',
    'vllm:num_requests_running{model_name="m"}',
    'vllm:num_requests_waiting{model_name="m"}',
    'histogram_quantile(0.5, sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{model_name="m"}[1m])))',
    'rate(vllm:time_to_first_token_seconds_sum{model_name="m"}[1m])',
    'rate(vllm:time_to_first_token_seconds_count{model_name="m"}[1m])',
    'vllm:kv_cache_usage_perc{model_name="m"}',
    'sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="m"}[1m]))',
    'sum by(le) (increase(vllm:request_generation_tokens_bucket{model_name="m"}[1m]))',
    'sum by(finished_reason) (increase(vllm:request_success_total{model_name="m"}[1m]))',
    'rate(vllm:request_queue_time_seconds_sum{model_name="m"}[1m])',
    'rate(vllm:request_prefill_time_seconds_sum{model_name="m"}[1m])',
    'rate(vllm:request_decode_time_seconds_sum{model_name="m"}[1m])',
    'rate(vllm:request_inference_time_seconds_count{model_name="m"}[1m])',
    'rate(vllm:request_max_num_generation_tokens_sum{model_name="m"}[1m])',
    "rate(vllm:prefix_cache_hits_total[1m]) / rate(vllm:prefix_cache_queries_total[1m])",
    "increase(vllm:num_preemptions_total[1m])",
    "histogram_quantile(0.9, sum by(le) (rate(vllm:iteration_tokens_total_bucket[1m])))",
    "histogram_quantile(0.9, sum by(le) (rate(vllm:request_time_per_output_token_seconds_bucket[1m])))",
    "rate(vllm:spec_decode_num_accepted_tokens_total[1m]) / rate(vllm:spec_decode_num_draft_tokens_total[1m])",
    "1 + rate(vllm:spec_decode_num_accepted_tokens_total[1m]) / rate(vllm:spec_decode_num_drafts_total[1m])",
    "sum by(position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total[1m]))",
    'sum by(block_size, num_gpu_blocks) (vllm:cache_config_info{engine="0"})',
)

_WORDS = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_FUNCTIONS = {"histogram_quantile", "sum", "by", "rate", "increase", "changes", "label_values", "and"}


def used(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield (metric, labels asked of it) for each metric in an expression; labels of `by` are asked of all."""
    grouped = {label for part in re.findall(r"by\s*\(([^)]*)\)", expression) for label in _WORDS.findall(part)}
    bare = re.sub(r"by\s*\([^)]*\)", "", re.sub(r"\[[^]]*\]", "", expression))
    if bare.startswith("label_values("):
        name, label = bare.removeprefix("label_values(").rstrip(")").split(", ")
        yield name, {label}
        return
    selectors = {name: set(_WORDS.findall(re.sub(r'"[^"]*"', "", labels))) for name, labels in _SELECTED.findall(bare)}
    for name in _WORDS.findall(re.sub(r"\{[^}]*\}|\"[^\"]*\"", "", bare)):
        if name not in _FUNCTIONS:
            yield name, selectors.get(name, set()) | grouped


_SELECTED = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")


def expressions_of(value: Any) -> Iterator[str]:
    """Yield every expr and query of a dashboard."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("expr", "query") and isinstance(inner, str):
                yield inner
            else:
                yield from expressions_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions_of(inner)


def alert_expressions() -> list[str]:
    return re.findall(r"(?m)^\s+expr: (.*)$", ALERTS.read_text())


def missing(expressions: list[str]) -> list[tuple[str, set[str]]]:
    """Return what these expressions use and no sample has."""
    samples = exposed()
    found = []
    for expression in expressions:
        uses = list(used(expression))
        assert uses, expression
        found += [
            (name, labels) for name, labels in uses if not labels <= samples.get(name, set()) or name not in samples
        ]
    return found


def test_our_dashboard_shows_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = list(expressions_of(dashboard))
    assert len(expressions) > 30
    assert missing(expressions) == []
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_our_alerts_ask_for_what_there_is() -> None:
    assert len(alert_expressions()) == ALERTS.read_text().count("- alert:") > 4
    assert missing(alert_expressions()) == []


def test_vllms_dashboards_find_their_metrics() -> None:
    assert missing(list(VLLM_EXPRESSIONS)) == []


@pytest.mark.parametrize(
    "expression", ["vllm:no_such_metric", 'engine_core_up{no_label="x"}', "sum by(x) (engine_core_up)"]
)
def test_what_is_not_there_is_found_out(expression: str) -> None:
    assert missing([expression])
