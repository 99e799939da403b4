"""Requests that wait for the same blocks: each gets its own tokens, waits once for nothing, and many come in turn."""

from itertools import pairwise
from pathlib import Path

import pytest

from core.inputs import EngineInput
from core.kv.orders import Look
from core.scheduling.block_exchange import MAX_AT_ONCE, MAX_WAIT_NS
from ipc.wire.messages import Abort
from tests.core.driving import add_message
from tests.core.scheduling.exchange_driver import BLOCK, ExchangeDriver, exchange_config
from tests.core.scheduling.test_block_exchange import ask, check, filled, prompt

pytestmark = pytest.mark.timeout(60)
ABORT: list[tuple[int, EngineInput]] = [(0, Abort((0).to_bytes(4, "little")))]
OTHER = [*prompt(0)[:BLOCK], *range(300, 329)]  # shares the first block with prompt(0), and no other


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(("second", "cached"), [(OTHER, BLOCK), (prompt(0, 5), 5 * BLOCK)])
def test_blocks_are_named_by_what_was_asked_for_although_the_asker_has_gone(
    tmp_path: Path, second: list[int], cached: int, after: int
) -> None:
    """Before the answer to the look, or to the fetch. The one that has waited with it has other tokens, or fewer."""
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path, exchange_config(num_blocks=60))
    message = add_message(1, second, 2)
    engine.step(add_message(0, prompt(0), 2), message)
    for _ in range(after):
        engine.step()
    engine.driver.step(ABORT)  # before the store answers
    engine.orders += engine.engine.take_orders()
    engine.drain()
    assert check(engine, message, engine.driver.inbox.received[0, 1]) == cached
    assert ask(engine, prompt(0)) == 8 * BLOCK
    assert not engine.driver.scheduler.batch.host_cache.is_busy.any()


def test_blocks_arrive_although_all_who_have_waited_have_gone(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path)
    engine.step(add_message(0, prompt(0), 2))
    engine.step()
    engine.driver.step(ABORT)
    engine.drain()
    assert ask(engine, prompt(0)) == 8 * BLOCK
    assert engine.num_looks == 1


def test_nobody_waits_again_for_what_is_not_there(tmp_path: Path) -> None:
    engine = ExchangeDriver(tmp_path, exchange_config(num_blocks=60))
    messages = [add_message(1, prompt(0), 2), add_message(2, OTHER, 2)]
    engine.step(*messages)
    engine.drain()
    assert engine.num_looks == 1
    for message in messages:
        check(engine, message, engine.driver.inbox.received[0, message.number])


def test_nobody_waits_again_after_the_time_is_up(tmp_path: Path) -> None:
    filled(tmp_path)
    engine = ExchangeDriver(tmp_path, exchange_config(num_blocks=60))
    messages = [add_message(1, prompt(0), 2), add_message(2, OTHER, 2)]
    engine.driver.step([(0, message) for message in messages], now_ns=10)
    assert [type(order) for order in engine.engine.take_orders()] == [Look]
    engine.driver.step(now_ns=11 + MAX_WAIT_NS)
    engine.driver.drain(now_ns=11 + MAX_WAIT_NS)
    found = [check(engine, message, engine.driver.inbox.received[0, message.number]) for message in messages]
    assert found == [0, BLOCK], "the second finds what the first computes"


@pytest.mark.parametrize("is_there", [True, False])
def test_many_begin_and_end_their_wait_in_portions(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        filled(tmp_path)
    engine = ExchangeDriver(tmp_path, exchange_config(num_blocks=60))
    waiting, orders = engine.driver.scheduler.waiting, engine.engine.take_orders
    messages = [add_message(number, prompt(0), 2) for number in range(1, 3 * MAX_AT_ONCE + 1)]
    engine.driver.step([(0, message) for message in messages])
    looks = orders()
    for count in (1, 2, 3):
        assert len(waiting.aside()) == count * MAX_AT_ONCE
        assert waiting.num_ready == (3 - count) * MAX_AT_ONCE
        assert engine.engine.has_work == (count < 3)
        engine.driver.step()
    engine.orders = looks
    left = [len(waiting.aside())]
    while left[-1]:
        engine.step()
        left.append(len(waiting.aside()))
    assert max(before - after for before, after in pairwise(left)) == MAX_AT_ONCE
    engine.drain()
    for message in messages:
        check(engine, message, engine.driver.inbox.received[0, message.number])
    assert engine.num_looks == 1
