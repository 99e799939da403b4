"""The benchmarks of HTTP with counts so small that they say nothing, on the fake executor."""

from typing import Any

import pytest

from ipc.options.config import EngineConfig
from tests.fake_options import fake_options
from tools.lab.bench.callers import http, http_model


@pytest.mark.soak  # three engines and three servers
def test_every_cost_of_http_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PACED", ((3, 2000, 10),))
    monkeypatch.setattr(http, "UNPACED", ((2, 30),))
    for name, count in (("_NUM_SHORT", 64), ("_NUM_FIRST", 25), ("_NUM_CLOSED", 3)):
        monkeypatch.setattr(http, name, count)
    config = EngineConfig(executor="fake", executor_options=fake_options(max_model_len=4096), max_num_seqs=32)
    records: dict[str, dict[str, Any]] = {one["workload"]: one for one in http.measure_http(config, rep=0)}
    assert list(records) == [
        f"http {one}" for one in ("paced", "health", "paced again", "unpaced", "short", "first token", "disconnect")
    ]
    assert records["http paced"]["out_tok"] == records["http paced again"]["out_tok"] == 30
    assert 0 < records["http paced"]["events"] <= 30 + 3  # an event for each end
    assert records["http unpaced"]["out_tok"] == 60
    assert records["http short"]["requests"] == 64
    assert records["http health"]["begin_ms"]["asked"] + records["http health"]["steady_ms"]["asked"] > 0
    assert records["http first token"]["us"]["p50"] > 0 < records["http first token"]["client_us"]["p50"]


def test_a_model_over_http_is_compared_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are sent the same number of tokens; each round has prompts of its own, so no cache helps the second."""
    monkeypatch.setattr(http_model, "_ROUNDS", 1)
    monkeypatch.setattr(http_model, "_WORKLOADS", ("lat1", "batch8"))
    asked: list[list[int]] = []
    by_client, over_http = http_model.time_client, http_model.time_http

    def note_client(llm: Any, workload: Any) -> float:
        asked.extend(one.prompt for one in workload.requests)
        return by_client(llm, workload)

    async def note_http(port: int, workload: Any) -> float:
        asked.extend(one.prompt for one in workload.requests)
        return await over_http(port, workload)

    monkeypatch.setattr(http_model, "time_client", note_client)
    monkeypatch.setattr(http_model, "time_http", note_http)
    config = EngineConfig(executor="fake", executor_options=fake_options(max_model_len=4096, vocab_size=49_152))
    records = list(http_model.measure_http_model(config, rep=0))
    assert [(one["workload"], one["requests"], one["out_tok"]) for one in records] == [
        ("http lat1", 1, 128),
        ("http batch8", 8, 1024),
    ]
    assert all(one["ratio"] > 0 for one in records)
    assert len({tuple(prompt) for prompt in asked}) == len(asked) == 4 * (1 + 8)
