"""Tenants: shares, prefix cache and places of the queue go by whom a request is for, not by who sends it."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from core.scheduling import parties
from ipc.messages import AddRequest
from tests.core.driving import ByHand, add_message, small_config


def of_tenant(number: int, tenant: str, prompt: list[int] | None = None, max_tokens: int = 400) -> AddRequest:
    message = add_message(number, prompt or [1, number % 900], max_tokens)
    return msgspec.structs.replace(message, tenant=tenant)


def by_hand(**options: object) -> ByHand:
    options = {"scheduling_policy": "fair", "fair_quantum": 0, "fake_eos_token_id": 2**20} | options
    return ByHand(small_config(2000, 4, max_model_len=1000, **options))  # type: ignore[arg-type]


def served(hand: ByHand, num_steps: int) -> Counter[int]:
    """Tokens of each request by number, in these steps."""
    counts: Counter[int] = Counter()
    for _ in range(num_steps):
        counts.update(hand.step())
    return counts


@pytest.mark.parametrize("polite_client", [1, 2])
def test_a_tenants_share_does_not_grow_with_its_requests(polite_client: int) -> None:
    """Whether it has a session of its own or not."""
    hand = by_hand(max_num_seqs=4, budget=2)
    for number in range(30):
        hand.add(of_tenant(number, "greedy"), 1)
    served(hand, 50)
    hand.add(of_tenant(100, "polite"), polite_client)
    counts = served(hand, 100)
    assert counts[100] >= 90, "half of 200"
    hand.scheduler.check_integrity()


def test_weights_are_by_tenant_too() -> None:
    hand = by_hand(max_num_seqs=2, budget=1, client_weights={"heavy": 3.0})
    hand.add(of_tenant(0, "light"), 1)
    hand.add(of_tenant(1, "heavy"), 1)
    counts = served(hand, 200)
    assert 2.7 <= counts[1] / counts[0] <= 3.3


def test_a_polite_tenants_next_step_is_its_own() -> None:
    """1,000 requests of another hold a row each no longer than it takes to see that they are ahead."""
    hand = by_hand(max_num_seqs=8, budget=64)
    for number in range(1000):
        hand.add(of_tenant(number, "greedy"), 1)
    hand.add(of_tenant(1000, "polite", max_tokens=2), 1)
    served(hand, 20)
    for number in range(1001, 1011):
        hand.add(of_tenant(number, "polite", max_tokens=2), 1)
        steps = 0
        while hand.scheduler.find(1, number) and steps < 10:
            hand.step()
            steps += 1
        assert steps <= 4, f"{steps} steps for two tokens"


def test_what_one_tenant_has_cached_no_other_finds() -> None:
    prompt = list(range(10, 30))
    hand = by_hand(max_num_seqs=4, budget=64)
    cached = []
    for number, tenant, salt in ((0, "a", ""), (1, "a", ""), (2, "b", ""), (3, "", "a"), (4, "", ""), (5, "b", "")):
        message = msgspec.structs.replace(of_tenant(number, tenant, prompt, 2), cache_salt=salt)
        received = hand.add(message, 1)
        while not received.is_over:
            hand.step()
        cached.append(received.cached)
    assert cached == [0, 16, 0, 0, 0, 16]


def test_tenants_that_are_gone_are_forgotten_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parties, "MAX_IDLE", 3)
    hand = by_hand(max_num_seqs=4, budget=64)
    for number in range(20):
        received = hand.add(of_tenant(number, f"tenant {number}", max_tokens=1), 1)
        while not received.is_over:
            hand.step()
    known = hand.scheduler._parties
    assert list(known._idle) == ["tenant 17", "tenant 18", "tenant 19"]
    assert known._numbers.keys() == known._idle.keys()
    assert not known._num_live
    assert np.count_nonzero(hand.scheduler.policy._times._num_present) == 0  # type: ignore[attr-defined]
