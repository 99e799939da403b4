"""Admission: each option that holds a request back, and where it ends."""

from typing import Any

import msgspec
import pytest

from core.executors.fake import create
from core.process.resolve import resolve, resolve_costs
from core.scheduling.decisions import Verdict
from ipc.options.config import EngineConfig
from tests.core.driving import ByHand, Received, add_message, small_config
from tests.fake_options import fake_options

MS = 1_000_000  # ns


def add(hand: ByHand, number: int, length: int, max_tokens: int = 4, **where: Any) -> Received:
    return hand.add(add_message(number, [number * 1000 + index for index in range(length)], max_tokens), **where)


def verdicts(hand: ByHand) -> dict[int, Verdict]:
    assert hand.scheduler.decision is not None
    return {one.request.number: one.verdict for one in hand.scheduler.decision.examined}


def test_the_watermark_stays_free_while_others_run() -> None:
    hand = ByHand(small_config(11, max_model_len=40, watermark=0.3))
    add(hand, 1, 20, 8)
    add(hand, 2, 12, 1)  # 3 of the 5 free blocks, and 3 of 11 stay
    assert hand.step() == {1: 20}
    assert verdicts(hand) == {2: Verdict.NO_BLOCKS}


def test_no_watermark_where_nothing_runs() -> None:
    hand = ByHand(small_config(11, max_model_len=40, watermark=0.5))
    add(hand, 1, 36)
    assert hand.step() == {1: 36}


def test_look_ahead_examines_a_bounded_number() -> None:
    hand = ByHand(small_config(9, admission_lookahead=3))
    add(hand, 0, 16, 12)
    hand.step()
    for number in range(1, 100):
        add(hand, number, 24, 1)
    hand.step()
    assert list(verdicts(hand)) == [1, 2, 3, 4]


def test_full_length_reserved_means_no_preemption() -> None:
    for reserved in (True, False):
        hand = ByHand(small_config(13, reserve_full_length=reserved, watermark=0.0))
        for number in range(6):
            add(hand, number, 5, 20)
        hand.step()
        assert len(hand.scheduler.running) == (2 if reserved else 6)  # 6 blocks each, or 2
        for _ in range(200):
            hand.step()
        assert not hand.scheduler.has_unfinished_requests
        assert (hand.scheduler.stats.num_preemptions == 0) == reserved


def test_the_threshold_cuts_prompts_only_while_others_live() -> None:
    hand = ByHand(small_config(budget=32, long_prefill_token_threshold=8))
    add(hand, 1, 30)
    assert hand.step() == {1: 30}
    add(hand, 2, 20)
    add(hand, 3, 20)
    assert hand.step() == {1: 1, 2: 8, 3: 8}


def test_only_so_many_prompts_are_in_parts_and_short_ones_pass() -> None:
    hand = ByHand(small_config(budget=32, long_prefill_token_threshold=8, max_num_partial_prefills=1))
    add(hand, 1, 20)
    add(hand, 2, 20)
    add(hand, 3, 6)
    assert hand.step() == {1: 8, 3: 6}
    assert verdicts(hand) == {2: Verdict.PARTIAL_PREFILLS}
    hand.step()
    assert hand.step() == {1: 4, 3: 1, 2: 8}  # the first ends its prompt in this step


def test_a_less_urgent_prompt_in_parts_does_not_hold_up_an_urgent_one() -> None:
    hand = ByHand(small_config(budget=8, max_num_partial_prefills=1, scheduling_policy="priority"))
    for number, priority in ((1, 1), (2, 0), (3, 0), (4, 1)):
        hand.add(msgspec.structs.replace(add_message(number, [number] * 20, 1), priority=priority))
        assert hand.step() == ({1: 8} if number == 1 else {2: 8} if number < 4 else {2: 4, 3: 4})
    assert [hand.step() for _ in range(5)] == [{3: 8}, {3: 8}, {1: 8}, {1: 4, 4: 4}, {4: 8}]


def test_without_chunks_prompts_are_whole_and_in_steps_of_their_own() -> None:
    hand = ByHand(small_config(budget=16, enable_chunked_prefill=False, max_model_len=16))
    add(hand, 1, 10)
    add(hand, 2, 10)
    assert hand.step() == {1: 10}  # six tokens are left: not for a part of the second
    assert verdicts(hand) == {2: Verdict.NO_BUDGET}
    assert hand.step() == {2: 10}
    assert hand.step() == {1: 1, 2: 1}


def test_without_chunks_what_is_longer_than_a_step_is_refused_with_the_numbers() -> None:
    hand = ByHand(small_config(budget=16, enable_chunked_prefill=False))
    entry = add(hand, 1, 14, 5)
    hand.flush()
    assert entry.failed is not None
    assert "may come to 18 tokens, and max_num_batched_tokens is 16" in entry.failed.message
    assert add(hand, 2, 14, 3).failed is None


def test_without_chunks_the_default_budget_has_room_for_the_longest_prompt() -> None:
    config = EngineConfig(
        executor="fake", enable_chunked_prefill=False, executor_options=fake_options(max_model_len=2000)
    )
    executor = create(config)
    blocks_in = executor.determine_num_available_blocks
    resolved = resolve(config, executor.info, blocks_in, total_memory_bytes=1 << 30, num_cpus=1)
    hand = ByHand(resolve_costs(resolved, config, executor.measure_costs))
    add(hand, 1, 1990, 10)
    assert hand.step() == {1: 1990}


def test_prompts_gather_for_the_delay_and_no_longer() -> None:
    hand = ByHand(small_config(scheduler_delay_factor=2.0))
    add(hand, 1, 4, 30)
    assert hand.step(now_ns=0) == {1: 4}  # nothing runs: at once
    assert hand.step(now_ns=10 * MS) == {1: 1}  # the step with the prompt took 10 ms
    add(hand, 2, 4, now_ns=10 * MS)
    assert hand.step(now_ns=20 * MS) == {1: 1}
    add(hand, 3, 4, now_ns=25 * MS)
    assert hand.step(now_ns=29 * MS) == {1: 1}
    assert hand.step(now_ns=30 * MS) == {1: 1, 2: 4, 3: 4}


@pytest.mark.parametrize("num_preemptions", [0, 2])
def test_who_was_preempted_comes_back_only_with_room_to_grow(num_preemptions: int) -> None:
    hand = ByHand(small_config(11, watermark=0.0))
    add(hand, 1, 24, 4)
    hand.step()
    add(hand, 2, 8, 12)  # two blocks of the three that are not promised
    request = hand.scheduler.waiting.peek()
    assert request is not None
    request.num_preemptions = num_preemptions
    assert hand.step() == ({1: 1} if num_preemptions else {1: 1, 2: 8})
