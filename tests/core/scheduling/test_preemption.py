"""Preemption: who gives way, how he comes back, and what it may cost."""

from typing import Any

import msgspec
import pytest

from core.scheduling.decisions import Verdict
from tests.core.driving import ByHand, Driver, Received, add_message, expected_tokens, small_config
from tests.in_turn import in_turn


def add(hand: ByHand, number: int, length: int, max_tokens: int = 4, priority: int = 0, **where: Any) -> Received:
    message = add_message(number, [number * 1000 + index for index in range(length)], max_tokens)
    return hand.add(msgspec.structs.replace(message, priority=priority), **where)


def preempted(hand: ByHand) -> list[tuple[int, int]]:
    """(number, blocks copied to the host)"""
    assert hand.scheduler.decision is not None
    return [(one.request.number, one.num_swapped_blocks) for one in hand.scheduler.decision.preempted]


def urgent_config(**options: Any) -> Any:
    return small_config(13, scheduling_policy="priority", max_model_len=48, **options)


def test_the_victim_is_of_the_least_urgent_class_then_the_cheapest_then_the_last() -> None:
    for lengths, priorities, victim in (
        ((8, 8, 8), (2, 3, 2), 2),  # class before everything
        ((8, 4, 8), (2, 2, 2), 2),  # then what is cheap to compute again
        ((8, 8, 8), (2, 2, 2), 3),  # then the last
    ):
        hand = ByHand(urgent_config(max_num_seqs=3))
        for number, (length, priority) in enumerate(zip(lengths, priorities, strict=True), 1):
            add(hand, number, length, 8, priority)
        hand.step()
        add(hand, 9, 4, priority=0)
        hand.step()
        assert preempted(hand) == [(victim, 0)]


def test_no_more_are_preempted_than_the_room_takes_and_nobody_for_who_cannot_start() -> None:
    hand = ByHand(urgent_config(max_num_seqs=8))
    for number in range(1, 4):
        add(hand, number, 12, 8, priority=1)
    hand.step()
    add(hand, 8, 16, 1, priority=1)  # of the same class: waits
    hand.step()
    assert preempted(hand) == []
    add(hand, 9, 16, 1, priority=0)
    hand.step()
    assert len(preempted(hand)) == 1


def test_after_eight_preemptions_a_request_starts_with_all_its_blocks() -> None:
    for count, num_blocks in ((7, 1), (8, 6)):
        hand = ByHand(small_config(13, watermark=0.0))
        add(hand, 1, 4, 20)
        request = hand.scheduler.waiting.peek()
        assert request is not None
        request.num_preemptions = count
        hand.step()
        assert int(hand.scheduler.table.num_blocks[hand.scheduler.running[0]]) == num_blocks


def test_who_holds_all_that_it_needs_is_no_victim_of_its_class() -> None:
    hand = ByHand(small_config(6, 4, watermark=0.0, max_model_len=20))
    add(hand, 1, 8, 12)
    add(hand, 2, 8, 5)  # three blocks at most
    for _ in range(8):
        hand.step()
    assert hand.scheduler.stats.num_preemptions == 1  # it lacks its third
    hand = ByHand(small_config(7, 4, watermark=0.0, max_model_len=20))
    add(hand, 1, 8, 12)
    add(hand, 2, 8, 5)
    for _ in range(20):
        hand.step()
    assert hand.scheduler.stats.num_preemptions == 0


def swapping(num_swap_blocks: int = 12, **options: Any) -> ByHand:
    options = {"preemption_mode": "swap", "prefix_caching": False} | options
    hand = ByHand(urgent_config(max_num_seqs=1, num_swap_blocks=num_swap_blocks, **options))
    add(hand, 1, 11, 8, priority=1)
    hand.step()
    hand.step()  # 12 tokens are computed, 13 known
    add(hand, 2, 40, 1, priority=0)
    hand.step()
    return hand


def test_swapped_blocks_come_back_and_only_the_last_token_is_computed_again() -> None:
    hand = swapping()
    assert preempted(hand) == [(1, 3)]
    assert hand.scheduler.preemption.swap_space.num_free == 9
    assert hand.step() == {1: 1}
    stats = hand.scheduler.stats
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (3, 3)
    assert hand.scheduler.preemption.swap_space.num_free == 12
    assert stats.num_recomputed_tokens == 0


def test_a_full_host_pool_means_computing_again() -> None:
    hand = swapping(num_swap_blocks=2)
    assert preempted(hand) == [(1, 0)]
    assert hand.step() == {1: 13}
    assert hand.scheduler.stats.num_recomputed_tokens == 12


@pytest.mark.parametrize(("swap_ns", "num_swapped"), [(1, 3), (2, 0), (50, 0)])
def test_auto_takes_the_cheaper_way(swap_ns: int, num_swapped: int) -> None:
    """3 blocks there and back against 12 tokens at 1 ns: at 2 ns a block it is even, and nothing is copied."""
    hand = swapping(preemption_mode="auto", swap_ns_per_block=swap_ns, recompute_ns_per_token=1)
    assert preempted(hand) == [(1, num_swapped)]


@pytest.mark.parametrize(("n", "num_swapped"), [(1, [0]), (2, [3, 4])])
def test_by_choices_computes_one_again_and_copies_several(n: int, num_swapped: list[int]) -> None:
    """The rule of vLLM 0.6: what one sequence holds is soon computed again; of several it would be a loss."""
    options = {"preemption_mode": "by_choices", "num_swap_blocks": 12, "prefix_caching": False}
    hand = ByHand(urgent_config(max_num_seqs=n, **options))
    message = add_message(1, range(11), 8, n=n, temperature=1.0)
    hand.add(msgspec.structs.replace(message, priority=1))
    hand.step()
    hand.step()
    hand.step()
    add(hand, 9, 40, 1, priority=0)
    hand.step()
    assert sorted(preempted(hand)) == [(1, count) for count in num_swapped]
    while hand.scheduler.has_unfinished_requests:
        hand.step()
    assert hand.scheduler.stats.num_swapped_in_blocks == sum(num_swapped)


def test_the_swapped_go_before_new_arrivals_of_their_class() -> None:
    hand = swapping()
    add(hand, 3, 4, priority=1)
    assert hand.step() == {1: 1}


@pytest.mark.parametrize(
    ("mode", "policy", "depth"), in_turn(["recompute", "swap", "auto"], ["fcfs", "priority", "fair"], [1, 2])
)
def test_preemption_changes_no_token(depth: int, mode: str, policy: str) -> None:
    """The executor reads every context back, so what is copied wrongly is seen."""
    slots = {"recompute": 0, "swap": 10, "auto": 10}[mode]
    config = small_config(
        11,
        2,
        5,
        12,
        depth,
        scheduling_policy=policy,
        preemption_mode=mode,
        num_swap_blocks=slots,
        fair_quantum=6,
        recompute_ns_per_token=3,
    )
    driver = Driver(config)
    messages = [add_message(number, [number] * (2 + number % 3), 12) for number in range(9)]
    for number, message in enumerate(messages):
        driver.step([(number % 3, msgspec.structs.replace(message, priority=-(number % 2)))])
    driver.drain()
    stats = driver.scheduler.stats
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_in_blocks > 0) == (mode != "recompute")
    for number, message in enumerate(messages):
        assert driver.inbox.received[number % 3, number].tokens == expected_tokens(message, 20)


def test_room_in_flight_is_waited_for_and_nobody_else_takes_it() -> None:
    hand = ByHand(small_config(9, depth=2, max_num_seqs=2, scheduling_policy="priority"))
    add(hand, 1, 20, 8, priority=1)
    first = hand.schedule()
    add(hand, 2, 24, 2, priority=0)
    add(hand, 3, 4, 2, priority=1)
    assert hand.schedule().is_empty
    decision = hand.scheduler.decision
    assert decision is not None
    assert [(one.request.number, one.verdict) for one in decision.examined] == [(2, Verdict.FENCED)]
    hand.update(first)
    assert hand.scheduled(hand.schedule()) == {2: 24, 3: 4}


def test_recompute_never_swaps_whatever_room_the_host_has() -> None:
    hand = ByHand(
        small_config(7, max_model_len=24, preemption_mode="recompute", num_swap_blocks=9, prefix_caching=False)
    )
    for number in (1, 2):
        hand.add(add_message(number, [number] * 12, 9))
    for _ in range(60):
        hand.step()
    assert hand.scheduler.stats.num_preemptions > 0
    assert hand.scheduler.stats.num_swapped_out_blocks == 0


def test_a_row_that_lacks_a_block_waits_and_the_swapped_one_stays_out() -> None:
    """1, 2 and 3 run, 4 is swapped, 5 and 6 wait: there is a block for 1 and for 2, and none for 3."""
    hand = ByHand(small_config(9, preemption_mode="swap", num_swap_blocks=8, prefix_caching=False, max_model_len=16))
    for number in (1, 2, 3, 4):
        add(hand, number, 8, 5)
    assert hand.step() == {1: 8, 2: 8, 3: 8, 4: 8}
    assert hand.step() == {1: 1, 2: 1}
    assert preempted(hand) == [(4, 2)]
    add(hand, 5, 8, 5)
    add(hand, 6, 8, 5)
    for _ in range(2):  # 1 and 2 end with the next one
        assert hand.step() == {1: 1, 2: 1}
        assert preempted(hand) == []
        assert hand.scheduler.get_request_counts() == (3, 3)
    stats = hand.scheduler.stats
    while hand.scheduler.has_unfinished_requests:
        hand.step()
    assert (stats.num_preemptions, stats.num_swapped_in_blocks, stats.num_recomputed_tokens) == (1, 2, 0)
