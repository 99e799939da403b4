"""`engine-core replay FILE --what-if`: simulations compared with runs of the engine under a clock that obeys a law."""

import json
import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from core.adapters.store import Adapters
from core.capture.engine import CapturedEngine, start_capture
from core.capture.file import CaptureFile
from core.capture.records import TAGS, Input, Step, encode_record
from core.capture.snapshot import Snapshot
from core.executors.fake import FakeExecutor
from core.inputs import EngineInput
from ipc.errors import CaptureFileError, ConfigError
from ipc.options.config import EngineConfig
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.records.log_frames import Frame
from ipc.wire.lora_messages import AdapterId
from ipc.wire.messages import Abort, AddRequest, Outputs
from ipc.wire.pooling_messages import AddPooling
from tests.captures import CONFIG, frames_of, write_frames
from tests.columns import pack_numbers
from tests.placed import PREFIX
from tools.cli import main
from tools.commands.replay.output_rows import output_rows
from tools.commands.replay.rerun import replay_config
from tools.commands.replay.what_if.options import CHANGEABLE, changed, parse_changes
from tools.commands.replay.what_if.recording import read_recording
from tools.commands.replay.what_if.report import Simulator, recorded_figures, what_if
from tools.commands.replay.what_if.simulation import simulate
from tools.commands.replay.what_if.step_time import FEATURES, FeatureWatcher, Pace, fit

#: ns of one unit of each of FEATURES.
LAW = np.array((2_000_000, 300_000, 50_000, 40, 8, 500_000, 0, 100_000))
SECOND = 10**9
SHARED = list(range(100, 124))


class Arrival(NamedTuple):
    time_ns: int
    client: int
    message: AddRequest | AddPooling
    abort_after: int = 0  # tokens; 0: never


def workload(count: int = 40) -> list[Arrival]:
    """Requests of three clients who send when they like, a third of them with a common beginning."""
    rng, now_ns, arrivals = random.Random(3), SECOND, []
    for number in range(count):
        own = [rng.randrange(3, 1000) for _ in range(rng.randrange(1, 60))]
        prompt = np.array([*SHARED, *own] if number % 3 == 0 else own, "<i4").tobytes()
        params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(2, 30), ignore_eos=True)
        now_ns += round(rng.expovariate(1 / (15 * 10**6)))
        arrivals.append(Arrival(now_ns, number % 3, AddRequest(number, prompt, params, 0), 5 if number % 9 == 4 else 0))
    return arrivals


def record(
    path: Path,
    config: EngineConfig,
    arrivals: list[Arrival],
    noise: float = 0.0,
    slowness: Callable[[int], float] = lambda _: 1.0,
    seed: int = 4,
) -> None:
    """Capture a run whose steps take as long as LAW says, and up to `noise` times as long again.

    slowness: the factor on steps that begin at this time.
    """
    rng, records = random.Random(seed), list[Input | Step]()
    executor, watcher = FakeExecutor(config), FeatureWatcher()
    executor.initialize_cache(config)

    class Log:
        wants_checkpoint = False

        def add_checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> None:
            raise AssertionError("none is wanted")

        def add(self, record: Input | Step) -> None:
            records.append(record)

    received = list[int]()
    engine = CapturedEngine(config, executor, Log(), watchers=[watcher], received=lambda: received)
    watcher.table = engine.engine.scheduler.table
    waiting, due, counts, now_ns = list(arrivals), list[Arrival](), dict[int, int](), arrivals[0].time_ns
    while waiting or engine.has_work:
        if not engine.has_work:
            now_ns = max(now_ns, waiting[0].time_ns)
        inbox: list[tuple[int, EngineInput]] = []
        received.clear()
        while waiting and waiting[0].time_ns <= now_ns:
            one = waiting.pop(0)
            inbox.append((one.client, one.message))
            received.append(one.time_ns)
        for one in due:
            inbox.append((one.client, Abort(pack_numbers([one.message.number]))))
            received.append(now_ns)
        due.clear()
        replies = engine.step(inbox, now_ns)
        features = watcher.take()
        elapsed_ns = 10_000 if features is None else round(float(features @ LAW) * (1 + noise * rng.random()))
        elapsed_ns = round(elapsed_ns * slowness(now_ns))
        step = records[-1]
        assert isinstance(step, Step)
        records[-1] = msgspec.structs.replace(step, elapsed_ns=elapsed_ns)
        now_ns += elapsed_ns + 50_000
        for _, reply in replies:
            for row in output_rows(reply) if isinstance(reply, Outputs) else ():
                one = arrivals[row.number]
                counts[row.number] = counts.get(row.number, 0) + len(row.tokens)
                if one.abort_after and not row.finish and counts[row.number] >= one.abort_after:
                    due.append(one)
    start_capture(str(path), config, executor.info, "test", 0).close()
    header = frames_of(path)[0]
    frames = [Frame(0, 1 + i, TAGS[type(each)], encode_record(each)) for i, each in enumerate(records)]
    write_frames(path, [header, *frames])


def simulator(path: Path, *, is_open: bool = True) -> Simulator:
    file = CaptureFile(path)
    recording = read_recording(file)
    return Simulator(
        replay_config(file.header), file.header.model, recording, fit(recording.features, recording.durations), is_open
    )


def test_another_configuration_is_foretold_as_it_turns_out(tmp_path: Path) -> None:
    """The oracle is a run of the engine with that configuration."""
    record(tmp_path / "base.cap", CONFIG, workload())
    changes = parse_changes(["max_num_seqs=2,16", "max_num_batched_tokens=16,96", "scheduling_policy=fair"])
    changes += parse_changes(["enable_prefix_caching=no"])
    report = what_if("", simulator(tmp_path / "base.cap"), changes)
    assert [abs(error) < 0.2 for error in report.simulated_error.values()] == [True] * 6, report.simulated_error
    assert report.simulated.num_cached_tokens == report.recorded.num_cached_tokens > 0
    assert report.simulated.num_preemptions == report.recorded.num_preemptions
    assert len(report.changes) == 5
    for index, (change, found) in enumerate(zip(changes, report.changes, strict=True)):
        path = tmp_path / f"{index}.cap"
        record(path, changed(CONFIG, change), workload())
        really = recorded_figures(read_recording(CaptureFile(path)))
        for name in ("num_tokens", "num_steps", "num_cached_tokens", "num_preemptions"):
            assert getattr(found.figures, name) == getattr(really, name), (change, name)
        for name in ("tokens_per_s", "ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "e2e_mean_ms", "e2e_p99_ms"):
            assert getattr(found.figures, name) == pytest.approx(getattr(really, name), rel=0.01), (change, name)
        assert found.num_made_up_tokens == 0


def test_the_law_of_step_times_is_found(tmp_path: Path) -> None:
    record(tmp_path / "a.cap", CONFIG, workload())
    time = simulator(tmp_path / "a.cap").time
    known = dict(zip(FEATURES, time.weights.tolist(), strict=True))
    # Every decoding row samples: only the sum of both can be known.
    assert known["decoding rows"] + known["rows that sample"] == pytest.approx(300_000, rel=0.2)
    assert known["prompt tokens"] == pytest.approx(50_000, rel=0.05)
    assert known["steps"] == pytest.approx(2_000_000, rel=0.1)
    assert time.mean_error < 0.01
    assert (time.weights >= 0).all()


def test_the_unit_of_time_does_not_matter() -> None:
    """Slow steps are fitted as well as fast ones."""
    rng = np.random.default_rng(5)
    features = np.stack([rng.integers(1, 2000, 300) if i else np.ones(300, np.int64) for i in range(len(FEATURES))], 1)
    law = np.array((3.0, 0.1, 0.5, 0.001, 0.0, 2.0, 0.0, 0.2))
    for unit in (1e3, 1e6, 1e9):
        time = fit(features, np.rint(features @ law * unit).astype(np.int64))
        assert time.mean_error < 1e-3, unit
        assert time.weights / unit == pytest.approx(law, rel=0.02, abs=0.002)


def test_a_disturbance_lasts_as_long_as_it_did_whatever_runs_in_it() -> None:
    """A second in which 100 steps of 5 ms took 10 ms each is not one in which 100 steps of 50 ms take 100 ms."""
    pace = Pace.of(np.full(500, 5e6), np.where(np.arange(500) // 100 == 2, 1e7, 5e6))
    assert np.diff(pace.times(np.arange(0.0, 2.6e9, 0.25e9))).tolist() == pytest.approx(
        [*[0.25e9] * 4, *[0.5e9] * 2, *[0.25e9] * 4]
    )
    assert pace.times(np.array([2.5e9 * 7 + 1.25e9])).tolist() == pytest.approx([3e9 * 7 + 1.5e9]), "it begins again"
    draw, done, taken = np.random.default_rng(0), 0.0, 0.0
    for _ in range(400):
        one = pace.drawn(draw)
        assert 1.0 <= np.diff(one.taken).sum() / np.diff(one.done).sum() <= 2.0
        done, taken = done + float(one.done[-1]), taken + float(one.taken[-1])
    assert taken / done == pytest.approx(3.0 / 2.5, rel=0.01), "drawn paces are as fast as the measured one"
    short = Pace.of(np.full(200, 5e6), draw.uniform(4e6, 6e6, 200))
    totals = [one.taken[-1] / one.done[-1] for one in (short.drawn(draw) for _ in range(8))]
    assert max(totals) - min(totals) > 0.005, "and differ, however short the measured one was"


def test_noise_is_in_the_error_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_spread_runs: int) -> None:
    monkeypatch.setattr(f"{PREFIX}tools.commands.replay.what_if.report.NUM_SPREAD_RUNS", few_spread_runs)
    record(tmp_path / "a.cap", CONFIG, workload(), noise=0.5)
    report = what_if("", simulator(tmp_path / "a.cap"), parse_changes(["max_num_seqs=8,2", "watermark=0.01"]))
    same, fewer = report.changes
    assert report.spread["ttft_mean_ms"] > 0.3
    assert all(abs(difference) <= same.error[name] for name, difference in same.difference.items())
    assert fewer.difference["ttft_mean_ms"] > 5 * fewer.error["ttft_mean_ms"]


def test_a_client_that_waits_for_its_answers_waits_in_the_simulation(tmp_path: Path) -> None:
    """One request at a time: with twice the step time the next one comes later, and does not queue."""
    alone = [
        one._replace(time_ns=SECOND * (1 + index), client=0, abort_after=0) for index, one in enumerate(workload(12))
    ]
    record(tmp_path / "a.cap", CONFIG, alone)
    closed, opened = simulator(tmp_path / "a.cap", is_open=False), simulator(tmp_path / "a.cap")
    slow = Pace(np.array([0.0, 1.0]), np.array([0.0, 40.0]))
    arrived = [[one.arrived for one in each.run(CONFIG).moments] for each in (closed, opened)]
    assert arrived[0] == pytest.approx(arrived[1], abs=0.01 * SECOND)
    assert all(later.arrived > earlier.ended for earlier, later in pairwise(closed.run(CONFIG, slow).moments))
    assert any(later.arrived < earlier.ended for earlier, later in pairwise(opened.run(CONFIG, slow).moments))


def test_aborted_requests_that_get_further_have_made_up_tokens(tmp_path: Path) -> None:
    arrivals = [one._replace(abort_after=0) for one in workload()]
    record(tmp_path / "a.cap", CONFIG, arrivals)
    base = simulator(tmp_path / "a.cap")
    for one in base.recording.requests[:3]:
        one.tokens[0] = one.tokens[0][:1]
    run = base.run(CONFIG)
    assert run.num_made_up_tokens == sum(len(one.token_times) - 1 for one in base.recording.requests[:3])
    assert all(one.ended for one in run.moments)


def test_a_simulation_reads_no_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "a.cap", CONFIG, workload(20))
    base = simulator(tmp_path / "a.cap")

    here = threading.get_ident()

    def refusing(clock: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            assert threading.get_ident() != here, "a simulation reads the clock"
            return clock()  # a thread of another test's client

        return read

    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"):
        monkeypatch.setattr(time, name, refusing(getattr(time, name)))
    first, second = base.run(CONFIG), base.run(CONFIG)
    monkeypatch.undo()
    assert first == second


def test_an_engine_that_gets_stuck_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "a.cap", CONFIG, workload(5))
    base = simulator(tmp_path / "a.cap")
    monkeypatch.setattr(
        f"{PREFIX}core.scheduling.scheduler.Scheduler.has_unfinished_requests", property(lambda self: True)
    )
    with pytest.raises(CaptureFileError, match="no request makes progress"):
        simulate(CONFIG, base.info, base.recording, base.time, most_empty_steps=100)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["dtype=float32"], "the options that affect scheduling are max_num_seqs"),
        (["max_num_seqs=many"], "must be a number from 1 to 65536; got 'many'"),
        (["enable_prefix_caching=perhaps"], "must be yes or no"),
        (["max_num_seqs=1", "max-num-seqs=2"], "given twice: give all values at once, as max_num_seqs=A,B"),
        (["max_num_seqs=" + ",".join(map(str, range(1, 258)))], "asks for 257 combinations; the limit is 256"),
    ],
)
def test_a_wrong_what_if_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_changes(texts)


def test_values_beyond_an_options_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        changed(CONFIG, parse_changes(["max_num_seqs=0"])[0])
    assert {"max_num_seqs", "block_size", "preemption_mode"} <= CHANGEABLE.keys()


def mixed(count: int) -> list[Arrival]:
    """Requests of all kinds: embeddings, beam searches, several choices."""
    arrivals = []
    for one in workload(count):
        message: AddRequest | AddPooling = one.message
        if message.number % 5 == 1:
            message = AddPooling(message.number, message.prompt_token_ids, PoolingParams("embed"))
        elif message.number % 5 == 3:
            message = msgspec.structs.replace(
                message, params=SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=6)
            )
        elif message.number % 5 == 4:
            message = msgspec.structs.replace(
                message, params=SamplingParams(n=2, temperature=1.0, max_tokens=9), seed=5
            )
        arrivals.append(one._replace(message=message, abort_after=0))
    return arrivals


@pytest.mark.parametrize("change", [{"max_num_seqs": 4}, {"max_num_batched_tokens": 24}])
def test_pooling_and_beam_searches_are_foretold(tmp_path: Path, change: dict[str, int]) -> None:
    """The engine itself, with the other option and steps that obey the law, is the oracle."""
    other_config = msgspec.structs.replace(CONFIG, **change)
    arrivals = mixed(30)
    record(tmp_path / "a.cap", CONFIG, arrivals)
    record(tmp_path / "b.cap", other_config, arrivals)
    file = CaptureFile(tmp_path / "a.cap")
    recording, real = read_recording(file), read_recording(CaptureFile(tmp_path / "b.cap"))
    time = fit(recording.features, recording.durations)
    told = Simulator(replay_config(file.header), file.header.model, recording, time, is_open=True).run(other_config)
    assert told.num_made_up_tokens == 0
    assert (told.num_tokens, told.num_cached_tokens) == (real.num_tokens, real.num_cached_tokens)
    assert told.num_steps == len(real.durations)
    for moments, one in zip(told.moments, real.requests, strict=True):
        assert moments.ended - moments.arrived == pytest.approx(one.ended_ns - one.received_ns, rel=0.03)


def test_requests_wait_for_their_adapters_slots_without_the_adapters_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(CONFIG, enable_lora=True, max_loras=1)
    arrivals = [
        one._replace(message=msgspec.structs.replace(one.message, adapter=AdapterId("abc"[number % 3] * 32)))
        for number, one in enumerate(workload())
    ]
    with monkeypatch.context() as patched:
        patched.setattr(Adapters, "find", lambda adapters, digest: None)
        record(tmp_path / "base.cap", config, arrivals)
        record(tmp_path / "more.cap", changed(config, {"max_num_seqs": 3}), arrivals)
    report = what_if("", simulator(tmp_path / "base.cap"), parse_changes(["max_num_seqs=3"]))
    really = recorded_figures(read_recording(CaptureFile(tmp_path / "more.cap")))
    for figures, expected in ((report.simulated, report.recorded), (report.changes[0].figures, really)):
        for name in ("num_tokens", "num_steps", "num_cached_tokens", "num_preemptions"):
            assert getattr(figures, name) == getattr(expected, name), name


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.cap"
    record(path, CONFIG, workload())
    assert main(["replay", str(path), "--what-if", "max_num_seqs=4,16", "--arrivals", "recorded"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "40 requests" in out
    assert "max_num_seqs=16" in out
    assert main(["replay", str(path), "--what-if", "max_num_seqs=2", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["changes"][0]["options"] == {"max_num_seqs": 2}
    assert report["changes"][0]["difference"]["ttft_mean_ms"] > 10
    for wrong in (["--mode", "full"], ["--model", "x"]):
        with pytest.raises(SystemExit) as exit_status:
            main(["replay", str(path), "--what-if", "max_num_seqs=2", *wrong])
        assert exit_status.value.code == 2
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_status:
        main(["replay", str(path), "--what-if", "max_num_seq=2"])
    assert exit_status.value.code == 2
    assert "did you mean max_num_seqs? the options that affect scheduling" in capfd.readouterr().err
