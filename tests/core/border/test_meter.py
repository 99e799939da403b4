"""RequestMeter against the same measurements by plain loops, and what it does at the edges of a request's life."""

import random
import struct
from collections import defaultdict

import msgspec
import pytest

from core.border.meter import RequestMeter
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, ErrorCode, FinishReason, Outputs, RequestFailed
from ipc.wire.metrics_messages import Metrics
from ipc.wire.scheduling_messages import EventKind, RequestEvents

CLIENT = 7
TOKENS = ("request_prompt_tokens", "request_generation_tokens")


def request(number: int, num_prompt_tokens: int = 3, n: int = 1, max_tokens: int | None = 50) -> AddRequest:
    params = SamplingParams(n=n, temperature=1.0, max_tokens=max_tokens)
    return AddRequest(number, bytes(4 * num_prompt_tokens), params, 0)


def outputs(rows: list[tuple[int, int, int, int, int]], events: RequestEvents | None = None) -> Outputs:
    """rows: (number, choice, position, tokens, finish code)."""
    numbers, choices, positions, counts, finish = zip(*rows, strict=True) if rows else ((),) * 5
    size = len(rows)
    return Outputs(
        epoch=0,
        step=0,
        numbers=struct.pack(f"<{size}I", *numbers),
        positions=struct.pack(f"<{size}I", *positions),
        counts=struct.pack(f"<{size}H", *counts),
        tokens=bytes(4 * sum(counts)),
        choices=struct.pack(f"<{size}H", *choices) if any(choices) else b"",
        finish=bytes(finish) if any(finish) else b"",
        events=events,
    )


def event(number: int, choice: int, kind: EventKind, time: float) -> RequestEvents:
    parts = [struct.pack(form, value) for form, value in zip("IHBBIq", (number, choice, kind, 0, 0, 0), strict=True)]
    return RequestEvents(*parts[:5], struct.pack("<q", round(time * 1e9)))


class Played:
    """Plain requests under a clock: each step some of those that live get a token; gaps and ends are kept in lists."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.meter = RequestMeter(1000)
        self.now = 100.0
        self.arrival: dict[tuple[int, int], float] = {}
        self.times: dict[tuple[int, int], list[float]] = {}
        self.expected: dict[str, list[float]] = defaultdict(list)
        self.ended: dict[str, int] = defaultdict(int)
        self.next_number = 0

    def step(self) -> None:
        self.now += self.random.choice((0.004, 0.02, 0.3, 1.7))
        for _ in range(self.random.choice((0, 0, 0, 1, 3))):
            n = self.random.choice((1, 1, 1, 3))
            self.meter.note_request(CLIENT, request(self.next_number, n=n), None, self.now)
            self.arrival |= {(self.next_number, choice): self.now for choice in range(n)}
            self.times |= {(self.next_number, choice): [] for choice in range(n)}
            self.next_number += 1
        living = list(self.times)
        chosen = living if self.random.random() < 0.7 else [key for key in living if self.random.random() < 0.6]
        if self.random.random() < 0.1:
            self.random.shuffle(chosen)
        rows = []
        for key in chosen:
            times = self.times[key]
            count = self.random.choice((1, 1, 1, 1, 2))
            self._note(key, count)
            is_end = self.random.random() < 0.05
            rows.append((*key, len(times), count, int(FinishReason.LENGTH) if is_end else 0))
            times += [self.now] * count
            if is_end:
                self._end(key, "length")
        if rows:
            self.meter.note_messages([(CLIENT, outputs(rows))], self.now)
        if self.times and self.random.random() < 0.05:
            key = self.random.choice(list(self.times))
            row = (*key, len(self.times[key]), 0, int(FinishReason.ABORT))
            self._end(key, "abort")
            self.meter.note_messages([(CLIENT, outputs([row]))], self.now)

    def _note(self, key: tuple[int, int], count: int) -> None:
        times = self.times[key]
        if times:
            self.expected["inter_token_latency_seconds"].append(self.now - times[-1])
        else:
            self.expected["time_to_first_token_seconds"].append(self.now - self.arrival[key])

    def _end(self, key: tuple[int, int], reason: str) -> None:
        times = self.times.pop(key)
        self.ended[reason] += 1
        self.expected["e2e_request_latency_seconds"].append(self.now - self.arrival[key])
        self.expected["request_generation_tokens"].append(len(times))
        if times:
            self.expected["request_decode_time_seconds"].append(times[-1] - times[0])
        if len(times) > 1:
            tpot = (times[-1] - times[0]) / (len(times) - 1)
            self.expected["request_time_per_output_token_seconds"].append(tpot)


def check(metrics: Metrics, name: str, values: list[float]) -> None:
    histogram = metrics.histograms[name]
    counts = [0] * len(histogram.counts)
    for value in values:
        counts[sum(bound < value for bound in histogram.bounds)] += 1
    assert histogram.counts == counts, name
    assert histogram.total == pytest.approx(sum(values)), name


@pytest.mark.parametrize("seed", range(20))
def test_it_measures_what_plain_loops_measure(seed: int) -> None:
    played = Played(seed)
    for _ in range(150):
        played.step()
    metrics = played.meter.metrics(1, 1)
    assert len(played.expected["inter_token_latency_seconds"]) > 50
    for name in metrics.histograms:
        if name in played.expected:
            check(metrics, name, played.expected[name])
    assert metrics.num_finished == {"stop": 0, "error": 0, "length": 0, "abort": 0} | played.ended
    played.meter.forget_client(CLIENT)
    left = played.meter.metrics(1, 1).num_finished["abort"] - metrics.num_finished["abort"]
    assert left == len(played.times)


def test_the_parts_of_a_requests_time() -> None:
    meter = RequestMeter(1000)
    meter.note_request(CLIENT, request(1, 40, n=2, max_tokens=None), None, 10.0)
    meter.note_messages([(CLIENT, outputs([], event(1, 0, EventKind.SCHEDULED, 10.75)))], 10.8)
    meter.note_messages([(CLIENT, outputs([(1, 0, 0, 1, 0)], event(1, 0, EventKind.PREEMPTED, 11.0)))], 12.0)
    meter.note_messages([(CLIENT, outputs([(1, 0, 1, 1, 1), (1, 1, 0, 1, 2)]))], 14.0)
    metrics = meter.metrics(1, 1)
    totals = {name: histogram.total for name, histogram in metrics.histograms.items()}
    assert totals["request_queue_time_seconds"] == pytest.approx(0.75)
    assert totals["request_prefill_time_seconds"] == pytest.approx(1.25)
    assert totals["request_inference_time_seconds"] == pytest.approx(3.25)
    assert totals["request_decode_time_seconds"] == pytest.approx(2.0)
    assert totals["time_to_first_token_seconds"] == pytest.approx(2.0 + 4.0)
    assert totals["request_prompt_tokens"] == 80
    assert totals["request_num_preemptions"] == 1
    assert (totals["request_params_n"], sum(metrics.histograms["request_params_n"].counts)) == (2, 1)
    assert totals["request_max_num_generation_tokens"] == 2
    assert sum(metrics.histograms["request_params_max_tokens"].counts) == 0
    assert metrics.num_finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_a_request_that_goes_on_after_an_engine_was_lost_has_no_first_token_here() -> None:
    meter = RequestMeter(1000)
    again = msgspec.structs.replace(request(1), delivered=[bytes(40)])
    meter.note_request(CLIENT, again, None, 10.0)
    for position, now in ((10, 11.0), (11, 11.5)):
        meter.note_messages([(CLIENT, outputs([(1, 0, position, 1, 0)]))], now)
    histograms = meter.metrics(1, 1).histograms
    assert sum(histograms["time_to_first_token_seconds"].counts) == 0
    assert histograms["inter_token_latency_seconds"].total == pytest.approx(0.5)


def test_refusals_failures_and_repetitions() -> None:
    meter = RequestMeter(1000)
    meter.note_request(CLIENT, request(1), RequestFailed(1, ErrorCode.RESOURCE_EXHAUSTED, ""), 1.0)
    meter.note_request(CLIENT, request(2, n=3), None, 1.0)
    meter.note_request(CLIENT, request(2, n=3), None, 5.0)  # sent again
    meter.note_messages([(CLIENT, outputs([(2, choice, 0, 1, 0) for choice in range(3)]))], 2.0)
    meter.note_messages([(CLIENT, RequestFailed(2, ErrorCode.INTERNAL, ""))], 2.5)
    meter.note_messages([(CLIENT, outputs([(9, 0, 0, 1, 1)])), (8, outputs([(2, 0, 0, 1, 1)]))], 3.0)  # strangers
    metrics = meter.metrics(4, 2)
    assert (metrics.call, metrics.num_sessions, metrics.is_measuring) == (4, 2, True)
    assert metrics.num_refused == {"RESOURCE_EXHAUSTED": 1}
    assert metrics.num_finished == {"stop": 0, "length": 0, "abort": 0, "error": 3}
    assert metrics.histograms["time_to_first_token_seconds"].total == pytest.approx(3.0)


def test_many_values_are_counted_before_anybody_asks() -> None:
    """They do not pile up in an engine that nobody scrapes."""
    meter = RequestMeter(1000)
    for number in range(3000):
        meter.note_request(CLIENT, request(number), None, 1.0)
        meter.note_messages([(CLIENT, outputs([(number, 0, 0, 1, 1)]))], 2.0)
    assert len(meter._ended._rows) < 1024
    assert not meter._clients[CLIENT].choices
    assert sum(meter.metrics(1, 1).histograms["e2e_request_latency_seconds"].counts) == 3000


def test_each_request_is_logged_once_at_its_end() -> None:
    lines: list[tuple[str, dict[str, object]]] = []
    meter = RequestMeter(1000, lambda text, **fields: lines.append((text, fields)))
    meter.note_request(CLIENT, request(1, 40, n=2), None, 10.0)
    meter.note_request(CLIENT, request(2), RequestFailed(2, ErrorCode.UNAVAILABLE, ""), 10.0)
    meter.note_request(CLIENT, request(3), None, 10.0)
    started = outputs([(1, 0, 0, 1, 0), (1, 1, 0, 1, 0)], event(1, 0, EventKind.SCHEDULED, 10.25))
    meter.note_messages([(CLIENT, msgspec.structs.replace(started, started=struct.pack("<2I", 1, 32)))], 10.5)
    meter.note_messages([(CLIENT, outputs([(1, 0, 1, 1, 1)]))], 11.0)
    meter.note_messages([(CLIENT, outputs([(1, 1, 1, 1, 2)]))], 12.0)
    meter.forget_client(CLIENT)
    assert [text for text, _ in lines] == ["request refused", "request ended", "request ended"]
    assert lines[0][1] == {"client": CLIENT, "number": 2, "reason": "UNAVAILABLE"}
    assert lines[1][1] == {
        "client": CLIENT,
        "number": 1,
        "reason": "length",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "output_tokens": 4,
        "choices": 2,
        "queue_ms": 250.0,
        "first_token_ms": 500.0,
        "total_ms": 2000.0,
        "preemptions": 0,
    }
    assert (lines[2][1]["number"], lines[2][1]["reason"], lines[2][1]["total_ms"]) == (3, "client gone", None)


def test_a_step_dated_before_a_request_arrived_makes_no_negative_wait() -> None:
    lines: list[dict[str, object]] = []
    meter = RequestMeter(1000, lambda text, **fields: lines.append(fields))
    meter.note_request(CLIENT, request(1), None, 10.0)
    meter.note_messages([(CLIENT, outputs([(1, 0, 0, 1, 1)], event(1, 0, EventKind.SCHEDULED, 9.9)))], 10.5)
    assert [(line["queue_ms"], line["first_token_ms"], line["total_ms"]) for line in lines] == [(0.0, 500.0, 500.0)]


def test_buckets_of_tokens_go_to_the_longest_request() -> None:
    bounds = RequestMeter(4096).metrics(1, 1).histograms["request_prompt_tokens"].bounds
    assert bounds == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
