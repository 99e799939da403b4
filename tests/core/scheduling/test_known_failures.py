"""Failures of other engines' schedulers, one test each, by the numbers of vLLM's issues where there are any."""

from typing import Any

import msgspec
import pytest

from ipc.wire.messages import ErrorCode, FinishReason, PauseMode
from tests.core.driving import EOS, ByHand, Driver, Received, add_message, expected_tokens, small_config


def prompt(length: int, first: int) -> list[int]:
    return [first * 1000 + index for index in range(length)]


def add(hand: ByHand, number: int, length: int, max_tokens: int = 4, priority: int = 0, **where: Any) -> Received:
    """A request that shares no block with others."""
    message = add_message(number, prompt(length, number), max_tokens)
    return hand.add(msgspec.structs.replace(message, priority=priority), **where)


def run(hand: ByHand, limit: int, now_ns: int = 0) -> list[dict[int, int]]:
    """Steps until nothing is left; at most so many."""
    steps = []
    while hand.scheduler.has_unfinished_requests:
        assert len(steps) < limit, f"after {limit} steps (running, waiting) = {hand.scheduler.get_request_counts()}"
        steps.append(hand.step(now_ns=now_ns))
    assert hand.scheduler.pool.num_free == hand.scheduler.pool.num_blocks - 1
    return steps


def numbers_preempted(hand: ByHand) -> list[int]:
    assert hand.scheduler.decision is not None
    return [preempted.request.number for preempted in hand.scheduler.decision.preempted]


# --- the holes of the algorithm ------------------------------------------------------------------------------------


def test_40004_a_waiting_urgent_request_takes_the_row_of_a_running_one() -> None:
    hand = ByHand(small_config(max_num_seqs=1, scheduling_policy="priority"))
    add(hand, 1, 6, 20, priority=1)
    hand.step()
    add(hand, 2, 6, priority=0)
    assert hand.step() == {2: 6}
    assert numbers_preempted(hand) == [1]


def test_40004_a_waiting_urgent_request_takes_the_blocks_of_a_running_one() -> None:
    hand = ByHand(small_config(num_blocks=7, scheduling_policy="priority"))
    add(hand, 1, 16, 8, priority=1)
    hand.step()
    add(hand, 2, 16, priority=0)
    assert hand.step() == {2: 16}
    assert numbers_preempted(hand) == [1]


@pytest.mark.parametrize("shared", [0, 24])
def test_40004_an_urgent_request_takes_what_less_urgent_ones_share(shared: int) -> None:
    """Blocks of a beginning that several victims have in common come free with the last of them. What the urgent one
    shares with them does not."""
    prompt = list(range(100, 124))
    hand = ByHand(small_config(num_blocks=11, watermark=0.0, scheduling_policy="priority"))
    for number in (1, 2):
        hand.add(msgspec.structs.replace(add_message(number, [*prompt, number], 16), priority=1))
        hand.step()
    assert hand.scheduler.pool.num_free == 2
    hand.add(add_message(3, [*prompt[:shared], *[5] * (33 - shared)], 2))
    assert hand.step()[3] == 33 - shared
    assert numbers_preempted(hand) == ([2] if shared else [2, 1])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_who_holds_memory_is_not_served_before_the_urgent(mode: str) -> None:
    """What waits with copied blocks goes before new arrivals of its own class only."""
    hand = ByHand(small_config(num_blocks=7, scheduling_policy="priority", preemption_mode=mode, num_swap_blocks=9))
    add(hand, 1, 12, 12, priority=2)
    hand.step()
    add(hand, 2, 20, 2, priority=1)
    assert hand.step() == {2: 20}
    add(hand, 3, 4, 2, priority=2)
    add(hand, 4, 20, 2, priority=0)
    started = [list(step) for step in run(hand, 60)]
    order = list(dict.fromkeys(number for step in started for number in step))
    assert order.index(4) < order.index(1) < order.index(3)


def test_low_classes_do_not_starve_where_priorities_age() -> None:
    def wait_of(aging: float) -> int:
        config = small_config(max_num_seqs=1, scheduling_policy="priority", priority_aging_seconds=aging)
        hand = ByHand(config)
        add(hand, 0, 4, 2, priority=0)
        low = add(hand, 1, 4, 2, priority=1)
        for step in range(1, 40):
            if low.is_over:
                return step
            add(hand, 1 + step, 4, 1, priority=0, now_ns=step * 10**9)
            hand.step(now_ns=step * 10**9)
        return 40

    assert wait_of(0.0) == 40
    assert wait_of(5.0) < 12


def test_one_client_does_not_starve_another() -> None:
    hand = ByHand(small_config(max_num_seqs=2, budget=8, scheduling_policy="fair", fair_quantum=8))
    for number in range(20):
        add(hand, number, 8, 8, client=0)
    hand.step()
    late = add(hand, 50, 8, 4, client=1)
    for _ in range(12):
        hand.step()
    assert late.is_over


def test_31731_a_head_that_does_not_fit_lets_small_ones_pass_but_not_for_ever() -> None:
    hand = ByHand(small_config(num_blocks=7, admission_lookahead=2))
    add(hand, 1, 12, 12)
    hand.step()
    add(hand, 2, 16, 1)
    for number in range(3, 9):
        add(hand, number, 3, 1)
    order = list(dict.fromkeys(number for step in run(hand, 60) for number in step))
    assert order == [1, 3, 4, 2, 5, 6, 7, 8]


def test_a_preemption_does_not_end_admission_for_the_step() -> None:
    hand = ByHand(small_config(num_blocks=9, max_num_seqs=2, scheduling_policy="priority"))
    add(hand, 1, 8, 20, priority=1)
    add(hand, 2, 8, 20, priority=1)
    hand.step()
    add(hand, 3, 4, priority=0)
    add(hand, 4, 4, priority=0)
    assert hand.step() == {3: 4, 4: 4}


def test_42827_a_full_cache_does_not_thrash() -> None:
    """Thirty requests that each need a fifth of the cache by their end: few are preempted, and it can be seen."""
    hand = ByHand(small_config(num_blocks=41, max_num_seqs=20, budget=64))
    for number in range(30):
        add(hand, number, 6, 26)
    run(hand, 400)
    stats = hand.scheduler.stats
    assert 0 < stats.num_preemptions <= 60
    assert 0 < stats.num_recomputed_tokens < 0.5 * stats.num_scheduled_tokens
    assert hand.scheduler.stats.num_finished == 30


def test_39734_what_never_fits_is_refused_and_blocks_nobody() -> None:
    hand = ByHand(small_config(num_blocks=5, max_model_len=64))
    huge, small = add(hand, 1, 30), add(hand, 2, 3)
    run(hand, 10)
    assert huge.failed is not None
    assert huge.failed.code == ErrorCode.INVALID_ARGUMENT
    assert "9 KV blocks for 33 tokens, and there are 4" in huge.failed.message
    assert small.finish == FinishReason.LENGTH


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_41951_a_preempted_request_keeps_its_place(policy: str) -> None:
    hand = ByHand(small_config(num_blocks=7, scheduling_policy=policy))
    add(hand, 1, 10, 14)
    add(hand, 2, 9, 14)
    while not hand.scheduler.stats.num_preemptions:
        hand.step()
    assert numbers_preempted(hand) == [2]
    add(hand, 3, 9, 4)
    order = [number for step in run(hand, 60) for number in step]
    assert order.index(2) < order.index(3)


@pytest.mark.parametrize(("policy", "kept"), [("priority", 1), ("fcfs", 2)])
@pytest.mark.parametrize("asked", [1, 2])
def test_47802_the_urgent_keep_their_prefixes_longer(policy: str, kept: int, asked: int) -> None:
    """The prefix cache evicts the less urgent of two equally used prompts first, even if it came later."""
    hand = ByHand(small_config(num_blocks=10, scheduling_policy=policy))
    prompts = {number: [*range(100 * number, 100 * number + 16), 1] for number in (1, 2, 3)}
    for number, priority in ((1, 0), (2, 5), (3, 0)):
        hand.add(msgspec.structs.replace(add_message(number, prompts[number], max_tokens=1), priority=priority))
        hand.step()
    again = hand.add(add_message(10, prompts[asked], max_tokens=1))
    hand.step()
    assert again.cached == (16 if asked == kept else 0)


def test_10774_prompts_do_not_hold_up_running_requests() -> None:
    hand = ByHand(small_config(budget=64, long_prefill_token_threshold=8))
    add(hand, 1, 4, 10)
    hand.step()
    add(hand, 2, 40)
    for _ in range(5):
        assert hand.step() == {1: 1, 2: 8}


def test_15041_a_duplicate_number_is_refused_and_the_first_goes_on() -> None:
    driver = Driver(small_config())
    message = add_message(1, prompt(6, 1), 8)
    driver.step([(0, message)])
    replies = driver.engine.step([(0, message)], 0)
    assert any(getattr(reply, "code", None) == ErrorCode.ALREADY_EXISTS for _, reply in replies)
    assert driver.scheduler.get_request_counts() == (1, 0)


def test_53130_rows_do_not_leak() -> None:
    """Aborts while running, preempted, in flight and waiting; then as many run as at first."""
    hand = ByHand(small_config(num_blocks=13, max_num_seqs=3, depth=2))
    for turn in range(30):
        for index in range(5):
            add(hand, 5 * turn + index, 9, 20)
        plans = [hand.schedule(), hand.schedule()]
        hand.scheduler.finish_requests(0, [5 * turn + turn % 5])
        hand.update(plans[0])
        hand.scheduler.finish_requests(0, list(range(5 * turn, 5 * turn + 5)))
        if not plans[1].is_empty:
            hand.update(plans[1])
    assert hand.scheduler.get_request_counts() == (0, 0)
    for number in range(1000, 1003):
        add(hand, number, 4)
    assert hand.step() == dict.fromkeys(range(1000, 1003), 4)


# --- aborts, tokens in flight ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_46283_aborts_leak_neither_blocks_nor_host_slots(depth: int, mode: str) -> None:
    swap = {"preemption_mode": mode, "num_swap_blocks": 8 if mode == "swap" else 0}
    hand = ByHand(small_config(num_blocks=9, depth=depth, **swap))
    for number in range(4):
        add(hand, number, 6, 20)
    for _ in range(40):
        hand.step()
        if hand.scheduler.stats.num_preemptions > 1:
            break
    hand.scheduler.finish_requests(0, [3, 1, 3, 77])  # twice, and one that nobody knows
    hand.scheduler.finish_requests(0, [0, 2])
    assert hand.step() == {}
    assert hand.scheduler.pool.num_free == 8
    assert hand.scheduler.preemption.swap_space.num_free == swap["num_swap_blocks"]


def test_nothing_is_copied_to_host_slots_that_were_given_back() -> None:
    """The plan that preempts does not run; the request is aborted before one does: else two requests would be copied to
    the same slots."""
    config = small_config(
        9, max_num_seqs=1, depth=2, scheduling_policy="priority", preemption_mode="swap", num_swap_blocks=8
    )
    hand = ByHand(config)
    add(hand, 1, 16, 8, priority=1)
    first = hand.schedule()
    add(hand, 2, 28, 2, priority=0)
    assert hand.schedule().is_empty
    assert numbers_preempted(hand) == [1]
    swap_space = hand.scheduler.preemption.swap_space
    hand.scheduler.finish_requests(0, [1])
    assert swap_space.num_free == 8
    hand.update(first)
    second = hand.schedule()
    assert not second.is_empty
    assert len(second.swapped_out_slots) == 0
    assert swap_space.num_free == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_57562_preempted_tokens_in_flight_neither_underflow_nor_come_twice(depth: int) -> None:
    """Placeholders of a preempted row are dropped with it; its tokens are those of an undisturbed run."""
    driver = Driver(small_config(num_blocks=9, depth=depth, budget=12))
    messages = [add_message(number, prompt(6, 0) if number else [number] * 6, 18) for number in range(4)]
    received = driver.run(*messages)
    assert driver.scheduler.stats.num_preemptions > 0
    for message, got in zip(messages, received, strict=True):
        assert got.tokens == expected_tokens(message, 32)
    assert (driver.scheduler.table.num_placeholders >= 0).all()


# --- progress ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("depth", [1, 2])
def test_49674_preemptions_do_not_cascade_without_progress(policy: str, depth: int) -> None:
    """Many long requests on a cache for little more than one of them."""
    config = small_config(num_blocks=9, depth=depth, scheduling_policy=policy, fair_quantum=4, budget=9)
    driver = Driver(config)
    messages = [add_message(number, prompt(5, 0)[: 4 + number % 2], 24) for number in range(12)]
    for number, message in enumerate(messages):
        driver.step([(number % 3, msgspec.structs.replace(message, priority=number % 2))])
    driver.drain(limit=1500)
    assert all(entry.finish == FinishReason.LENGTH for entry in driver.inbox.received.values())


def test_45414_an_empty_engine_with_requests_starts_one() -> None:
    """Not even a watermark, a reservation and a delay keep a request from an engine where nothing runs."""
    config = small_config(num_blocks=9, watermark=0.5, reserve_full_length=True, scheduler_delay_factor=100.0)
    hand = ByHand(config)
    add(hand, 1, 20, 13)
    assert hand.step() == {1: 20}


def test_after_a_pause_everything_goes_on() -> None:
    hand = ByHand(small_config())
    add(hand, 1, 4, 3)
    hand.step()
    hand.scheduler.pause(PauseMode.ALL)
    add(hand, 2, 4, 3)
    assert hand.step() == {}
    assert not hand.scheduler.has_work
    hand.scheduler.resume()
    assert len(run(hand, 5)) == 3


def test_two_clients_do_not_take_each_others_room_for_ever() -> None:
    """Prompts longer than a step and than the quantum: whoever starts is ahead before it has a token."""
    config = small_config(20, 1, 4, 4, prefix_caching=False, scheduling_policy="fair", fair_quantum=0)
    hand = ByHand(config)
    for number in range(6):
        add(hand, number, 12, 6, client=number % 2)
    run(hand, 300)  # fails when it takes more steps than that


def test_a_row_that_waits_for_blocks_does_not_keep_the_budget_from_who_will_free_them() -> None:
    hand = ByHand(small_config(5, max_num_seqs=2, budget=1, scheduling_policy="fair", fair_quantum=0))
    add(hand, 1, 6, 7, client=0)
    for _ in range(6):
        hand.step()
    hand.scheduler.policy.set_weight(1, 1000.0)
    add(hand, 2, 8, 1, client=1)
    assert [number for _ in range(7) for number in hand.step()] == [1, 2, 2, 2, 2, 2, 2]
    hand.scheduler.policy.set_weight(1, 0.001)  # from now on the first client goes before the second
    run(hand, 30)


def test_hits_are_not_given_away_while_room_is_made_for_who_found_them() -> None:
    """A request that starts in the same step needs blocks: not those that the next one has found and not yet taken."""
    base = list(range(100, 108))
    config = small_config(13, 2, max_num_seqs=2, scheduling_policy="priority", admission_lookahead=4)
    driver = Driver(config)
    driver.run(add_message(0, [*base, 1], 1))  # its blocks are the oldest of those remembered
    driver.run(add_message(1, list(range(200, 214)), 1))
    low = msgspec.structs.replace(add_message(2, list(range(300, 304)), 8), priority=2)
    driver.step([(0, low)])
    urgent = msgspec.structs.replace(add_message(3, list(range(400, 410)), 2), priority=0)
    finds = msgspec.structs.replace(add_message(4, [*base, 2], 3), priority=1)
    driver.step([(0, urgent), (0, finds)])
    driver.drain()
    received = driver.inbox.received
    for message in (low, urgent, finds):
        assert received[0, message.number].tokens == expected_tokens(message, 24)


def test_the_stop_token_of_an_end_that_was_lost_is_reported_again() -> None:
    """A client that has all tokens and not the end was told STOP without the stop token, so stop_reason was None."""
    hand = ByHand(small_config())
    expected = {0: 7, 1: None, 2: 7}
    for number, delivered in ((0, [5, 7]), (1, [5, EOS]), (2, [7])):
        options = {"ignore_eos": False, "stop_token_ids": [7], "delivered": delivered}
        hand.add(add_message(number, [1], 9, **options), client=number % 2)
    hand.flush()
    for number, stop_token in expected.items():
        received = hand.inbox.received[number % 2, number]
        assert (received.finish, received.stop_token) == (FinishReason.STOP, stop_token)
