"""Prefix cache: names are chained over content and salt; hits are whole blocks, never the last token."""

import numpy as np
import pytest

from core.prefix_cache import block_digest, extend_digests, root_digest
from core.request import Request
from ipc.paged_rows import Int32s
from tests.core.driving import ByHand, Driver, add_message, expected_tokens, small_config

PROMPT = list(range(100, 116))  # four blocks of four


def digests_of(token_ids: list[int], salt: str = "") -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, np.array(token_ids, np.int32), 4, salt)
    return digests


def test_a_digest_covers_all_tokens_before_it() -> None:
    one, other = digests_of(PROMPT), digests_of([1, *PROMPT[1:]])
    assert len(one) == 4
    assert not set(one) & set(other)
    assert digests_of([*PROMPT[:12], 1, 2, 3, 4])[:3] == one[:3]
    assert digests_of([*PROMPT[:12], 1, 2, 3, 4])[3] != one[3]


def test_whole_blocks_only_and_the_same_digests_in_parts_as_at_once() -> None:
    assert digests_of(PROMPT[:15]) == digests_of(PROMPT)[:3]
    digests = digests_of(PROMPT[:8])
    extend_digests(digests, np.array(PROMPT[8:], np.int32), 4, "")
    assert digests == digests_of(PROMPT)
    assert digests_of(PROMPT[:3]) == []


def test_salts_change_every_digest_and_cannot_be_forged() -> None:
    assert not set(digests_of(PROMPT)) & set(digests_of(PROMPT, "a"))
    assert len({root_digest(salt) for salt in ("", "a", "b", "ab", "a\0", "cache_salt")}) == 6
    assert len(root_digest("")) == len(block_digest(root_digest(""), np.zeros(4, np.int32))) == 16


def test_digests_are_the_same_in_every_process() -> None:
    """A log replays only if nothing of hash() or of the machine is in a name."""
    assert digests_of([1, 2, 3, 4], "s")[0].hex() == "6611cdf48b34d778f075543c7fe03b16"


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


def test_waiting_request_hashes_its_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that waits for blocks is looked up in every step, but its digests are kept."""
    hand = ByHand(small_config(num_blocks=9, max_model_len=32))
    hand.add(add_message(1, list(range(20)), max_tokens=12))
    hand.add(add_message(2, list(range(50, 70))))
    hashed = []

    def count(parent: bytes, token_ids: Int32s) -> bytes:
        hashed.append(int(token_ids[0]))
        return block_digest(parent, token_ids)

    monkeypatch.setattr("core.prefix_cache.block_digest", count)
    for _ in range(3):
        hand.step()
    assert sorted(h for h in hashed if h >= 50) == [50, 54, 58, 62, 66]


def test_digests_survive_preemption() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=24))
    hand.add(add_message(1, PROMPT[:10], max_tokens=14))
    hand.add(add_message(2, PROMPT[4:12], max_tokens=14))
    young: Request | None = None
    for _ in range(12):
        hand.step()
        if young is None:
            young = hand.scheduler.table.request[1]
        if hand.scheduler.stats.num_preemptions:
            break
    assert young is not None
    request = hand.scheduler.waiting.head()
    assert request is young
    assert request.digests == digests_of(request.token_ids.tolist())[: len(request.digests)]
    assert len(request.digests) >= 2
