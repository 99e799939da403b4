"""Worker processes: killed, stopped and failing in each phase of their lives, and what the core makes of it."""

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.capture.engine import CapturedEngine, start_capture
from core.engine import EngineCore
from core.execution.executor import ExecutorEndedError, ModelInfo
from core.execution.plan import SchedulerOutput
from core.executors.fake_options import with_fake_options
from core.inputs import EngineInput
from core.process.resolve import resolve
from core.workers import executor as module
from core.workers import sent_features, step_clock
from core.workers.crew import Crew
from core.workers.executor import create
from frontend.engine.process import EngineProcess
from ipc.errors import ConfigError, EngineStartError, ModelFileError
from ipc.machine.channel import Channel, ChannelEndedError
from ipc.options.config import EngineConfig
from ipc.wire.messages import AddRequest
from tests.core.driving import Inbox
from tests.fake_options import fake_options
from tests.fake_tokens import fake_tokens
from tests.raw_client import RawClient, request
from tools.cli import main

VOCAB = 1000
CONFIG = EngineConfig(
    executor="fake",
    distributed_executor_backend="mp",
    executor_options=fake_options(vocab_size=VOCAB, step_us=500),
    max_model_len=4000,
    num_blocks_override=2000,
)
PROMPTS = [[3 + number] * (5 + number) for number in range(8)]
LENGTH = 120


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end, f"still there: {pids}"
        time.sleep(0.01)


class Run:
    """An engine core in this process whose workers are disturbed."""

    def __init__(self, config: EngineConfig = CONFIG, capture: Path | None = None) -> None:
        self.executor = create(config)
        self.news: queue.SimpleQueue[tuple[int, EngineInput]] = queue.SimpleQueue()
        info, blocks_in = self.executor.info, self.executor.determine_num_available_blocks
        self.config = resolve(config, info, blocks_in, total_memory_bytes=1 << 30, num_cpus=1)
        self.executor.initialize_cache(self.config)
        self.executor.warm_up()
        self.executor.follow(lambda news: self.news.put((0, news)))
        self.close: list[Callable[[], None]] = [self.executor.close]
        self.core: EngineCore | CapturedEngine
        if capture is None:
            self.core = EngineCore(self.config, self.executor)
        else:
            writer = start_capture(str(capture), self.config, self.executor.info, "test", 0)
            self.core = CapturedEngine(self.config, self.executor, writer)
            self.close.append(writer.close)
        self.inbox = Inbox()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for close in self.close:
            close()

    def answer(self, messages: list[AddRequest], disturb: dict[int, Callable[[], None]]) -> list[list[int]]:
        """Return the requests' tokens. disturb: what to do before a step of this number, of those with work."""
        inbox: list[tuple[int, EngineInput]] = [(0, message) for message in messages]
        for message in messages:
            self.inbox.expect(0, message)
        num_steps, end = 0, time.monotonic() + 60
        while inbox or self.core.has_unfinished:
            assert time.monotonic() < end, "the requests do not end"
            while not self.news.empty():
                inbox.append(self.news.get())
            if is_working := bool(inbox) or self.core.has_work:
                disturb.get(num_steps, lambda: None)()
                num_steps += 1
            self.inbox.take(self.core.step(inbox, time.monotonic_ns()))
            inbox = []
            if not is_working:
                time.sleep(0.005)
        return [self.inbox.received[0, message.number].tokens for message in messages]

    def kill(self, number: int = signal.SIGKILL) -> Callable[[], None]:
        return lambda: os.kill(self.executor.pids[0], number)


def messages() -> list[AddRequest]:
    return [request(number, prompt, LENGTH) for number, prompt in enumerate(PROMPTS)]


def expected() -> list[list[int]]:
    return [fake_tokens(prompt, LENGTH, VOCAB) for prompt in PROMPTS]


@pytest.mark.soak
@pytest.mark.parametrize("depth", [1, 2])
def test_a_killed_worker_is_a_pause(depth: int) -> None:
    with Run(EngineConfig(**{**_options(CONFIG), "async_scheduling": depth == 2})) as run:
        before = run.executor.pids
        assert run.answer(messages(), {0: run.kill(), 60: run.kill(signal.SIGABRT)}) == expected()
        after = run.executor.pids
        assert before != after
        wait_until_gone(before)
    wait_until_gone(after)


def test_a_stopped_worker_is_killed_as_hung(monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]) -> None:
    monkeypatch.setattr(step_clock, "LEAST_S", 0.4)
    with Run() as run:
        assert run.answer(messages(), {30: run.kill(signal.SIGSTOP)}) == expected()
        assert len(run.executor._losses) == 1
    assert "a step of 8 tokens has not ended after" in logged()


class SlowSender:
    """Stands for an engine that encodes a large image before one plan."""

    def __init__(self, features: object) -> None:
        self._at = 30

    def messages(self, plan: SchedulerOutput, held: set[bytes]) -> tuple[()]:
        time.sleep(1.5 if plan.step == self._at else 0)
        return ()


def test_workers_that_wait_for_an_image_do_not_hang(monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]) -> None:
    """A step is in flight while the engine encodes, and its result is not taken."""
    load = Crew.load

    def reading(crew: Crew) -> ModelInfo:
        info = load(crew)
        crew.reads_features = True
        return info

    monkeypatch.setattr(step_clock, "LEAST_S", 0.4)
    monkeypatch.setattr(Crew, "load", reading)
    monkeypatch.setattr(sent_features, "sent_features", lambda config, dtype: object())
    monkeypatch.setattr(sent_features, "FeatureSender", SlowSender)
    with Run(EngineConfig(**{**_options(CONFIG), "async_scheduling": True})) as run:
        before = run.executor.pids
        begin = time.monotonic()
        assert run.answer(messages(), {}) == expected()
        assert time.monotonic() - begin > 1.5
        assert run.executor.pids == before
    assert "has not ended" not in logged()


@pytest.mark.soak
def test_an_idle_worker_that_dies_is_started_again() -> None:
    with Run() as run:
        run.kill()()
        news = [run.news.get(timeout=10)[1] for _ in range(2)]
        assert [type(one).__name__ for one in news] == ["ExecutorLost", "ExecutorRestored"]
        assert "was killed by SIGKILL" in news[0].text  # type: ignore[union-attr]
        for one in news:
            run.news.put((0, one))
        assert run.answer(messages(), {}) == expected()


@pytest.mark.soak
def test_a_step_that_always_kills_ends_the_engine() -> None:
    config = with_fake_options(CONFIG, poison="abort:3:20")
    with Run(config) as run, pytest.raises(ExecutorEndedError, match=r"lost 3 times within 60 s; last: worker 0"):
        run.answer(messages(), {})


@pytest.mark.soak
def test_an_exception_in_a_step_is_a_loss_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOSSES", 1)
    config = with_fake_options(CONFIG, poison="raise:3:20")
    with Run(config) as run, pytest.raises(ExecutorEndedError, match="PoisonError: the request is poisoned"):
        run.answer(messages(), {})


def test_errors_of_the_start_are_the_executor_s_own() -> None:
    with pytest.raises(ConfigError, match="executor 'fake': poison must be KIND:TOKEN:POSITION"):
        create(with_fake_options(CONFIG, poison="nonsense"))


@pytest.mark.soak
def test_errors_of_loading_are_the_executor_s_own(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError):
        create(EngineConfig(distributed_executor_backend="mp", model=str(tmp_path / "none")))


@pytest.mark.soak
def test_a_worker_that_dies_before_the_first_step_is_an_error() -> None:
    executor = create(CONFIG)
    try:
        pids = executor.pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EngineStartError, match="was killed by SIGKILL"):
            executor.determine_num_available_blocks(1 << 30, 16)
    finally:
        executor.close()
    wait_until_gone(pids)


def test_a_capture_of_losses_replays_without_a_difference(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lost.cap"
    with Run(EngineConfig(**{**_options(CONFIG), "async_scheduling": True}), capture=path) as run:
        assert run.answer(messages(), {20: run.kill()}) == expected()
    for mode in ("resched", "full"):
        assert main(["replay", str(path), "--mode", mode, "--json"]) == 0
        replayed: dict[str, Any] = json.loads(capfd.readouterr().out)["run"]
        assert replayed["difference"] is None
        assert replayed["num_tokens"] == len(PROMPTS) * LENGTH


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(CONFIG) as engine:
        yield engine


def workers_of(engine: EngineProcess) -> list[int]:
    children = Path(f"/proc/{engine.pid}/task").glob("*/children")
    return [int(pid) for file in children for pid in file.read_text().split()]


def test_sessions_and_streams_go_on_over_a_worker_s_death(engine: EngineProcess) -> None:
    with RawClient(engine.address) as client:
        client.add(1, [5, 6, 7], 1500)
        while len(client.tokens.get(1, [])) < 50:
            client.receive_any()
        (worker,) = workers_of(engine)
        os.kill(worker, signal.SIGKILL)
        client.add(2, [8, 9], 20)  # while there is none
        assert client.finish(1, 2) == [fake_tokens([5, 6, 7], 1500, VOCAB), fake_tokens([8, 9], 20, VOCAB)]
        assert workers_of(engine) != [worker]
        assert client.welcome.epoch == 0


def test_no_worker_outlives_its_engine() -> None:
    with EngineProcess(CONFIG) as engine:
        workers = workers_of(engine)
        assert len(workers) == 1
        os.kill(workers[0], signal.SIGSTOP)  # and so cannot see the end of its socket
        os.kill(engine.pid, signal.SIGKILL)
        wait_until_gone(workers)


def test_two_ends_that_send_much_at_once_do_not_wait_for_each_other() -> None:
    one, other = (Channel(end) for end in socket.socketpair())
    much, received = bytes(8 << 20), list[bytes]()

    def talk() -> None:
        other.send(much)
        received.append(other.receive())

    thread = threading.Thread(target=talk, daemon=True)
    thread.start()
    one.send(much)
    received.append(one.receive())
    thread.join(20)
    assert received == [much, much]
    other.close()
    with pytest.raises(ChannelEndedError):
        one.receive()
    with pytest.raises(ChannelEndedError):
        one.send(b"1")
    one.close()


def test_the_clock_judges_a_size_by_others() -> None:
    clock = step_clock.StepClock(0)
    assert clock.limit_s(1) == 120
    clock = step_clock.StepClock(int(2e9))  # 16 tokens
    assert clock.limit_s(16) == 30
    assert clock.limit_s(128) == 240
    assert clock.limit_s(1) == 30
    clock.note(128, 20.0)
    assert clock.limit_s(130) == 300
    assert step_clock.StepClock(1000).limit_s(1) == step_clock.LEAST_S


def _options(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}
