"""Prefix cache: names cover all tokens before and the salt; hits are whole blocks, never the last token."""

import numpy as np
import numpy.typing as npt
import pytest

from core.kv.block_names import hash_blocks
from ipc.tables.arrays import Int32s
from tests.core.driving import ByHand, Driver, add_message, expected_tokens, small_config
from tests.placed import PREFIX

PROMPT = list(range(100, 116))  # four blocks of four


@pytest.mark.parametrize(
    ("num_shared", "length", "hits"),
    [
        (16, 17, 16),  # all whole blocks
        (16, 16, 12),  # the last token has to be computed, and so its block
        (15, 20, 12),
        (12, 13, 12),
        (4, 8, 4),
        (3, 8, 0),
    ],
)
def test_hits_end_at_a_block_boundary_before_the_last_token(num_shared: int, length: int, hits: int) -> None:
    driver = Driver(small_config())
    (first,) = driver.run(add_message(1, PROMPT))
    assert first.cached == 0
    prompt = PROMPT[:num_shared] + list(range(500, 500 + length - num_shared))
    message = add_message(2, prompt)
    (second,) = driver.run(message)
    assert second.cached == hits
    assert second.tokens == expected_tokens(message, 396)


@pytest.mark.parametrize("depth", [1, 2])
def test_output_tokens_are_found_in_the_next_turn(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    (first,) = driver.run(add_message(1, PROMPT[:6], max_tokens=8))
    turn = PROMPT[:6] + first.tokens + [9, 9, 9]
    (second,) = driver.run(add_message(2, turn))
    # 14 tokens; the last one was sampled and never computed, so the third block is the last whole one
    assert second.cached == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_salts_isolate(depth: int) -> None:
    driver = Driver(small_config(depth=depth))
    driver.run(add_message(1, PROMPT, salt="alice"))
    bob, nobody, alice = (driver.run(add_message(n, PROMPT, salt=s))[0] for n, s in ((2, "bob"), (3, ""), (4, "alice")))
    assert (bob.cached, nobody.cached, alice.cached) == (0, 0, 12)


def test_a_salt_covers_blocks_that_only_output_fills() -> None:
    driver = Driver(small_config())
    (first,) = driver.run(add_message(1, PROMPT[:2], max_tokens=12, salt="alice"))  # its prompt fills no block
    turn = PROMPT[:2] + first.tokens
    bob, nobody, alice = (driver.run(add_message(n, turn, salt=s))[0] for n, s in ((2, "bob"), (3, ""), (4, "alice")))
    assert (bob.cached, nobody.cached, alice.cached) == (0, 0, 12)


def test_requests_that_start_in_the_same_step_share_blocks() -> None:
    hand = ByHand(small_config())
    first, second = hand.add(add_message(1, [*PROMPT, 1])), hand.add(add_message(2, [*PROMPT, 2]))
    assert hand.step() == {1: 17, 2: 1}
    assert (first.cached, second.cached) == (0, 16)
    pool = hand.scheduler.pool
    assert np.count_nonzero(pool.ref_count == 2) == 4
    assert pool.num_free == 99 - 6


def test_same_step_sharing_covers_only_what_the_step_computes() -> None:
    hand = ByHand(small_config(budget=10))
    hand.add(add_message(1, [*PROMPT, 1]))
    assert hand.step() == {1: 10}
    late = hand.add(add_message(2, [*PROMPT, 2]))
    assert hand.step() == {1: 7, 2: 3}
    assert late.cached == 8  # of the running row the step before; its blocks of this step have no names yet


def test_same_step_sharing_gives_the_same_tokens() -> None:
    for depth in (1, 2):
        driver = Driver(small_config(depth=depth))
        messages = [add_message(n, [*PROMPT, n], max_tokens=9) for n in range(5)]
        for message, got in zip(messages, driver.run(*messages), strict=True):
            assert got.tokens == expected_tokens(message, 396)
            assert got.cached == (16 if message.number else 0)


def test_two_requests_that_compute_the_same_content_keep_their_own_blocks() -> None:
    driver = Driver(small_config(budget=8))
    one = add_message(1, PROMPT[:8], max_tokens=12)
    driver.step([(0, one)])
    two = add_message(2, PROMPT[:8], max_tokens=12)
    driver.step([(0, two)])
    driver.drain()
    received = driver.inbox.received
    assert received[0, 2].tokens == received[0, 1].tokens == expected_tokens(one, 396)
    assert received[0, 2].cached == 4  # the rest both compute; the first block of a content keeps the name


def test_disabled_cache_finds_and_names_nothing() -> None:
    driver = Driver(small_config(prefix_caching=False))
    driver.run(add_message(1, PROMPT))
    (again,) = driver.run(add_message(2, PROMPT))
    assert again.cached == 0
    assert len(driver.scheduler.pool.names) == 0


def test_a_waiting_request_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that waits for blocks is looked up in every step; its hashes are kept."""
    hand = ByHand(small_config(num_blocks=9, max_model_len=32))
    hashed = []

    def count(token_ids: Int32s) -> npt.NDArray[np.uint64]:
        hashed.extend(token_ids[:, 0].tolist())
        return hash_blocks(token_ids)

    monkeypatch.setattr(f"{PREFIX}core.batch.prefix_cache.hash_blocks", count)
    hand.add(add_message(1, list(range(20)), max_tokens=12))
    hand.add(add_message(2, list(range(50, 70))))
    for _ in range(3):
        hand.step()
    assert hand.scheduler.get_request_counts() == (1, 1)
    assert sorted(first for first in hashed if first >= 50) == [50, 54, 58, 62, 66]


def test_hashes_grow_with_a_preempted_request() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=24))
    hand.add(add_message(1, PROMPT[:10], max_tokens=14))
    hand.add(add_message(2, PROMPT[4:9], max_tokens=14))
    for _ in range(12):
        hand.step()
        if hand.scheduler.stats.num_preemptions:
            break
    request = hand.scheduler.waiting.peek()
    assert request is not None
    assert request.number == 2
    count = request.num_tokens // 4
    assert count == 2
    assert request.block_hashes == hash_blocks(request.token_ids[: 4 * count].reshape(-1, 4)).tolist()
