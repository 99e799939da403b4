"""Pooling requests in the whole engine core: beside generation, in chunks, from the cache, preempted, aborted, late."""

import random
from pathlib import Path

import numpy as np
import pytest

from core.capture.engine import CapturedEngine, start_capture
from core.engine import EngineCore
from core.execution.plan import PooledColumns, SchedulerOutput
from core.executors.fake import FakeExecutor, checksum, fake_vector
from core.inputs import EngineInput, EngineReply
from core.pooling.pooler import Dense, Pooler
from frontend.client.journal import vectors_of
from ipc.errors import MalformedMessageError
from ipc.options.config import EngineConfig
from ipc.params.pooling_params import PoolingParams
from ipc.tables.arrays import Floats
from ipc.wire.messages import Abort, AddRequest, ErrorCode, FinishReason, Outputs, RequestFailed
from ipc.wire.pooling_messages import AddPooling, Pooled
from tests.columns import pack_numbers
from tests.core.driving import VOCAB_SIZE, add_message, expected_tokens, small_config, unpack
from tests.fake_options import fake_options
from tests.in_turn import in_turn
from tools.cli import main


def pooling(number: int, ids: list[int], task: str = "embed", **fields: object) -> AddPooling:
    params = PoolingParams(task=task, dimensions=fields.pop("dimensions", None))  # type: ignore[arg-type]
    return AddPooling(number, np.array(ids, "<i4").tobytes(), params, **fields)  # type: ignore[arg-type]


def expected(message: AddPooling) -> Floats:
    ids = np.frombuffer(message.prompt_token_ids, "<i4")
    ends = range(1, len(ids) + 1) if message.params.task == "token_embed" else [len(ids)]
    return np.stack([fake_vector(checksum(ids[:end]))[: message.params.dimensions] for end in ends])


class Client:
    """An engine core with the fake executor, and what its clients have received."""

    def __init__(self, config: EngineConfig, capture: Path | None = None) -> None:
        executor = FakeExecutor(config)
        executor.initialize_cache(config)
        self.engine: EngineCore | CapturedEngine = EngineCore(config, executor)
        self.writer = None
        if capture is not None:
            self.writer = start_capture(str(capture), config, executor.info, "test", 0)
            self.engine = CapturedEngine(config, executor, self.writer)
        core = self.engine.engine if isinstance(self.engine, CapturedEngine) else self.engine
        self.scheduler = core.scheduler
        self.vectors: dict[tuple[int, int], Floats] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finish: dict[tuple[int, int], FinishReason] = {}
        self.failed: dict[tuple[int, int], RequestFailed] = {}
        self.cached: dict[tuple[int, int], int] = {}

    def step(self, *messages: EngineInput, client: int = 0, now_ns: int = 0) -> None:
        self.take(self.engine.step([(client, message) for message in messages], now_ns))

    def take(self, replies: list[tuple[int, EngineReply]]) -> None:
        self.scheduler.check_integrity()
        for client, reply in replies:
            if isinstance(reply, RequestFailed):
                self.failed[client, reply.number] = reply
            if not isinstance(reply, Outputs):
                continue
            for number, vectors in vectors_of(reply.pooled) if reply.pooled is not None else ():
                assert (client, number) not in self.vectors, f"request {number} has vectors twice"
                self.vectors[client, number] = vectors
            for number, position, tokens, finish in unpack(reply):
                key = client, number
                assert key not in self.finish, f"request {number} ends twice"
                assert position == len(self.tokens.setdefault(key, []))
                self.tokens[key] += tokens
                if finish:
                    self.finish[key] = finish
            for number, cached in np.frombuffer(reply.started, "<u4").reshape(-1, 2).tolist():
                self.cached[client, number] = cached

    def drain(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                pool = self.scheduler.pool
                assert (pool.num_free, pool.num_fenced) == (pool.num_blocks - 1, 0)
                return
            self.step()
        raise AssertionError(f"still at work: {self.scheduler.get_request_counts()}")

    def check(self, message: AddPooling, client: int = 0) -> None:
        key = client, message.number
        assert np.array_equal(self.vectors[key], expected(message)), key
        assert (self.tokens[key], self.finish[key]) == ([], FinishReason.STOP)


IDS = list(range(10, 33))  # 23 tokens: the last block of four is not whole


@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize("budget", [4, 5, 64])
@pytest.mark.parametrize("depth", [1, 2])
def test_vectors_of_one_request(task: str, budget: int, depth: int) -> None:
    client, message = Client(small_config(budget=budget, depth=depth)), pooling(1, IDS, task, dimensions=3)
    client.step(message)
    client.drain()
    client.check(message)
    assert client.scheduler.stats.num_generation_tokens == 0
    assert client.scheduler.stats.num_scheduled_tokens == len(IDS)  # the last token is computed, and nothing after it


def test_a_prompt_may_fill_the_context() -> None:
    client = Client(small_config(num_blocks=6, budget=8))
    message = pooling(1, list(range(20)))
    client.step(message)
    client.drain()
    client.check(message)


def test_the_second_request_finds_the_first_ones_blocks_and_token_vectors_do_not() -> None:
    client = Client(small_config())
    again, each, salted = pooling(2, [*IDS, 9]), pooling(3, IDS, "token_embed"), pooling(4, IDS, cache_salt="other")
    for message in (pooling(1, IDS), again, each, salted):
        client.step(message)
        client.drain()
        client.check(message)
    assert client.cached == {(0, 1): 0, (0, 2): 20, (0, 3): 0, (0, 4): 0}


def test_generation_finds_the_blocks_of_a_pooled_prompt() -> None:
    client, message = Client(small_config()), add_message(2, IDS)
    client.step(pooling(1, IDS))
    client.drain()
    client.step(message)
    client.drain()
    assert client.cached[0, 2] == 20
    assert client.tokens[0, 2] == expected_tokens(message, 396)


@pytest.mark.parametrize(
    ("policy", "mode", "depth"), in_turn(["fcfs", "priority", "fair"], ["recompute", "swap"], [1, 2])
)
def test_a_mixed_load_short_of_blocks(depth: int, policy: str, mode: str) -> None:
    """Preempted, swapped, aborted beside generation: each request has what it would have alone."""
    rng = random.Random(depth)
    options = {"num_swap_blocks": 8} if mode == "swap" else {}
    config = small_config(14, budget=24, depth=depth, scheduling_policy=policy, preemption_mode=mode, **options)
    client = Client(config)
    messages: list[tuple[int, AddPooling | AddRequest]] = []
    for number in range(40):
        ids = [*IDS[: rng.randrange(12)], *(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20)))]
        task, priority = rng.choice(["embed", "token_embed", "generate"]), rng.randrange(3)
        message = (
            add_message(number, ids, rng.randrange(1, 20))
            if task == "generate"
            else pooling(number, ids, task, priority=priority, tenant=rng.choice(["", "a"]))
        )
        messages.append((number % 3, message))
        client.step(message, client=number % 3)
    aborted = {(number % 3, number) for number in range(0, 40, 11)}
    for one, number in sorted(aborted):
        client.step(Abort(pack_numbers([number])), client=one)
    client.drain()
    assert client.scheduler.stats.num_preemptions > 0
    for one, message in messages:
        if (one, message.number) in aborted and client.finish[one, message.number] == FinishReason.ABORT:
            assert (one, message.number) not in client.vectors
        elif isinstance(message, AddPooling):
            client.check(message, one)
        else:
            assert client.tokens[one, message.number] == expected_tokens(message, 52)


def test_deadline_abort_and_a_vector_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(small_config(budget=4))
    client.step(pooling(1, IDS, deadline_ms=1), pooling(2, IDS))
    client.step(Abort(pack_numbers([2])), now_ns=2_000_000)
    client.drain()
    assert client.failed[0, 1].code == ErrorCode.DEADLINE_EXCEEDED
    assert client.finish == {(0, 2): FinishReason.ABORT}
    monkeypatch.setattr(FakeExecutor, "_pooled", _without_vectors)
    client.step(pooling(3, IDS))
    client.drain()
    client.step(add_message(4, IDS))
    client.drain()
    assert client.failed[0, 3].code == ErrorCode.NUMERIC
    assert client.cached[0, 4] == 0, "the blocks of a failed request are found"


def _without_vectors(executor: FakeExecutor, plan: SchedulerOutput) -> PooledColumns | None:
    real = _REAL(executor, plan)
    return real and PooledColumns(real.rows, np.zeros_like(real.counts), real.widths, real.values[:0])


_REAL = FakeExecutor._pooled


def test_a_capture_with_pooling_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pooled.cap"
    client = Client(small_config(14, budget=9, executor_options=fake_options(max_model_len=100)), path)
    for number in range(12):
        ids = list(range(number, number + 17))
        client.step(pooling(number, ids, "token_embed") if number % 2 else add_message(number, ids))
        client.step(pooling(100 + number, ids))
    client.drain()
    assert client.writer is not None
    client.writer.close()
    for mode in ("resched", "full"):
        assert main(["replay", str(path), "--mode", mode]) == 0, capsys.readouterr()


def test_columns_of_vectors_that_do_not_fit() -> None:
    good = Pooled(*(np.array(column, "<u4").tobytes() for column in ([5], [1], [2])), bytes(8))
    assert [(number, vectors.shape) for number, vectors in vectors_of(good)] == [(5, (1, 2))]
    for bad in (
        Pooled(good.numbers, good.counts, b"", good.values),
        Pooled(good.numbers, good.counts, good.widths, bytes(12)),
        Pooled(b"123", good.counts, good.widths, good.values),
    ):
        with pytest.raises(MalformedMessageError):
            list(vectors_of(bad))


def test_a_sigmoid_of_any_logit() -> None:
    """Warnings are errors here."""
    logits = np.array([-1e308, -1e4, -709.5, -708.0, -88.0, -1.5, 0.0, 3.0, 1e4])
    pooler = Pooler("cls", 1, classifier=(Dense(np.ones((1, 1)), None),), activation="sigmoid")
    found = pooler(logits[:, None], PoolingParams("classify"))[:, 0]
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert np.array_equal(found[3:], np.reciprocal(1.0 + np.exp(-logits[3:])).astype(np.float32))
