"""Blocks that the KV cache evicts are found again on the host, with the same tokens for every request.

The executor keeps what the blocks and the host's slots hold, and reads every context back.
"""

import random

import msgspec
import numpy as np
import pytest

from core.execution.plan import SchedulerOutput
from core.inputs import ExecutorLost, ExecutorRestored
from ipc.wire.messages import ResetPrefixCache
from tests.core.driving import Driver, add_message, expected_tokens, small_config
from tests.in_turn import in_turn

BLOCK = 4


class Copies(list[tuple[int, int]]):
    """(blocks copied out, blocks copied back) of each plan."""


def watched(num_host_blocks: int, num_blocks: int = 12, **options: object) -> tuple[Driver, Copies]:
    driver = Driver(small_config(num_blocks, num_host_blocks=num_host_blocks, **options))  # type: ignore[arg-type]
    copies, execute = Copies(), driver.executor.execute

    def note(plan: SchedulerOutput) -> object:
        copies.append((len(plan.swapped_out_blocks), len(plan.swapped_in_blocks)))
        return execute(plan)

    driver.executor.execute = note  # type: ignore[method-assign,assignment]
    return driver, copies


def prompt(first: int, num_blocks: int = 8) -> list[int]:
    return list(range(first, first + num_blocks * BLOCK + 1))


def cached(driver: Driver, tokens: list[int]) -> int:
    """Run one request, and return how many of its tokens were found."""
    message = add_message(len(driver.inbox.received), tokens, 2)
    (entry,) = driver.run(message)
    assert entry.tokens == expected_tokens(message, driver.config.max_model_len or 0)
    assert entry.cached is not None
    return entry.cached


def test_an_evicted_prompt_comes_back_without_being_computed() -> None:
    driver, copies = watched(20)
    assert cached(driver, prompt(0)) == 0
    assert cached(driver, prompt(100)) == 0  # there is room for one of them in the KV cache
    assert sum(out for out, _ in copies) > 0
    assert cached(driver, prompt(0)) == 8 * BLOCK
    assert cached(driver, prompt(100)) == 8 * BLOCK
    assert sum(back for _, back in copies) == driver.scheduler.batch.host_cache.num_hits > 8


def test_without_slots_nothing_is_copied() -> None:
    driver, copies = watched(0)
    assert [cached(driver, prompt(0)), cached(driver, prompt(100))] == [0, 0]
    assert cached(driver, prompt(0)) < 8 * BLOCK
    assert sum(out + back for out, back in copies) == 0


def test_what_is_there_is_not_copied_again() -> None:
    driver, copies = watched(40)
    for _ in range(4):
        for number in (1, 2, 3):
            cached(driver, prompt(100 * number))
    assert sum(out for out, _ in copies) <= 3 * 9, "each block of three prompts and answers once"


def test_the_least_recently_used_make_room() -> None:
    driver, _ = watched(10)
    for number in (1, 2, 3, 4):
        cached(driver, prompt(100 * number))
    found = [cached(driver, prompt(400)), cached(driver, prompt(100))]
    assert found[0] == 8 * BLOCK
    assert found[1] == 0


def test_a_longer_prompt_goes_on_after_what_both_have() -> None:
    """Its beginning is in the KV cache, the middle on the host, and the rest is computed."""
    driver, _ = watched(20)
    cached(driver, prompt(0))
    cached(driver, prompt(100, 4))
    assert cached(driver, prompt(0, 9)) == 8 * BLOCK


def test_a_reset_empties_the_host_too() -> None:
    driver, _ = watched(20)
    cached(driver, prompt(0))
    cached(driver, prompt(100))
    driver.step([(0, ResetPrefixCache(1))])
    assert driver.scheduler.batch.host_cache.num_kept == 0
    assert cached(driver, prompt(0)) == 0


def test_a_lost_executor_takes_the_host_with_it() -> None:
    driver, _ = watched(20)
    cached(driver, prompt(0))
    cached(driver, prompt(100))
    driver.step([(0, ExecutorLost("it died", False)), (0, ExecutorRestored())])
    assert driver.scheduler.batch.host_cache.num_kept == 0
    assert cached(driver, prompt(0)) == 0


def test_salts_do_not_meet_on_the_host() -> None:
    driver, _ = watched(20)
    for number, salt in ((1, "a"), (2, "b"), (3, "a")):
        (entry,) = driver.run(add_message(number, prompt(0), 2, salt=salt))
        assert entry.cached == (8 * BLOCK if number == 3 else 0)


@pytest.mark.parametrize(("num_host_blocks", "mode", "depth"), in_turn([1, 5, 60], ["recompute", "swap"], [1, 2]))
def test_many_requests_have_their_own_tokens(num_host_blocks: int, mode: str, depth: int) -> None:
    """Conversations that come back, several at once, with preemptions and aborts of nobody."""
    rng = random.Random(num_host_blocks)
    swap = {"preemption_mode": mode, "num_swap_blocks": 12 if mode == "swap" else 0}
    driver, copies = watched(num_host_blocks, 16, depth=depth, max_num_seqs=4, budget=17, max_model_len=44, **swap)
    messages = []
    for number in range(120):
        length = rng.randrange(3, 38)
        message = add_message(number, prompt(50 * rng.randrange(5))[:length], rng.randrange(1, 6))
        messages.append(msgspec.structs.replace(message, priority=rng.randrange(3)))
    for number, message in enumerate(messages):
        driver.step([(0, message)])
        if number % 7 == 0:
            driver.drain()
    driver.drain()
    for message in messages:
        received = driver.inbox.received[0, message.number].tokens
        assert received == expected_tokens(message, driver.config.max_model_len or 0)
    assert np.array(copies).sum(0).min() > 0, "copies went both ways"
