"""What the second turn of a long conversation computes, with recurrent layers: the new text and little else.

Every state is read back in each step (tests/core/stateful_executor.py). Tokens are counted, so no clock matters.
"""

import random
from pathlib import Path

import msgspec
import pytest

from tests.core.driving import Driver, add_message, small_config
from tests.core.scheduling.exchange_driver import ExchangeDriver, exchange_config
from tests.core.stateful_executor import StatefulExecutor

FIRST = 20_000  # tokens of the first turn
MOST = FIRST * 3 // 100  # that a second one may compute
ROWS = 4


@pytest.fixture(name="driver")
def make_driver() -> Driver:
    config = small_config(4000, 16, ROWS, 2048, max_model_len=FIRST + 2000)
    config = msgspec.structs.replace(config, kv_cache_memory_bytes=2 * (ROWS + 4 * ROWS + 128))  # a state is one byte
    return Driver(config, executor=StatefulExecutor)


def text(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(count)]


def computed(driver: Driver, number: int, prompt: list[int], max_tokens: int = 1) -> tuple[int, list[int]]:
    """Return how many tokens the engine computes up to the first one of the answer, and the answer."""
    stats = driver.scheduler.stats
    before = stats.num_scheduled_tokens
    (received,) = driver.run(add_message(number, prompt, max_tokens))
    return stats.num_scheduled_tokens - before - (max_tokens - 1), received.tokens


def test_the_next_turn_computes_the_answer_and_the_new_text(driver: Driver) -> None:
    first = text(FIRST, 1)
    cold, answer = computed(driver, 1, first, 100)
    assert cold == FIRST
    again, _ = computed(driver, 2, [*first, *answer, *text(200, 2)])
    assert again <= 100 + 200 + 16  # and the last part of a block
    assert again <= MOST


@pytest.mark.parametrize("seed", range(6))
def test_a_partial_prefix_is_found_at_its_second_sighting(driver: Driver, seed: int) -> None:
    """The place where prompts leave each other is not known when the first one comes."""
    common, new = FIRST - random.Random(seed).randrange(1, 400), 50
    shared = text(common, 10 + seed)
    computed(driver, 1, [*shared, *text(FIRST - common, 100 + seed)])
    second, _ = computed(driver, 2, [*shared, *text(new, 200 + seed)])
    assert second <= MOST
    third, _ = computed(driver, 3, [*shared, *text(new, 300 + seed)])
    assert third <= new + 16  # the second one has left a state there


def test_a_conversation_goes_on_among_others(driver: Driver) -> None:
    """Each turn finds the one before, though other conversations take slots of states between."""
    talk, number = text(FIRST, 1), 1
    computed(driver, number, talk)
    for turn in range(4):
        for other in range(2):
            number += 1
            computed(driver, number, text(3000, 1000 + 10 * turn + other))
        talk += text(150, 50 + turn)
        number += 1
        assert computed(driver, number, talk)[0] <= 150 + 16


def test_the_next_turn_after_a_death_computes_what_is_new(tmp_path: Path) -> None:
    """Blocks and states come from the folder of an engine of which nothing else is left."""
    count = 4000  # tokens, in 1,000 files
    config = exchange_config(2200, 1100, max_num_seqs=ROWS, budget=512, max_model_len=count + 200)
    config = msgspec.structs.replace(config, kv_cache_memory_bytes=2 * (ROWS + 4 * ROWS + 128))
    before = ExchangeDriver(tmp_path, config, executor=StatefulExecutor)
    first = text(count, 1)
    answer = before.run(add_message(1, first, 20)).tokens
    before.close()
    after = ExchangeDriver(tmp_path, config, executor=StatefulExecutor)
    after.run(add_message(2, [*first, *answer, *text(30, 2)], 1))
    assert after.engine.scheduler.stats.num_scheduled_tokens <= 20 + 30 + 4
    after.close()
