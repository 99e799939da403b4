"""The executor is lost and comes back, at any step and under any options: every request has the tokens it has alone."""

import random
from typing import Any

import pytest

from core.execution.executor import ExecutorEndedError
from core.inputs import EngineInput, ExecutorLost, ExecutorRestored
from ipc.wire.messages import ErrorCode, FinishReason
from tests.core.driving import Driver, add_message, expected_tokens, small_config
from tests.core.mortal_executor import MortalPagedExecutor

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two steps at once": {"depth": 2},
    "few blocks": {"num_blocks": 24, "max_model_len": 80},
    "swapped": {"num_blocks": 24, "max_model_len": 80, "preemption_mode": "swap", "num_swap_blocks": 40},
    "swapped, two steps": {
        "num_blocks": 24,
        "max_model_len": 80,
        "preemption_mode": "swap",
        "num_swap_blocks": 40,
        "depth": 2,
    },
    "no cache": {"prefix_caching": False},
    "by priority": {"scheduling_policy": "priority", "num_blocks": 24, "max_model_len": 80},
    "fair": {"scheduling_policy": "fair", "fair_quantum": 4, "num_blocks": 24, "max_model_len": 80},
    "whole prompts": {"enable_chunked_prefill": False, "budget": 80, "max_model_len": 80},
    "drafts": {"speculative_config": "ngram"},
}


def config_of(name: str) -> Any:
    from ipc.options.speculation import parse_speculative_config

    options = dict(CASES[name])
    if options.pop("speculative_config", None):
        options["speculative_config"] = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 3})
    return small_config(**options)


def disturb(driver: Driver, rng: random.Random, count: int) -> tuple[list[Any], int]:
    """Send `count` requests while the executor is lost again and again; return them and the number of losses."""
    executor, messages, num_losses = driver.executor, [], 0
    assert isinstance(executor, MortalPagedExecutor)
    number, down = 0, 0  # down: steps until the executor comes back
    while number < count or driver.engine.has_unfinished:
        inbox: list[tuple[int, EngineInput]] = []
        for _ in range(rng.randrange(3)):
            if number < count:
                prompt = [7] * 9 + [rng.randrange(3, 900) for _ in range(rng.randrange(1, 30))]
                sampled = {"temperature": 0.9, "seed": rng.getrandbits(60)} if number % 2 else {}
                choices = {"n": 3} if number % 10 == 5 else {}
                message = add_message(number * 10, prompt, rng.randrange(1, 25), **sampled, **choices)
                messages.append(message)
                inbox.append((number % 3, message))
                number += 1
        if down:
            down -= 1
            if not down:
                inbox.append((0, executor.restore()))
        elif rng.random() < 0.15:
            num_losses += 1
            if rng.random() < 0.5:  # known at once, or only when a step was lost by it
                inbox.append((0, executor.lose()))
            else:
                executor.lose()
                driver.step(inbox)
                inbox = [(0, ExecutorLost("a test"))]
            down = rng.randrange(1, 4)
        driver.step(inbox)
        if executor.is_lost:
            assert not driver.engine.has_work or driver.engine.pipeline.num_in_flight
    return messages, num_losses


#: The others are variations of these.
MOST = ("two steps at once", "swapped", "drafts")


@pytest.mark.parametrize(
    "name", [name if name in MOST else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
def test_no_token_differs_over_losses(name: str) -> None:
    driver = Driver(config_of(name), executor=MortalPagedExecutor)
    messages, num_losses = disturb(driver, random.Random(f"{name} 2"), 20)
    assert num_losses > 1
    assert driver.executor.num_lost_steps > 0  # type: ignore[attr-defined]
    for index, message in enumerate(messages):
        for choice in range(message.params.n):
            entry = driver.inbox.received[index % 3, message.number + choice]
            assert entry.finish is FinishReason.LENGTH
            assert entry.tokens == expected_tokens(message, driver.config.max_model_len or 0, choice), (index, choice)


def test_searches_go_on_after_a_loss() -> None:
    params = {"use_beam_search": True, "best_of": 3, "n": 2, "ignore_eos": False}
    messages = [add_message(number * 10, [5 + number] * 9, 8, **params) for number in range(2)]
    quiet = Driver(small_config(max_num_seqs=8))
    quiet.run(*messages)
    driver = Driver(small_config(max_num_seqs=8), executor=MortalPagedExecutor)
    executor = driver.executor
    assert isinstance(executor, MortalPagedExecutor)
    driver.step([(0, message) for message in messages])
    for _ in range(4):
        driver.step()
        driver.step([(0, executor.lose())])
        driver.step([(0, executor.restore())])
        driver.step()
    driver.drain()
    assert {key: entry.tokens for key, entry in driver.inbox.received.items()} == {
        key: entry.tokens for key, entry in quiet.inbox.received.items()
    }


def test_deadlines_and_calls_do_not_wait_for_the_executor() -> None:
    driver = Driver(small_config(), executor=MortalPagedExecutor)
    executor = driver.executor
    assert isinstance(executor, MortalPagedExecutor)
    driver.step([(0, add_message(1, [5] * 4, 50, deadline_ms=10))], now_ns=1)
    driver.step([(0, executor.lose())], now_ns=2)
    assert not driver.engine.has_work
    assert driver.engine.has_unfinished
    driver.step([(0, add_message(2, [6] * 4))], now_ns=20_000_000)
    failed = driver.inbox.received[0, 1].failed
    assert failed is not None
    assert failed.code is ErrorCode.DEADLINE_EXCEEDED
    driver.step([(0, executor.restore())], now_ns=20_000_001)
    driver.drain()
    assert len(driver.inbox.received[0, 2].tokens) == 4


def test_a_pause_stays_over_a_loss() -> None:
    from ipc.wire.messages import Pause, PauseMode, Resume

    driver = Driver(small_config(), executor=MortalPagedExecutor)
    executor = driver.executor
    assert isinstance(executor, MortalPagedExecutor)
    driver.step([(0, add_message(1, [5] * 4, 6))])
    driver.step([(0, Pause(1, PauseMode.ALL)), (0, executor.lose())])
    driver.step([(0, executor.restore())])
    assert not driver.engine.has_work
    driver.step([(0, Resume(2))])
    driver.drain()
    assert len(driver.inbox.received[0, 1].tokens) == 6


def test_the_last_loss_ends_the_engine() -> None:
    driver = Driver(small_config(), executor=MortalPagedExecutor)
    with pytest.raises(ExecutorEndedError, match="three times"):
        driver.step([(0, ExecutorLost("three times", is_final=True))])


def test_an_executor_that_lost_nothing_hears_nothing() -> None:
    driver = Driver(small_config())
    message = add_message(1, [5] * 4, 9)
    driver.step([(0, message)])
    driver.step([(0, ExecutorLost("in the capture"))])
    driver.step([(0, ExecutorRestored())])
    driver.drain()
    assert driver.inbox.received[0, 1].tokens == expected_tokens(message, 396)
