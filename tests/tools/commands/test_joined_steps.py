"""Joined steps of a simulation beside single ones: the same decisions, figures and times, to the nanosecond."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.capture.file import CaptureFile
from core.executors.fake import FakeExecutor
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.captures import CONFIG
from tests.core.test_structured_outputs import KINDS
from tests.fake_options import fake_options, with_options
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, tokenizer_files
from tests.tools.commands.test_what_if import Arrival, mixed, record, simulator, workload
from tools.commands.replay.what_if import simulation
from tools.commands.replay.what_if.options import Change, changed
from tools.commands.replay.what_if.recording import read_recording
from tools.commands.replay.what_if.simulation import JoinedSteps
from tools.commands.replay.what_if.step_time import Pace

LONG = msgspec.structs.replace(CONFIG, max_model_len=200, num_blocks_override=120)
CHANGES: tuple[Change, ...] = (
    {},
    {"max_num_seqs": 3},  # requests wait while all rows are taken
    {"num_blocks_override": 40},  # rows are preempted
    {"enable_prefix_caching": False},
    {"block_size": 16, "num_blocks_override": 30, "watermark": 0.1},
    {"scheduling_policy": "priority", "max_num_seqs": 2},
    {"scheduling_policy": "fair", "max_num_seqs": 2},  # not joined
    {"max_num_batched_tokens": 8},
)


def long_answers(seed: int) -> list[Arrival]:
    """Requests of two priorities in bursts; some are the same, some are aborted, and some have stop tokens."""
    rng, now_ns, arrivals = random.Random(seed), 10**9, list[Arrival]()
    for number in range(16):
        now_ns += 0 if rng.random() < 0.5 else rng.randrange(3 * 10**8)
        own = [rng.randrange(3, 1000) for _ in range(rng.randrange(1, 60))]
        same = arrivals and rng.random() < 0.3
        prompt = rng.choice(arrivals).message.prompt_token_ids if same else np.array(own, "<i4").tobytes()
        stops = {"stop_token_ids": list(range(20))} if rng.random() < 0.3 else {"ignore_eos": True}
        params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(2, 120), **stops)
        message = AddRequest(number, prompt, params, 0, priority=rng.randrange(2))
        arrivals.append(Arrival(now_ns, number % 3, message, rng.randrange(1, 50) if number % 5 == 4 else 0))
    return arrivals


def final_state(run: simulation.Run) -> dict[str, Any]:
    """Return what later decisions would depend on, and the counters."""
    scheduler = run.engine.scheduler
    scheduler.check_integrity()
    stats = msgspec.structs.asdict(scheduler.stats)
    names, pool = scheduler.pool.names.columns(), scheduler.pool
    order = pool.next_evicted(pool.num_free).tolist()
    return {"stats": stats, "order": order, "names": [one.tolist() for one in names], "live": len(run._live)}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_joined_steps_are_single_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    path = tmp_path / "a.cap"
    record(path, LONG, long_answers(seed))
    base, runs, num_joined = simulator(path, is_open=seed != 2), list[simulation.Run](), [0]

    class KeptRun(simulation.Run):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            runs.append(self)

    take = JoinedSteps.take

    def counted(joined: JoinedSteps, count: int) -> None:
        num_joined[0] += count
        take(joined, count)

    monkeypatch.setattr(simulation, "Run", KeptRun)
    monkeypatch.setattr(JoinedSteps, "take", counted)
    rng = np.random.default_rng(seed)
    pace = Pace.of(rng.uniform(1e5, 1e8, 97), rng.uniform(1e5, 1e8, 97))
    for number, change in enumerate(CHANGES):
        config = changed(LONG, change)
        for one in (None, pace)[number % 2 :: 2] if seed == 1 else (None, pace):
            shared = {"is_open": base.is_open, "pace": one}
            num_joined[0] = 0
            joined = simulation.simulate(config, base.info, base.recording, base.time, **shared)
            assert (num_joined[0] > joined.num_steps // 5) is (change.get("scheduling_policy") != "fair"), change
            num_joined[0] = 0
            single = simulation.simulate(config, base.info, base.recording, base.time, joins=False, **shared)
            assert not num_joined[0]
            assert joined == single, change
            assert final_state(runs[-2]) == final_state(runs[-1]), change


def test_requests_of_other_kinds_keep_steps_single(tmp_path: Path) -> None:
    """Pooling requests, beam searches and several choices come and go among others."""
    record(tmp_path / "a.cap", CONFIG, mixed(24))
    base = simulator(tmp_path / "a.cap")
    single = simulation.simulate(base.config, base.info, base.recording, base.time, is_open=True, joins=False)
    assert base.run(base.config) == single


def test_tokens_that_a_grammar_forces_are_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come as drafts of the executor, several in a step. The oracle is a run of the engine with that option."""
    initialize = FakeExecutor.initialize_cache

    def with_tokenizer(executor: FakeExecutor, config: EngineConfig) -> None:
        executor.grammars.use_files(tokenizer_files())
        initialize(executor, config)

    monkeypatch.setattr(FakeExecutor, "initialize_cache", with_tokenizer)
    config = with_options(CONFIG, executor_options=fake_options(vocab_size=VOCAB_SIZE, eos_token_id=EOS))
    arrivals = list[Arrival]()
    for one in workload(30):
        number = one.message.number
        params = SamplingParams(structured_outputs=KINDS[number % len(KINDS)], max_tokens=60)
        message = AddRequest(number, np.array([number % 250, 7, 9], "<i4").tobytes(), params, number)
        arrivals.append(one._replace(message=message, abort_after=0))
    change: Change = {"max_num_seqs": 3}
    record(tmp_path / "base.cap", config, arrivals)
    record(tmp_path / "other.cap", changed(config, change), arrivals)
    base = simulator(tmp_path / "base.cap")
    assert base.recording.offers
    really = read_recording(CaptureFile(tmp_path / "other.cap"))
    told = base.run(changed(base.config, change))
    assert told.num_made_up_tokens == 0
    assert (told.num_steps, told.num_tokens) == (len(really.durations), really.num_tokens)
    assert len(really.durations) < really.num_tokens


def test_a_capture_that_ends_in_the_middle_goes_on_with_made_up_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.cap"
    record(path, CONFIG, workload(12))
    base = simulator(path)
    for one in base.recording.requests[3:6]:
        one.tokens[0] = one.tokens[0][:2]
        one.aborted_ns = 0
    single = simulation.simulate(base.config, base.info, base.recording, base.time, is_open=True, joins=False)
    assert single.num_made_up_tokens > 0
    assert base.run(base.config) == single


def test_an_answer_without_known_tokens_ends_when_its_client_aborts(tmp_path: Path) -> None:
    """As in a forecast, whose requests have made-up tokens and no other end."""
    path = tmp_path / "a.cap"
    record(path, CONFIG, workload(24))
    base = simulator(path)
    aborted = [index for index, one in enumerate(base.recording.requests) if one.aborted_ns]
    for index in aborted:
        one = base.recording.requests[index]
        assert isinstance(one.message, AddRequest)
        one.message = msgspec.structs.replace(one.message, params=one.message.params.changed(max_tokens=400))
        one.tokens = [[]]
    single = simulation.simulate(base.config, base.info, base.recording, base.time, is_open=True, joins=False)
    assert base.run(base.config) == single
    counts = [single.moments[index].num_tokens for index in aborted]
    assert counts == [len(base.recording.requests[index].token_times) for index in aborted]
    assert len(counts) == 3
