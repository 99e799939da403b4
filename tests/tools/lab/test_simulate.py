"""`engine-core simulate`: fleets in virtual time. Joined steps change nothing of note; the smallest fleet is found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.executors.fake import create
from frontend.fleet.placement import POLICIES
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.captures import capture_in_process
from tools.cli import main
from tools.lab.simulate.__main__ import _config, _parser, _step_time, values_of
from tools.lab.simulate.fleet import FleetRun, simulate_fleet
from tools.lab.traces.formats import read_trace
from tools.lab.traces.workload import TimedRequest, make_workload

DATA = Path(__file__).resolve().parent.parent.parent / "data"
MOONCAKE = DATA / "mooncake_conversation_50.jsonl"
AZURE = DATA / "azure2023_conv_50.csv"


def run(
    path: Path,
    time_scale: float,
    num_replicas: int,
    route: str = "least_loaded",
    *,
    joins_steps: bool = True,
    options: dict[str, Any] | None = None,
) -> FleetRun:
    parsed = _parser().parse_args([str(path)])
    config = _config(options or {}, parsed)
    workload = make_workload(
        read_trace(path),
        max_tokens=8192,
        time_scale=time_scale,
        num_clients=1,
        vocab_size=create(config).info.vocab_size,
    )
    return simulate_fleet(
        config,
        create(config).info,
        workload.requests,
        _step_time(parsed),
        num_replicas=num_replicas,
        route=route,
        joins_steps=joins_steps,
    )


@pytest.mark.parametrize(("path", "time_scale"), [(MOONCAKE, 0.05), (AZURE, 0.2)])
def test_joined_steps_are_the_single_ones(path: Path, time_scale: float) -> None:
    """Far fewer calls of the engine, the same placements, and times within two percent."""
    single, joined = (run(path, time_scale, 3, joins_steps=joins) for joins in (False, True))
    assert 2 * joined.num_calls < single.num_calls
    assert (single.replicas == joined.replicas).all()
    assert (single.num_tokens == joined.num_tokens).all()
    assert single.num_cached_tokens == joined.num_cached_tokens
    values = [values_of(one) for one in (single, joined)]
    for name in ("ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean", "e2e_p99", "tokens_per_s"):
        assert values[1][name] == pytest.approx(values[0][name], rel=0.05 if name == "ttft_p99" else 0.02), name
    assert values[0]["unfinished"] == values[1]["unfinished"] == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_steps_are_joined_while_all_rows_are_taken(policy: str) -> None:
    """Where others wait for a row, and no policy takes one for them: the same times to half a percent."""
    options = {"max_num_seqs": 4, "scheduling_policy": policy}
    single, joined = (run(AZURE, 0.2, 1, joins_steps=joins, options=options) for joins in (False, True))
    assert (2 * joined.num_calls < single.num_calls) == (policy == "fcfs")
    values = [values_of(one) for one in (single, joined)]
    assert values[0]["ttft_mean"] > 2000, "nothing waited"
    assert values[1] == {name: pytest.approx(value, rel=0.005) for name, value in values[0].items()}


def test_one_replica_is_the_scheduler_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Against `engine-core traces`, which steps one engine through the same trace with the same step times."""
    assert main(["traces", str(AZURE), "--time-scale", "0.2", "--scheduling-policy", "fcfs", "--clients", "1"]) == 0
    other = json.loads(capsys.readouterr().out)
    alone = run(AZURE, 0.2, 1)
    ttft = np.quantile((alone.first_tokens - alone.arrivals) / 1e9, 0.5)
    assert ttft == pytest.approx(other["ttft_s"]["p50"], rel=0.05)  # which counts what prompts read, too
    assert alone.end_ns / 1e9 == pytest.approx(other["makespan_s"], rel=0.03)


def records(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    status = main(["simulate", str(MOONCAKE), "--time-scale", "0.05", *options])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_smallest_fleet_that_holds_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    (of_three,) = records(capsys, "--replicas", "3")[1]
    slo = ("--slo", f"ttft_p99 <= {of_three['ttft_p99']}")
    status, found = records(capsys, "--replicas", "16", "--find", "replicas", *slo)
    best = found[-1]["found"]
    assert status == 0
    assert 1 < best <= 3
    held = {one["replicas"]: one["holds"] for one in found[:-1]}
    assert held[best]
    assert not held[best - 1]
    assert records(capsys, "--replicas", str(best), *slo)[0] == 0
    assert records(capsys, "--replicas", str(best - 1), *slo)[0] == 1
    status, found = records(capsys, "--replicas", "2", "--find", "replicas", "--slo", "ttft_p99 < 1")
    assert (status, found[-1]["found"]) == (1, None)


def test_a_fleet_may_be_large(capsys: pytest.CaptureFixture[str]) -> None:
    status, (record,) = records(capsys, "--replicas", "40", "--route", "prefix")
    assert (status, record["unfinished"]) == (0, 0)


@pytest.mark.parametrize("route", POLICIES)
def test_the_same_command_gives_the_same_answer(route: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (records(capsys, "--replicas", "4", "--route", route)[1][0] for _ in range(2))
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_equal_beginnings_go_to_one_replica_until_it_has_too_much_to_do() -> None:
    """By the router's own placement: each beginning is computed once; in turn, on every replica."""
    config = _config({}, _parser().parse_args([str(AZURE)]))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    beginnings = [np.arange(start, start + 512, dtype="<i4") for start in (0, 1000, 2000, 3000, 4000)]
    tails = np.arange(5000, 5000 + 16 * 50, dtype="<i4").reshape(50, 16)
    prompts = [np.concatenate([beginnings[number % 5], tail]).tobytes() for number, tail in enumerate(tails)]

    def simulated(route: str, between_ns: int) -> FleetRun:
        messages = [AddRequest(number, prompt, params, seed=0) for number, prompt in enumerate(prompts)]
        requests = [TimedRequest(number * between_ns, 0, message) for number, message in enumerate(messages)]
        time = _step_time(_parser().parse_args([str(AZURE)]))
        return simulate_fleet(config, create(config).info, requests, time, num_replicas=4, route=route)

    by_prefix = simulated("prefix", 10**9)
    assert by_prefix.num_cached_tokens == 45 * 512
    assert all(len(set(by_prefix.replicas[first::5].tolist())) == 1 for first in range(5))
    assert simulated("round_robin", 10**9).num_cached_tokens == 30 * 512
    assert set(simulated("prefix", 0).replicas.tolist()) == {0, 1, 2, 3}, "what nobody has computed yet is nowhere"


def test_step_times_come_from_a_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.cap"
    capture_in_process(source)
    options = ["--replicas", "2", "--step-model", str(source), "--max-tokens", "120", "--max-num-batched-tokens", "64"]
    assert main(["simulate", str(source), *options]) == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--find", "replicas"], "--find replicas needs --slo"),
        (["--replicas", "0"], "--replicas must be from 1"),
        (["--slo", "ttft > 3"], "it names 'ttft'"),
        (["--model", "x"], "a simulation has no model"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(AZURE), *options]) == 1
    assert reason in capsys.readouterr().err
