"""Each scheduling policy: whom it serves first, from whom it takes room, and where that ends."""

from typing import Any

import msgspec
import numpy as np
import pytest

from core.scheduling.virtual_time import TOKEN, VirtualTime
from tests.core.driving import ByHand, Received, add_message, small_config

S = 10**9  # ns


def add(hand: ByHand, number: int, length: int, max_tokens: int = 4, priority: int = 0, **where: Any) -> Received:
    message = add_message(number, [number * 1000 + index for index in range(length)], max_tokens)
    return hand.add(msgspec.structs.replace(message, priority=priority), **where)


def order_of_starts(hand: ByHand, limit: int = 60) -> list[int]:
    numbers = [number for _ in range(limit) for number in hand.step()]
    assert not hand.scheduler.has_unfinished_requests
    return list(dict.fromkeys(numbers))


def test_fcfs_does_not_look_at_priorities() -> None:
    hand = ByHand(small_config(max_num_seqs=1))
    for number, priority in ((1, 5), (2, 0), (3, -9)):
        add(hand, number, 4, priority=priority)
    assert order_of_starts(hand) == [1, 2, 3]


def test_priority_serves_smaller_first_and_ties_by_arrival() -> None:
    hand = ByHand(small_config(max_num_seqs=1, scheduling_policy="priority"))
    for number, priority in ((1, 1), (2, 0), (3, 1), (4, -1), (5, 0)):
        add(hand, number, 4, priority=priority)
    assert order_of_starts(hand) == [4, 2, 5, 1, 3]


def test_priority_takes_nothing_from_its_own_class() -> None:
    hand = ByHand(small_config(max_num_seqs=1, scheduling_policy="priority"))
    add(hand, 1, 4)
    hand.step()
    add(hand, 2, 4)
    assert order_of_starts(hand) == [1, 2]
    assert hand.scheduler.stats.num_preemptions == 0


def test_who_loses_only_budget_is_skipped_and_keeps_its_blocks() -> None:
    hand = ByHand(small_config(budget=8, scheduling_policy="priority"))
    low = add(hand, 1, 8, priority=1)
    hand.step()
    row = int(hand.scheduler.running[0])
    blocks = hand.scheduler.table.block_ids(row).tolist()
    add(hand, 2, 8, priority=0)
    assert hand.step() == {2: 8}
    decision = hand.scheduler.decision
    assert decision is not None
    assert (decision.num_skipped, decision.preempted) == (1, [])
    assert hand.scheduler.table.block_ids(row).tolist()[:2] == blocks[:2]
    assert len(low.tokens) == 1
    assert hand.step() == {1: 1, 2: 1}


@pytest.mark.parametrize("aging", [0.0, 5.0, 1e6])
def test_the_most_extreme_priorities_are_ranks_like_others(aging: float) -> None:
    hand = ByHand(small_config(max_num_seqs=1, scheduling_policy="priority", priority_aging_seconds=aging))
    add(hand, 1, 4)
    hand.step()
    for number, priority in ((2, 2**31 - 1), (3, 0), (4, -(2**31))):
        add(hand, number, 4, priority=priority)
    assert order_of_starts(hand) == [4, 1, 3, 2]


def test_aging_puts_an_old_request_before_a_more_urgent_one() -> None:
    config = small_config(max_num_seqs=1, scheduling_policy="priority", priority_aging_seconds=2.0)
    hand = ByHand(config)
    add(hand, 1, 4)
    hand.step()
    add(hand, 2, 4, priority=1, now_ns=0)
    add(hand, 3, 4, priority=0, now_ns=3 * S)  # 2 came more than two seconds before it
    add(hand, 4, 4, priority=0, now_ns=1 * S)
    assert order_of_starts(hand) == [1, 4, 2, 3]


def test_an_aged_request_takes_no_room_from_more_urgent_ones_nor_gives_it() -> None:
    config = small_config(max_num_seqs=1, scheduling_policy="priority", priority_aging_seconds=1.0)
    hand = ByHand(config)
    add(hand, 1, 4, 20, priority=1, now_ns=0)
    hand.step()
    add(hand, 2, 4, priority=0, now_ns=5 * S)
    assert hand.step(now_ns=5 * S) == {1: 1}
    assert hand.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_fair_shares_tokens_by_weight(weight: float) -> None:
    hand = ByHand(small_config(400, max_num_seqs=4, budget=16, scheduling_policy="fair", fair_quantum=16))
    for number in range(200):
        add(hand, number, 16, 8, client=number % 2)
    hand.scheduler.policy.set_weight(1, weight)
    served = [0, 0]
    for _ in range(120):
        for number, count in hand.step().items():
            served[number % 2] += count
    assert served[1] / served[0] == pytest.approx(weight, rel=0.15)


def test_fair_leaves_nothing_idle() -> None:
    """A client alone has all of the engine, as under any policy."""
    totals = []
    for policy in ("fcfs", "fair"):
        hand = ByHand(small_config(400, max_num_seqs=4, budget=16, scheduling_policy=policy))
        for number in range(8):
            add(hand, number, 16, 8, client=0)
        totals.append([sum(hand.step().values()) for _ in range(40)])
    assert totals[0] == totals[1]


def test_fair_saves_up_no_claim() -> None:
    """A client that comes late is level with the least served one; it has no claim for the time before."""
    hand = ByHand(small_config(400, max_num_seqs=2, budget=8, scheduling_policy="fair", fair_quantum=8))
    for number in range(0, 80, 2):
        add(hand, number, 8, 8, client=0)
    for _ in range(40):
        hand.step()
    for number in range(1, 81, 2):
        add(hand, number, 8, 8, client=1)
    served = [0, 0]
    for _ in range(40):
        for number, count in hand.step().items():
            served[number % 2] += count
    assert 0.6 < served[0] / served[1] < 1.6


def test_fair_takes_room_only_beyond_the_quantum() -> None:
    hand = ByHand(small_config(max_num_seqs=1, scheduling_policy="fair", fair_quantum=10))
    add(hand, 1, 8, 30, client=0)
    add(hand, 2, 4, client=1)
    steps = [list(hand.step()) for _ in range(5)]
    assert steps == [[1], [1], [1], [1], [2]]  # 8, 9 and 10 tokens are no more than ten ahead; 11 are


def test_fair_follows_priority_within_a_client() -> None:
    hand = ByHand(small_config(max_num_seqs=1, scheduling_policy="fair"))
    for number, priority in ((1, 2), (2, 1), (3, 2)):
        add(hand, number, 4, priority=priority)
    assert order_of_starts(hand) == [2, 1, 3]


def test_virtual_time_lifts_a_new_client_and_forgets_one_that_is_gone() -> None:
    times = VirtualTime()
    times.enter(7)
    times.charge_one(7, 10)
    times.enter(8)
    assert times.of(8) == times.of(7) == 10 * TOKEN
    times.set_weight(8, 4.0)
    times.charge_one(8, 4)
    assert times.of(8) == 11 * TOKEN
    times.leave(8)
    times.forget(8)
    times.leave(7)
    times.enter(9)
    assert times.of(9) == 10 * TOKEN
    with pytest.raises(AssertionError, match="client 9 has 1 requests"):
        times.forget(9)


def test_who_yields_goes_behind_in_the_line() -> None:
    """Else a row would take the room again that was made for a request, whose blocks are still fenced in that step."""
    times, clients = VirtualTime(), np.array([5, 2, 9, 4])
    for client, count in zip(clients.tolist(), (3, 3, 0, 4), strict=True):
        times.enter(client)
        times.charge_one(client, count)
    times.enter(7)  # lifted to the least of them, as client 9 was, and client 5 is there, too
    everybody = np.array([5, 2, 9, 4, 7, 7])
    for one in everybody.tolist():
        assert times.behind(everybody, one).tolist() == [
            times.place(it) > times.place(one) for it in everybody.tolist()
        ]
    assert times.behind(np.array([9, 7]), 7).tolist() == [True, False]
