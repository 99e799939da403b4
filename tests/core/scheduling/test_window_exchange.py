"""Where layers with a window have KV blocks of their own: these go to a folder and come back beside the others."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from core.batch.request import request_from_message
from core.capture import writer as capture_writer
from ipc.options.config import EngineConfig
from ipc.wire.block_roots import root_of_message
from ipc.wire.messages import AddRequest
from tests.core.driving import add_message
from tests.core.scheduling.exchange_driver import BLOCK, ExchangeDriver, exchange_config
from tests.core.scheduling.test_block_exchange import ask, check, check_captures, messages_of, play, prompt

pytestmark = pytest.mark.timeout(60)
WINDOW = 9  # tokens: those of two blocks or three are seen at a block's end
NUM_SEEN = 2  # blocks of the window before the first token of a block


def pages_config(num_host_blocks: int = 80, num_blocks: int = 24, **options: object) -> EngineConfig:
    pages = {"kv_window": WINDOW, "kv_page_blocks": 2, "budget": 16}
    return exchange_config(num_host_blocks, num_blocks, **{**pages, **options})


def filled(folder: Path) -> None:
    """Let an engine leave the blocks of four prompts in the folder."""
    engine = ExchangeDriver(folder, pages_config())
    for number in range(4):
        assert ask(engine, prompt(100 * number)) == 0
    engine.close()


def path_of(engine: ExchangeDriver, tokens: list[int], index: int, *, beside: bool = True) -> Path:
    """The file of a block of a prompt, or of the one beside it."""
    name = list(engine.names.chain(root_of_message(add_message(0, tokens, 1)), np.array(tokens, np.int32)))[index]
    return engine._path / "blocks" / f"{(engine.names.beside(name) if beside else name).hex()}.kv"


def test_the_next_engine_finds_the_blocks_and_reads_the_window_only(tmp_path: Path) -> None:
    filled(tmp_path)
    assert len(os.listdir(tmp_path / "blocks")) == 4 * 2 * 8
    engine = ExchangeDriver(tmp_path, pages_config())
    assert ask(engine, prompt(0)) == 8 * BLOCK
    assert engine.reads == [(1, 8)]
    assert engine.engine.statistics(0).num_fetched_blocks == 8 + NUM_SEEN
    assert ask(engine, prompt(0)) == 8 * BLOCK, "this time from the KV cache"
    assert len(engine.reads) == 1


@pytest.mark.parametrize("num_blocks", [4, 5, 7, 8, 11])
def test_a_hit_ends_where_the_window_before_it_is_there(tmp_path: Path, num_blocks: int) -> None:
    """A shorter prompt's window is read, although nobody has ended there; a longer one goes on after what is there."""
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path, pages_config())
    assert ask(engine, prompt(0, num_blocks)) == min(num_blocks, 8) * BLOCK
    assert engine.engine.statistics(0).num_fetched_blocks == min(num_blocks, 8) + NUM_SEEN


@pytest.mark.parametrize("missing", [{7}, {6}, {5}, {7, 4}, {6, 3}, {1, 3, 5, 7}, {0, 2, 4, 6}, set(range(8))])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_longest_prefix_is_used_whose_window_is_there(tmp_path: Path, missing: set[int], is_damaged: bool) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path, pages_config())
    for index in missing:
        path = path_of(engine, prompt(0), index)
        if is_damaged:
            path.write_bytes(path.read_bytes()[:-1])
        else:
            path.unlink()
    usable = [count for count in range(9) if not missing & set(range(max(0, count - NUM_SEEN), count))]
    expected = usable[-1] * BLOCK
    found = ask(engine, prompt(0))
    if is_damaged and len(missing) > 1:
        assert found in [count * BLOCK for count in usable], "damage is seen by who reads it, twice at most"
    else:
        assert found == expected
    host = engine.driver.scheduler.batch.host_cache
    assert not host.is_busy.any()
    assert [ask(engine, prompt(100 * number)) for number in (1, 2, 3)] == [8 * BLOCK] * 3


def test_what_was_evicted_while_its_request_ran_is_written_from_the_host(tmp_path: Path) -> None:
    """So a shorter prompt is found, although the cache had no room for all blocks of windows of the longer one."""
    long = prompt(0, 11)
    engine = ExchangeDriver(tmp_path, pages_config(num_blocks=14))
    assert ask(engine, long) == 0
    assert engine.driver.scheduler.batch.host_cache.num_kept > 0
    assert [path_of(engine, long, index).exists() for index in range(11)] == [True] * 11
    stored = engine.engine.statistics(0).num_stored_blocks
    assert stored == len(os.listdir(tmp_path / "blocks"))
    ask(engine, long)
    assert engine.engine.statistics(0).num_stored_blocks == stored, "nothing is written twice"
    engine.close()
    assert ask(ExchangeDriver(tmp_path, pages_config()), prompt(0, 5)) == 5 * BLOCK


def test_what_the_host_has_is_stored_once_and_not_while_it_is_written(tmp_path: Path) -> None:
    engine = ExchangeDriver(tmp_path, pages_config(num_blocks=14))
    ask(engine, prompt(0, 11))
    exchange, host = engine.exchange, engine.driver.scheduler.batch.host_cache
    assert exchange is not None
    queue, (own,) = exchange.stores, host.beside
    contents = np.unique(own.content[own.content > 0])
    leads = own.leads_of(contents)
    queue.add_known(contents)
    queue.clear()
    queue.add_known(contents)
    assert not queue.take_orders(lambda: 1)
    host.times_given[leads] += 1
    host._ring.discard(own.slots_of(leads[:1]))  # the plan being made copies to it
    queue.add_known(contents)
    (order,) = queue.take_orders(lambda: 1)
    assert order.is_beside
    assert order.contents.tolist() == contents[1:].tolist()


def test_a_missing_block_of_layers_that_see_everything_ends_the_prefix(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path, pages_config())
    path_of(engine, prompt(0), 6, beside=False).unlink()
    assert ask(engine, prompt(0)) == 6 * BLOCK


def test_only_the_window_comes_back_where_the_cache_has_the_rest(tmp_path: Path) -> None:
    """The pages of windows are evicted first; what they have is on the host then."""
    engine = ExchangeDriver(tmp_path, pages_config(num_blocks=22))
    assert ask(engine, prompt(0)) == 0
    batch, request = engine.driver.scheduler.batch, request_from_message(add_message(0, prompt(0), 1), 0, 0, 52)
    batch.prefix_cache.prepare(request)
    blocks, number = batch.prefix_cache.find_all(request)[0], 1
    while batch.pool.names.beside[0].found[blocks].any():
        ask(engine, prompt(100 * number, 1))
        number += 1
    assert np.array_equal(batch.prefix_cache.find_all(request)[0], blocks)
    assert len(blocks) == 8
    before = batch.host_cache.num_hits
    assert ask(engine, prompt(0)) == 8 * BLOCK
    assert batch.host_cache.num_hits - before == NUM_SEEN * 2


@pytest.mark.parametrize("num_host_blocks", [16, 24])
def test_what_has_no_room_on_the_host_is_not_asked_for(tmp_path: Path, num_host_blocks: int) -> None:
    """Half of the slots: 8 for 4 blocks and a window of two, 12 for 8 blocks and a window."""
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path, pages_config(num_host_blocks))
    assert ask(engine, prompt(0)) == {16: 4, 24: 8}[num_host_blocks] * BLOCK


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))])
def test_many_requests_have_their_own_tokens(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    options = {"max_num_seqs": 4, "budget": 17, "max_model_len": 52, "scheduling_policy": "priority"}
    options |= {"preemption_mode": "swap" if seed % 2 else "recompute", "num_swap_blocks": 24 if seed % 2 else 0}
    options |= {"kv_page_blocks": 1 + seed % 3, "kv_window": rng.choice([1, 9, 14])}
    play(tmp_path, rng, lambda: pages_config(rng.choice([20, 40, 90]), 26, **options), max_bytes=20_000)


def test_a_capture_replays_from_each_checkpoint_and_is_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_writer, "CLOSE_S", 60.0)
    monkeypatch.setattr(capture_writer, "CHECKPOINT_BYTES", 6_000)
    filled(tmp_path / "kv")
    config, rng = pages_config(60, 20, max_num_seqs=4, budget=17, max_model_len=52), random.Random(5)
    engine = ExchangeDriver(tmp_path / "kv", config, rng)
    messages: list[AddRequest] = messages_of(rng, 60)
    for message in messages:
        engine.step(message)
    engine.drain()
    for message in messages:
        check(engine, message, engine.driver.inbox.received[0, message.number])
    assert engine.exchange is not None
    assert engine.exchange.num_fetched > 8
    check_captures(engine, tmp_path)
