"""KV blocks go to a folder and come back, for this engine and the next one, with the same tokens for every request."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from core.capture import writer as capture_writer
from core.capture.engine import CapturedEngine, start_capture
from core.capture.file import CaptureFile
from core.capture.redaction import redact
from core.capture.restore import restore
from core.capture.snapshot import Snapshot
from core.engine import EngineCore
from core.executors.fake import FakeExecutor
from core.inputs import BlocksArrived, BlocksFound, BlocksStored, EngineInput, ExecutorLost, ExecutorRestored
from core.kv.orders import Fetch
from core.scheduling.block_exchange import MAX_WAIT_NS, WAIT_NS_PER_TOKEN
from core.tiers import block_file
from ipc.options.config import EngineConfig
from ipc.wire.messages import Abort, AddRequest, ResetPrefixCache
from ipc.wire.scheduling_messages import Explain, Explanation, Reason
from tests.core.capture.test_checkpoints import replay_from_each
from tests.core.driving import Received, add_message, expected_tokens
from tests.core.scheduling.exchange_driver import BLOCK, ExchangeDriver, exchange_config
from tests.fake_options import fake_options
from tools.lab.check_scheduler.paged_executor import PagedExecutor

pytestmark = pytest.mark.timeout(60)


def prompt(first: int, num_blocks: int = 8) -> list[int]:
    return list(range(first, first + num_blocks * BLOCK + 1))


def check(engine: ExchangeDriver, message: AddRequest, entry: Received) -> int:
    """Compare the tokens with the oracle; return how many tokens of the prompt were found."""
    assert entry.tokens == expected_tokens(message, engine.config.max_model_len or 0)
    assert entry.cached is not None
    return entry.cached


def ask(engine: ExchangeDriver, tokens: list[int], salt: str = "") -> int:
    message = add_message(len(engine.driver.inbox.received), tokens, 2, salt=salt)
    return check(engine, message, engine.run(message))


def filled(folder: Path) -> None:
    """Let an engine leave the blocks of prompt(0) in the folder."""
    engine = ExchangeDriver(folder)
    for number in range(4):
        assert ask(engine, prompt(100 * number)) == 0
    engine.close()


def test_the_next_engine_finds_the_blocks(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    assert ask(engine, prompt(0)) == 8 * BLOCK
    assert engine.reads == [(1, 8)]
    statistics = engine.engine.statistics(0)
    assert (statistics.num_fetched_blocks, statistics.num_host_hits) == (8, 8)
    assert ask(engine, prompt(0)) == 8 * BLOCK, "this time from the KV cache"
    assert len(engine.reads) == 1


@pytest.mark.parametrize("saves", [True, False])
def test_blocks_are_written_from_the_cache_and_on_their_way_through_the_host(tmp_path: Path, saves: bool) -> None:
    engine = ExchangeDriver(tmp_path)
    engine.saves = saves
    ask(engine, prompt(0))
    assert len(os.listdir(tmp_path / "blocks")) == (8 if saves else 0)
    for number in (1, 2):
        ask(engine, prompt(100 * number))
    assert len(os.listdir(tmp_path / "blocks")) >= 12
    assert engine.engine.statistics(0).num_stored_blocks == len(os.listdir(tmp_path / "blocks"))


def test_a_block_that_is_evicted_while_it_is_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content number may even be there again: the count of evictions tells."""
    engine = ExchangeDriver(tmp_path)
    engine.saves = False
    ask(engine, prompt(0))
    assert engine.store.has_unsaved
    assert engine.exchange is not None
    evictions, write = engine.exchange.evictions, block_file.write_block

    def evict(fd: int, name: bytes, parts: list[memoryview], key: bytes) -> None:
        write(fd, name, parts, key)
        evictions[:] += 1

    monkeypatch.setattr(block_file, "write_block", evict)
    while engine.store.has_unsaved:
        engine.store.save_one()
    assert os.listdir(tmp_path / "blocks") == []


def test_a_longer_prompt_goes_on_after_what_is_there(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    assert ask(engine, prompt(0, 9)) == 8 * BLOCK


def test_salts_and_models_do_not_meet(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    assert ask(engine, prompt(0), salt="mine") == 0
    other = ExchangeDriver(tmp_path, exchange_config(executor_options=fake_options(eos_token_id=3)))
    assert other.driver.executor.info.fingerprint != engine.driver.executor.info.fingerprint
    assert ask(other, prompt(0)) == 0


def test_a_request_waits_without_a_row_and_without_blocks(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    message = add_message(1, prompt(0), 2)
    engine.step(message)
    scheduler = engine.driver.scheduler
    for _ in range(2):  # look, fetch
        assert not engine.engine.has_work
        assert (len(scheduler.batch), len(scheduler.waiting)) == (0, 1)
        assert scheduler.pool.num_free == scheduler.pool.num_blocks - 1
        (_, answer) = engine.engine.step([(0, Explain(7, limit=10))], 0)[0]
        assert isinstance(answer, Explanation)
        assert [one.reason for one in answer.requests] == [Reason.FETCHING]
        engine.orders += engine.engine.take_orders()
        engine.step()
    engine.drain()
    assert check(engine, message, engine.driver.inbox.received[0, 1]) == 8 * BLOCK


def test_others_run_while_one_waits(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    slow, quick = add_message(1, prompt(0), 2), add_message(2, [5, 6, 7], 2)
    engine.driver.step([(0, slow), (0, quick)])
    engine.driver.step()
    entry = engine.driver.inbox.received[0, 2]
    assert entry.tokens == expected_tokens(quick, engine.config.max_model_len or 0)
    assert engine.driver.inbox.received[0, 1].tokens == []


def test_equal_prompts_are_fetched_once(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path, exchange_config(num_blocks=60))
    messages = [add_message(number, prompt(0), 2) for number in range(1, 6)]
    engine.step(*messages)
    engine.drain()
    found = [check(engine, message, engine.driver.inbox.received[0, message.number]) for message in messages]
    assert found == [8 * BLOCK] * 5
    assert engine.reads == [(1, 8)]
    assert engine.num_looks == 1


def test_a_short_prompt_asks_nobody(tmp_path: Path) -> None:
    engine = ExchangeDriver(tmp_path)
    assert ask(engine, prompt(0, 3)) == 0
    assert engine.num_looks == 0


def test_a_prompt_that_is_nowhere_makes_no_room(tmp_path: Path) -> None:
    """A miss must not cost the host cache a block."""
    engine = ExchangeDriver(tmp_path, exchange_config(num_host_blocks=18))
    for number in range(3):
        ask(engine, prompt(100 * number))
    kept = engine.driver.scheduler.batch.host_cache.num_kept
    engine.step(add_message(90, prompt(900), 2))
    engine.step()
    assert engine.driver.scheduler.batch.host_cache.num_kept >= kept
    engine.drain()


def test_what_takes_too_long_is_computed(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    message = add_message(1, prompt(0), 2)
    engine.driver.step([(0, message)], now_ns=10)
    late = engine.engine.take_orders()
    engine.driver.step(now_ns=10 + MAX_WAIT_NS)
    assert not engine.engine.has_work
    engine.driver.step(now_ns=11 + MAX_WAIT_NS)
    engine.driver.drain()
    assert check(engine, message, engine.driver.inbox.received[0, 1]) == 0
    engine.orders = late
    engine.drain()
    assert engine.reads == []


def test_the_wait_for_blocks_that_are_there_is_as_long_as_computing_them(tmp_path: Path) -> None:
    """A large model's blocks take a busy machine seconds to read, and a minute to compute."""
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    message = add_message(1, prompt(0), 2)
    engine.driver.step([(0, message)], now_ns=10)
    found = [engine.store.carry_out(order) for order in engine.engine.take_orders()]
    engine.driver.step([(0, one) for one in found if one is not None], now_ns=20)
    late = engine.engine.take_orders()
    (fetch,) = (order for order in late if isinstance(order, Fetch))
    until = 10 + MAX_WAIT_NS + len(fetch.slots) * BLOCK * WAIT_NS_PER_TOKEN
    engine.driver.step(now_ns=until)
    assert not engine.engine.has_work, "it still waits"
    engine.driver.step(now_ns=until + 1)
    engine.driver.drain()
    assert check(engine, message, engine.driver.inbox.received[0, 1]) == 0
    engine.orders = late
    engine.drain()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_aborted_request_leaves_nothing_behind(tmp_path: Path, after: int) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    engine.step(add_message(0, prompt(0), 20))
    for _ in range(after - 1):
        engine.step()
    engine.step(others=[(0, Abort((0).to_bytes(4, "little")))])
    engine.drain()
    host = engine.driver.scheduler.batch.host_cache
    assert not host.is_busy.any()
    assert ask(engine, prompt(0)) == 8 * BLOCK


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("event", ["reset", "lost"])
def test_blocks_that_come_after_the_cache_was_emptied_are_dropped(tmp_path: Path, after: int, event: str) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    message = add_message(1, prompt(0), 2)
    engine.step(message)
    for _ in range(after - 1):
        engine.step()
    lost: list[tuple[int, EngineInput]] = [(0, ExecutorLost("it died", False)), (0, ExecutorRestored())]
    engine.driver.step([(0, ResetPrefixCache(3))] if event == "reset" else lost)
    engine.drain()
    assert check(engine, message, engine.driver.inbox.received[0, 1]) == 0
    assert not engine.driver.scheduler.batch.host_cache.is_busy.any()


def test_answers_to_nobody_are_ignored(tmp_path: Path) -> None:
    engine = ExchangeDriver(tmp_path)
    engine.driver.step([(0, BlocksFound(9, 3)), (0, BlocksArrived(9, 3)), (0, BlocksStored(9, 3))])
    assert ask(engine, prompt(0)) == 0


def test_a_removed_or_damaged_file_is_computed(tmp_path: Path) -> None:
    """Names are random, so any files are taken: all of them, or one, which cuts one of the four prompts."""
    filled(tmp_path)
    paths = sorted((tmp_path / "blocks").iterdir())
    damage(paths[0], 0)
    found = [ask(ExchangeDriver(tmp_path), prompt(100 * number)) for number in range(4)]
    assert sorted(found)[1:] == [8 * BLOCK] * 3, found
    assert min(found) < 8 * BLOCK
    for number, path in enumerate(paths):
        if number % 2:
            damage(path, number)
        else:
            path.unlink()
    engine = ExchangeDriver(tmp_path)
    assert [ask(engine, prompt(100 * number)) for number in range(4)] == [0, 0, 0, 0]


def damage(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit % len(data)] ^= 1
    path.write_bytes(data)


def test_files_that_go_between_look_and_fetch_are_computed(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    message = add_message(1, prompt(0), 2)
    engine.step(message)
    engine.step()  # the look is answered, the fetch is ordered
    for path in (tmp_path / "blocks").iterdir():
        path.unlink()
    engine.drain()
    assert engine.reads == [(1, 8)]
    assert check(engine, message, engine.driver.inbox.received[0, 1]) == 0


def messages_of(rng: random.Random, count: int) -> list[AddRequest]:
    messages = []
    for number in range(1, count + 1):
        length = rng.randrange(3, 44)
        salt = rng.choice(["", "", "", "a"])
        message = add_message(number, prompt(50 * rng.randrange(6), 11)[:length], rng.randrange(1, 6), salt=salt)
        messages.append(msgspec.structs.replace(message, priority=rng.randrange(3)))
    return messages


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 40))])
def test_many_requests_have_their_own_tokens(tmp_path: Path, seed: int) -> None:
    """Late answers, aborts, preemptions, resets, files that go, a small bound, and engines one after the other.

    With every third seed, blocks behind a window are given back while their requests run.
    """
    rng = random.Random(seed)
    options = {"max_num_seqs": 4, "budget": 17, "max_model_len": 52}
    mode = "swap" if seed % 2 else "recompute"
    swap = {"preemption_mode": mode, "num_swap_blocks": 12 if seed % 2 else 0, "scheduling_policy": "priority"}
    swap["kv_window"] = 30 if seed % 3 == 2 else 0
    play(tmp_path, rng, lambda: exchange_config(rng.choice([6, 20, 60]), 16, **options, **swap), max_bytes=8000)


def play(
    folder: Path,
    rng: random.Random,
    config_of: Callable[[], EngineConfig],
    max_bytes: int,
    executor: type[PagedExecutor] = PagedExecutor,
) -> None:
    """Let three engines serve many requests from one folder, one after the other."""
    asked: list[AddRequest] = []
    num_fetched = num_stored = 0
    for _ in range(3):
        config = config_of()
        engine = ExchangeDriver(folder, config, rng, max_bytes, executor)
        messages, aborted = messages_of(rng, 60), set()
        for message in messages:
            others: list[tuple[int, EngineInput]] = []
            if rng.random() < 0.1:
                aborted.add(number := rng.randrange(1, message.number + 1))
                others.append((0, Abort(number.to_bytes(4, "little"))))
            if rng.random() < 0.03:
                others.append((0, ResetPrefixCache(1)))
            if rng.random() < 0.1 and (files := sorted(os.listdir(folder / "blocks"))):
                (folder / "blocks" / rng.choice(files)).unlink()
            engine.step(message, others=others)
            if rng.random() < 0.2:
                engine.drain()
        engine.drain()
        for message in messages:
            tokens = engine.driver.inbox.received[0, message.number].tokens
            expected = expected_tokens(message, config.max_model_len or 0)
            assert tokens == expected[: len(tokens)]
            assert len(tokens) == len(expected) or message.number in aborted
        asked += messages
        engine.check_files(asked)
        assert engine.exchange is not None
        num_fetched += engine.exchange.num_fetched
        num_stored += engine.exchange.num_stored
        assert not engine.driver.scheduler.batch.host_cache.is_busy.any()
        replay(engine)
        engine.close()
    assert num_fetched > 20, "blocks came back"
    assert num_stored > 20


def replay(engine: ExchangeDriver) -> None:
    """Give the same inputs to an engine without a store: it decides the same, step by step."""
    executor = FakeExecutor(engine.config)
    executor.initialize_cache(engine.config)
    executor.info = engine.driver.executor.info
    again = EngineCore(engine.config, executor)
    for number, (messages, now_ns, replies) in enumerate(engine.driver.log):
        if number % 60 == 10 and not engine.config.async_scheduling:  # the executor runs no step twice
            state = restore(Snapshot(again.state()).encode())
            again = EngineCore(engine.config, executor)
            again.take_over(state)
        assert again.step(messages, now_ns) == replies
        again.scheduler.check_integrity()


def test_a_capture_replays_from_each_checkpoint_and_is_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches are under way at some of them."""
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 6_000)
    rng = random.Random(5)
    filled(tmp_path / "kv")
    engine = ExchangeDriver(tmp_path / "kv", exchange_config(20, 16, max_num_seqs=4, budget=17, max_model_len=52), rng)
    for message in messages_of(rng, 60):
        engine.step(message)
    engine.drain()
    assert engine.exchange is not None
    assert engine.exchange.num_fetched > 8
    check_captures(engine, tmp_path)


def check_captures(engine: ExchangeDriver, folder: Path) -> None:
    """Capture an engine with the same inputs: it replays from each checkpoint, and so does what is redacted."""
    executor = FakeExecutor(engine.config)
    executor.initialize_cache(engine.config)
    path, out = folder / "run.cap", folder / "redacted.cap"
    writer = start_capture(str(path), engine.config, executor.info, "test", 0)
    captured = CapturedEngine(engine.config, executor, writer)
    for number, (messages, _, _) in enumerate(engine.driver.log):
        captured.step(messages, 10**9 + number)
    writer.close()
    assert len(CaptureFile(path).checkpoints) >= 2
    replay_from_each(path)
    redact(CaptureFile(path), str(out))
    replay_from_each(out)
