"""`serve --metrics`: the page that Prometheus scrapes, of a real engine process, and what a scrape may meet."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from frontend.engine.process import EngineProcess
from frontend.llm import LLM
from frontend.metrics import server as metrics_server
from frontend.metrics.collector import registry_of
from frontend.metrics.server import MetricsServer
from ipc.errors import AddressError, ConfigError, EngineStartError
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from tests.placed import PREFIX
from tests.tools.test_cli import command, environment, serving
from tools.service.metrics import measuring, served_metrics

NUM_REQUESTS, NUM_TOKENS = 5, 12
CONFIG = EngineConfig(executor="fake", request_metrics=True)


def scrape(url: str) -> dict[str, float]:
    """Sample name -> the sum over its labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


@pytest.mark.parametrize(
    "accept",
    ["application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3", "text/plain;version=1.0.0", ""],
)
def test_no_scraper_gets_other_names(accept: str) -> None:
    class Colons(Collector):
        def collect(self) -> Iterator[Metric]:
            yield GaugeMetricFamily("vllm:num_requests_running", "Requests.", 3)

    server = MetricsServer("127.0.0.1:0", registry_of(Colons()))
    try:
        asked = urllib.request.Request(server.url, headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "\nvllm:num_requests_running 3.0\n" in answer.read().decode()
    finally:
        server.close()


def ask(address: str) -> None:
    with LLM(connect=address) as llm:
        prompts = [{"prompt_token_ids": [7, number]} for number in range(NUM_REQUESTS)]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        assert len(llm.generate(prompts, params, use_tqdm=False)) == NUM_REQUESTS


def test_the_page_counts_the_requests_of_all_clients() -> None:
    with EngineProcess(CONFIG) as process, served_metrics("0", lambda: process.address) as url:
        ask(process.address)
        ask(process.address)
        found = scrape(url)
        total = 2 * NUM_REQUESTS
        assert found["engine_core_up"] == 1
        assert found["vllm:request_success_total"] == total
        assert found["vllm:generation_tokens_total"] == total * NUM_TOKENS
        assert found["vllm:time_to_first_token_seconds_count"] == total
        assert found["vllm:inter_token_latency_seconds_count"] == total * (NUM_TOKENS - 1)
        assert found["vllm:request_prompt_tokens_sum"] == found["vllm:prompt_tokens_total"] == 2 * total
        assert found["vllm:iteration_tokens_total_sum"] == 2 * total + total * (NUM_TOKENS - 1)
        assert found["engine_core_sessions"] == 1  # that of the metrics
        process.stop()
        last = scrape(url)
        assert last["engine_core_up"] == 0
        assert last["vllm:request_success_total"] == total  # the last numbers, with their age
        assert last["engine_core_statistics_age_seconds"] > 0


def test_without_request_metrics_there_are_counters_and_no_histograms() -> None:
    with (
        EngineProcess(EngineConfig(executor="fake")) as process,
        served_metrics("0", lambda: process.address) as url,
    ):
        ask(process.address)
        found = scrape(url)
    assert found["vllm:generation_tokens_total"] == NUM_REQUESTS * NUM_TOKENS
    assert "vllm:time_to_first_token_seconds_count" not in found
    assert "vllm:request_success_total" not in found


def test_serve_says_where_its_metrics_are(tmp_path: object) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with serving(f"ipc://{tmp_path}/e", "--metrics", str(port)) as (_, address):
        ask(address)
        assert scrape(f"http://127.0.0.1:{port}/metrics")["vllm:request_success_total"] == NUM_REQUESTS


def test_serve_measures_only_when_asked() -> None:
    assert measuring(None) == {}
    assert measuring("9400") == {"request_metrics": True}
    with served_metrics(None, lambda: "") as url:
        assert url == ""


def test_an_engine_that_starts_is_not_up_yet() -> None:
    def no_engine() -> str:
        raise EngineStartError("not yet")

    with served_metrics("0", no_engine) as url:
        assert scrape(url) == {"engine_core_up": 0.0}


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{PREFIX}frontend.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("prometheus_client", "prometheus_client.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install prometheus_client"), served_metrics("0", lambda: ""):
        pass


# --- the server ---------------------------------------------------------------------------------------------------


class One(Collector):
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("one", "", value=1)


@pytest.fixture(name="server")
def a_server() -> Iterator[MetricsServer]:
    server = MetricsServer(":0", registry_of(One()))
    yield server
    server.close()


def test_only_the_page_is_served(server: MetricsServer) -> None:
    assert scrape(server.url) == {"one": 1.0}
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(server.url.replace("/metrics", "/"), timeout=5)
    refused.value.close()


def test_a_silent_connection_harms_no_scrape(server: MetricsServer) -> None:
    host, port = server.url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"GET /met")
        assert scrape(server.url) == {"one": 1.0}


def test_a_port_in_use_is_said(server: MetricsServer) -> None:
    with pytest.raises(AddressError, match="Address already in use"):
        MetricsServer(server.url.removeprefix("http://").removesuffix("/metrics"), registry_of(One()))


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:", ":99999", "1:2:x"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(AddressError, match="HOST:PORT or PORT"):
        MetricsServer(address, registry_of(One()))


# --- the log ------------------------------------------------------------------------------------------------------


def test_a_json_log_has_one_object_a_line_and_one_line_a_request(tmp_path: Path) -> None:
    address, options = f"ipc://{tmp_path}/e", ("--log-format", "json", "--log-requests")
    with subprocess.Popen(
        command("serve", "--executor", "fake", "--listen", address, *options),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        assert ready["message"].startswith(f"ready at {address} (fake, numerics L2")
        ask(address)
        server.terminate()
        _, errors = server.communicate(timeout=20)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [line["message"] for line in lines].count("draining") == 1
    ended = [line for line in lines if line["message"] == "request ended"]
    assert [line["number"] for line in ended] == list(range(NUM_REQUESTS))
    assert {line["output_tokens"] for line in ended} == {NUM_TOKENS}
    assert all(0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"] for line in ended)
    assert next(line["phase"] for line in lines if line["message"] == "starting") == "listen"


def test_a_name_of_somebody_elses_is_refused_and_slow_peers_print_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_server.RequestHandler, "timeout", 0.1)
    server = MetricsServer("0", registry_of())
    port = int(server.url.rsplit(":", 1)[1].split("/")[0])

    def status(host: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        for host in (f"127.0.0.1:{port}", "localhost", "LOCALHOST:1", "[::1]:9", "127.0.0.2"):
            assert status(host) == 200, host
        for host in ("evil.example", f"evil.example:{port}", "10.0.0.1", "localhost.evil.example"):
            assert status(host) == 421, host
        with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
            slow.sendall(b"GET /met")
            assert slow.recv(100) == b""  # it is closed
        assert status("localhost") == 200
    finally:
        server.close()
    assert capsys.readouterr().err == ""
