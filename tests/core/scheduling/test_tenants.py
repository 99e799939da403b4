"""Tenants: shares, prefix cache and places of the queue go by whom a request is for, not by who sends it."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from core.scheduling import parties
from core.scheduling.policies import RowShares
from ipc.wire.messages import AddRequest
from tests.core.driving import ByHand, add_message, small_config
from tests.fake_options import fake_options


def of_tenant(number: int, tenant: str, prompt: list[int] | None = None, max_tokens: int = 400) -> AddRequest:
    message = add_message(number, prompt or [1, number % 900], max_tokens)
    return msgspec.structs.replace(message, tenant=tenant)


def by_hand(**options: object) -> ByHand:
    options = {
        "scheduling_policy": "fair",
        "fair_quantum": 0,
        "executor_options": fake_options(eos_token_id=2**20),
    } | options
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


@pytest.mark.parametrize("num_newcomers", [1, 3])
def test_a_newcomers_first_token_comes_with_the_next_step(num_newcomers: int) -> None:
    """However few tokens the greedy one is ahead, as long as it holds more rows than are due to it."""
    hand = by_hand(max_num_seqs=8, budget=64, fair_quantum=2**30)
    for number in range(100):
        hand.add(of_tenant(number, "greedy"), 1)
    served(hand, 5)
    for at in range(num_newcomers):
        hand.add(of_tenant(1000 + at, f"newcomer {at}"), 1)
    counts = served(hand, 2)
    assert all(counts[1000 + at] == 2 + 1 for at in range(num_newcomers)), "the prompt, then a token"
    assert hand.scheduler.stats.num_preemptions == num_newcomers


def test_rows_go_to_those_with_fewer_than_are_due_to_them_and_do_not_come_back() -> None:
    """Four rows, two tenants of which one has the weight of three: 1 and 3 rows, after three preemptions in all."""
    hand = by_hand(max_num_seqs=4, budget=64, fair_quantum=2**30, client_weights={"heavy": 3.0})
    for number in range(8):
        hand.add(of_tenant(number, "light"), 1)
    served(hand, 5)
    for number in range(8, 16):
        hand.add(of_tenant(number, "heavy"), 1)
    served(hand, 20)
    counts = served(hand, 80)
    assert sorted(counts) == [0, 8, 9, 10], "the first of each"
    assert hand.scheduler.stats.num_preemptions == 3


def test_more_tenants_than_rows_do_not_take_each_others() -> None:
    hand = by_hand(max_num_seqs=2, budget=64, fair_quantum=2**30)
    for number in range(6):
        hand.add(of_tenant(number, f"tenant {number}"), 1)
    served(hand, 100)
    assert hand.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("seed", range(3))
def test_each_start_takes_one_row_at_most(seed: int) -> None:
    """Tenants of random weights come and go at random: no more preemptions than requests, and all of them end."""
    rng = random.Random(seed)
    weights = {f"tenant {number}": rng.choice([0.5, 1.0, 3.0]) for number in range(5)}
    hand = by_hand(max_num_seqs=6, budget=40, fair_quantum=2**30, client_weights=weights)
    number = 0
    while number < 60 or hand.scheduler.has_unfinished_requests:
        for _ in range(rng.randrange(4) if number < 60 else 0):
            max_tokens = rng.choice([1, 4, 20])
            hand.add(of_tenant(number, f"tenant {rng.choice([0, 0, 0, 1, 2, 3, 4])}", max_tokens=max_tokens), 1)
            number += 1
        hand.step()
    hand.scheduler.check_integrity()
    assert 3 < hand.scheduler.stats.num_preemptions < number


def test_a_tenant_alone_costs_no_look_at_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: with one tenant, whose requests fill all rows and wait, nothing of the shares is worked out."""
    calls = Counter[str]()

    def count(self: RowShares, *args: object) -> int:
        calls["of"] += 1
        return 0

    monkeypatch.setattr(RowShares, "of", count)
    hand = by_hand(max_num_seqs=4, budget=64)
    for number in range(20):
        hand.add(of_tenant(number, "alone", max_tokens=20), 1)
    served(hand, 60)
    assert not calls
    hand.add(of_tenant(20, "other"), 1)
    served(hand, 2)
    assert calls["of"]


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


class Told:
    """A policy that notes which parties it is to forget."""

    def __init__(self) -> None:
        self.forgotten = list[int]()

    def forget(self, party: int) -> None:
        self.forgotten.append(party)


def test_tenants_that_are_gone_are_forgotten_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy forgets their parties, and a tenant that comes back is a new one."""
    monkeypatch.setattr(parties, "MAX_IDLE", 3)
    policy = Told()
    known = parties.Parties(policy, {})  # type: ignore[arg-type]

    def visit(tenant: str) -> int:
        request: Any = SimpleNamespace(tenant=tenant, party=0)
        known.enter(request)
        known.leave(request)
        return int(request.party)

    numbers = [visit(f"tenant {number}") for number in range(20)]
    assert len(set(numbers)) == 20
    assert policy.forgotten == numbers[:17]
    assert [visit(f"tenant {number}") for number in (17, 18, 19)] == numbers[17:]
    assert visit("tenant 16") not in numbers
    assert policy.forgotten == numbers[:18]


def test_a_policy_keeps_nothing_of_tenants_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parties, "MAX_IDLE", 3)
    hand = by_hand(max_num_seqs=4, budget=64)
    for number in range(20):
        received = hand.add(of_tenant(number, f"tenant {number}", max_tokens=1), 1)
        while not received.is_over:
            hand.step()
    assert np.count_nonzero(hand.scheduler.policy._times._num_present) == 0  # type: ignore[attr-defined]
