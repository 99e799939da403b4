"""Scheduler with results made up by hand: who gets how many tokens, who ends, who is preempted."""

import pytest

from ipc.wire.messages import FinishReason
from tests.core.driving import EOS, ByHand, Received, add_message, small_config, unpack


def prompt(length: int, first: int = 100) -> list[int]:
    """No two requests of a test share a block unless they are given the same `first`."""
    return [first * 1000 + index for index in range(length)]


# --- the budget --------------------------------------------------------------------------------------------------


def test_small_prompts_start_together() -> None:
    hand = ByHand(small_config())
    for number in range(5):
        hand.add(add_message(number, prompt(6, number)))
    assert hand.scheduler.get_request_counts() == (0, 5)
    assert hand.step() == dict.fromkeys(range(5), 6)
    assert hand.scheduler.get_request_counts() == (5, 0)
    assert hand.step() == dict.fromkeys(range(5), 1)


def test_budget_is_split_in_order_and_used_exactly() -> None:
    hand = ByHand(small_config(budget=16))
    for number, length in enumerate((6, 7, 8)):
        hand.add(add_message(number, prompt(length, number)))
    assert hand.step() == {0: 6, 1: 7, 2: 3}
    assert hand.step() == {0: 1, 1: 1, 2: 5}
    assert hand.step() == {0: 1, 1: 1, 2: 1}


def test_chunked_prefill_gives_no_token_before_its_last_chunk() -> None:
    hand = ByHand(small_config(budget=8))
    entry = hand.add(add_message(1, prompt(20)))
    for chunk, tokens in ((8, 0), (8, 0), (4, 1), (1, 2)):
        assert hand.step() == {1: chunk}
        assert len(entry.tokens) == tokens
    assert entry.cached == 0


def test_two_long_prompts_follow_each_other_through_the_budget() -> None:
    hand = ByHand(small_config(budget=10))
    hand.add(add_message(1, prompt(14, 1)))
    hand.add(add_message(2, prompt(14, 2)))
    assert hand.step() == {1: 10}
    assert hand.step() == {1: 4, 2: 6}
    assert hand.step() == {1: 1, 2: 8}
    assert hand.step() == {1: 1, 2: 1}


def test_a_used_up_budget_admits_nobody() -> None:
    hand = ByHand(small_config(budget=2))
    for number in range(2):
        hand.add(add_message(number, prompt(1, number)))
    hand.step()
    hand.add(add_message(2, prompt(1, 2), max_tokens=2))
    assert hand.step() == {0: 1, 1: 1}
    hand.scheduler.finish_requests(0, [0])
    assert hand.step() == {1: 1, 2: 1}


def test_max_num_seqs_caps_admission_and_a_free_row_is_given_again() -> None:
    hand = ByHand(small_config(max_num_seqs=2))
    for number, count in enumerate((1, 3, 3)):
        hand.add(add_message(number, prompt(5, number), max_tokens=count))
    assert hand.step() == {0: 5, 1: 5}
    assert hand.scheduler.get_request_counts() == (1, 1)
    assert hand.step() == {1: 1, 2: 5}


def test_a_head_that_does_not_fit_holds_the_rest() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=24, admission_lookahead=0))
    hand.add(add_message(1, prompt(12, 1), max_tokens=2))  # 3 of 6 blocks
    hand.add(add_message(2, prompt(16, 2), max_tokens=1))  # 4 blocks
    hand.add(add_message(3, prompt(3, 3), max_tokens=1))  # would fit
    assert hand.step() == {1: 12}
    assert hand.step() == {1: 1}
    assert hand.step() == {2: 16, 3: 3}


def test_a_prompt_is_admitted_only_if_all_of_it_will_fit() -> None:
    """Half of a prompt in the cache would only be preempted by the next step."""
    hand = ByHand(small_config(num_blocks=7, max_model_len=24, budget=4))
    hand.add(add_message(1, prompt(16, 1), max_tokens=1))
    hand.add(add_message(2, prompt(16, 2), max_tokens=1))
    while hand.scheduler.get_request_counts()[0] or not hand.scheduler.stats.num_steps:
        hand.step()
        if hand.scheduler.stats.num_finished:
            break
        assert hand.scheduler.get_request_counts() == (1, 1)
    assert hand.step() == {2: 4}
    assert hand.scheduler.stats.num_preemptions == 0


def test_a_row_that_waits_for_a_fence_keeps_the_blocks_it_was_promised() -> None:
    hand = ByHand(small_config(num_blocks=10, max_model_len=36, budget=26, depth=2))
    for number, length in ((1, 20), (2, 2), (3, 12)):
        hand.add(add_message(number, prompt(length, number)))
    first = hand.schedule()
    assert hand.scheduled(first) == {1: 20, 2: 2, 3: 4}
    hand.scheduler.finish_requests(0, [2])  # its block is fenced
    hand.add(add_message(4, prompt(2, 4)))
    second = hand.schedule()  # two blocks are free; the first request takes one and the third needs two
    assert hand.scheduled(second) == {1: 1}
    hand.update(first)
    third = hand.schedule()
    assert hand.scheduled(third) == {1: 1, 3: 8}
    assert hand.scheduler.stats.num_preemptions == 0


def test_blocks_are_fenced_by_the_last_step_in_flight() -> None:
    """The scheduler may run ahead by more than the two steps of the engine."""
    hand = ByHand(small_config(depth=2))
    hand.add(add_message(1, prompt(9, 1), 20))
    plans = [hand.schedule() for _ in range(2)]
    hand.scheduler.finish_requests(0, [1])
    pool = hand.scheduler.pool
    hand.update(plans[0])
    assert (pool.num_free, pool.num_fenced) == (96, 3)
    hand.update(plans[1])
    assert (pool.num_free, pool.num_fenced) == (99, 0)


def test_running_rows_stay_in_arrival_order_when_rows_are_reused() -> None:
    hand = ByHand(small_config(max_num_seqs=3))
    for number in range(6):
        hand.add(add_message(number, prompt(2, number), max_tokens=1 + number % 2 * 8))
    orders = [list(hand.step()) for _ in range(3)]
    assert orders == [[0, 1, 2], [1, 3, 4], [1, 3, 5]]


def test_nothing_to_run_is_an_empty_plan_and_no_step() -> None:
    hand = ByHand(small_config())
    assert hand.schedule().is_empty
    hand.add(add_message(1, prompt(3)))
    assert hand.schedule().step == 0


def test_what_could_never_run_is_refused_at_once_with_the_numbers() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=100))
    largest = hand.add(add_message(1, prompt(12, 1), max_tokens=13))  # its last token takes no slot
    refused = hand.add(add_message(2, prompt(12, 2), max_tokens=14))
    while hand.step():
        pass
    assert len(largest.tokens) == 13
    assert refused.failed is not None
    assert refused.failed.message == "the request may need 7 KV blocks for 25 tokens, and there are 6"


def test_results_out_of_step_order_are_a_broken_invariant() -> None:
    hand = ByHand(small_config())
    hand.add(add_message(1, prompt(3)))
    first, second = hand.schedule(), hand.schedule()
    assert not second.is_empty
    with pytest.raises(AssertionError, match="step 0 is due, got plan 1"):
        hand.update(second)
    assert first.step == 0


# --- ends --------------------------------------------------------------------------------------------------------


def run_tokens(hand: ByHand, entry: Received, tokens: list[int]) -> list[int]:
    for token in tokens:
        if not entry.is_over:
            hand.step(token)
    return entry.tokens


@pytest.mark.parametrize(
    ("options", "tokens", "kept", "finish", "stop_token"),
    [
        ({"ignore_eos": False}, [5, EOS, 6], 2, FinishReason.STOP, None),
        ({"ignore_eos": True}, [5, EOS, 6, 7], 4, FinishReason.LENGTH, None),
        ({"stop_token_ids": [9, 8]}, [5, 8, 9], 2, FinishReason.STOP, 8),
        ({"stop_token_ids": [9]}, [EOS, 5, 6, 9], 4, FinishReason.STOP, 9),  # stop goes before length
        ({"stop_token_ids": [9], "ignore_eos": False}, [EOS, 9], 1, FinishReason.STOP, None),
        ({"stop_token_ids": [EOS], "ignore_eos": False}, [EOS], 1, FinishReason.STOP, None),  # EOS goes first
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], 1, FinishReason.STOP, EOS),
        ({"ignore_eos": False, "min_tokens": 3}, [EOS, EOS, EOS], 3, FinishReason.STOP, None),
        ({"stop_token_ids": [9], "min_tokens": 2}, [9, 9], 2, FinishReason.STOP, 9),
        ({"ignore_eos": False, "min_tokens": 4}, [EOS] * 3 + [5], 4, FinishReason.LENGTH, None),
        ({"stop_token_ids": [0, 2**31 - 1]}, [2**31 - 1], 1, FinishReason.STOP, 2**31 - 1),
        ({"stop_token_ids": [0, 2**31 - 1]}, [0], 1, FinishReason.STOP, 0),
    ],
)
def test_stop(options: dict[str, object], tokens: list[int], kept: int, finish: FinishReason, stop_token: int) -> None:
    hand = ByHand(small_config())
    entry = hand.add(add_message(1, prompt(3), 4, **options))  # type: ignore[arg-type]
    assert run_tokens(hand, entry, tokens) == tokens[:kept]
    assert (entry.finish, entry.stop_token) == (finish, stop_token)
    assert hand.scheduler.get_request_counts() == (0, 0)
    assert hand.scheduler.pool.num_free == 99


def test_max_model_len_ends_a_request_without_max_tokens() -> None:
    hand = ByHand(small_config(max_model_len=10))
    entry = hand.add(add_message(1, prompt(6), max_tokens=None))
    assert len(run_tokens(hand, entry, [5] * 9)) == 4
    assert entry.finish == FinishReason.LENGTH


def test_stop_tokens_of_one_row_do_not_stop_its_neighbours_nor_the_next_tenant() -> None:
    hand = ByHand(small_config(max_num_seqs=2))
    first = hand.add(add_message(1, prompt(3, 1), stop_token_ids=[9]))
    other = hand.add(add_message(2, prompt(3, 2), stop_token_ids=[8]))
    third = hand.add(add_message(3, prompt(3, 3), max_tokens=2))
    hand.step(9)
    assert (first.finish, other.finish) == (FinishReason.STOP, None)
    hand.step(9)
    hand.step(9)
    assert (third.tokens, third.finish) == ([9, 9], FinishReason.LENGTH)
    assert other.tokens == [9, 9, 9]


def test_outputs_are_split_by_client_in_scheduling_order() -> None:
    hand = ByHand(small_config())
    for number, client in ((10, 1), (11, 0), (12, 1), (13, 2)):
        hand.add(add_message(number, prompt(2, number), max_tokens=2), client)
    replies = hand.update(hand.schedule(), lambda row: 50 + row)
    rows = {client: [row[:3] for row in unpack(reply)] for client, reply in replies}  # type: ignore[arg-type]
    assert list(rows) == [0, 1, 2]
    assert rows == {0: [(11, 0, [51])], 1: [(10, 0, [50]), (12, 0, [52])], 2: [(13, 0, [53])]}
    assert {reply.step for _, reply in replies} == {0}  # type: ignore[union-attr]


def test_equal_numbers_of_two_clients_are_two_requests() -> None:
    hand = ByHand(small_config())
    one, other = hand.add(add_message(1, prompt(2, 1)), 0), hand.add(add_message(1, prompt(2, 2)), 1)
    hand.step()
    hand.scheduler.finish_requests(1, [1])
    hand.step()
    assert (one.finish, other.finish) == (None, FinishReason.ABORT)
    assert len(one.tokens) == 2


# --- preemption --------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_resumes_with_the_same_positions() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=24, prefix_caching=False))
    old = hand.add(add_message(1, prompt(11, 1), max_tokens=9))
    young = hand.add(add_message(2, prompt(11, 2), max_tokens=9))
    assert hand.step() == {1: 11, 2: 11}
    assert hand.step() == {1: 1, 2: 1}
    assert hand.step() == {1: 1}  # both need a fourth block, and there are none
    assert hand.scheduler.stats.num_preemptions == 1
    while not old.is_over:
        assert list(hand.step()) == [1]
    assert hand.step() == {2: 13}  # prompt and the two tokens it had
    while not young.is_over:
        assert hand.step() == {2: 1}
    assert old.tokens == young.tokens == [7] * 9
    assert hand.scheduler.pool.num_free == 6
    assert hand.scheduler.stats.num_preemptions == 1


def test_as_many_are_preempted_as_it_takes_and_come_back_in_order() -> None:
    hand = ByHand(small_config(num_blocks=9, max_model_len=32, prefix_caching=False))
    entries = [hand.add(add_message(n, prompt(8, n), max_tokens=9)) for n in range(4)]
    assert list(hand.step()) == [0, 1, 2, 3]
    assert list(hand.step()) == [0, 1]  # four third blocks wanted: the youngest gives its two, the next keeps its own
    assert hand.scheduler.get_request_counts() == (3, 1)
    order = []
    for _ in range(60):
        order += [number for number in hand.step() if number not in order]
    assert order == [0, 1, 2, 3]
    assert all(entry.tokens == [7] * 9 for entry in entries)


def test_the_oldest_is_never_preempted() -> None:
    hand = ByHand(small_config(num_blocks=6, max_model_len=20))
    for number in range(6):
        hand.add(add_message(number, prompt(3 + number, number), max_tokens=12))
    for _ in range(200):
        oldest = min((n for (_, n), entry in hand.inbox.received.items() if not entry.is_over), default=None)
        scheduled = hand.step()
        assert oldest is None or oldest in scheduled
    assert hand.scheduler.stats.num_preemptions > 3
    assert all(entry.finish == FinishReason.LENGTH for entry in hand.inbox.received.values())
    assert hand.scheduler.pool.num_free == 5


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    hand = ByHand(small_config(num_blocks=8, max_model_len=28))
    old = hand.add(add_message(1, prompt(12, 1), max_tokens=5))
    hand.add(add_message(2, prompt(16, 2), max_tokens=9))
    hand.step()
    assert hand.step() == {1: 1}
    assert hand.scheduler.stats.num_preemptions == 1
    while not old.is_over:
        hand.step()
    # 17 tokens; the old request took one of the four blocks, and a request's tail goes first
    assert hand.step() == {2: 17 - 12}


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=24))
    hand.add(add_message(1, prompt(12, 1), max_tokens=9))
    hand.add(add_message(2, prompt(12, 2), max_tokens=9))
    hand.add(add_message(3, prompt(1, 3), max_tokens=1))
    hand.step()
    assert hand.step() == {1: 1}
    assert hand.scheduler.get_request_counts() == (1, 2)


def test_a_token_in_flight_of_a_preempted_request_is_sampled_again_not_twice() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=24, depth=2))
    hand.add(add_message(1, prompt(12, 1), max_tokens=5))
    young = hand.add(add_message(2, prompt(12, 2), max_tokens=5))
    first = hand.schedule()
    second = hand.schedule()
    assert hand.scheduled(second) == {}  # all six blocks are held by step 0: the old one waits for the fence
    assert hand.scheduler.stats.num_preemptions == 1
    assert hand.scheduler.pool.num_fenced == 3
    hand.update(first, 42)
    assert young.tokens == []
    for _ in range(20):
        hand.step(43)
    assert young.tokens == [43] * 5
    assert young.finish == FinishReason.LENGTH


def test_a_preempted_request_can_be_aborted_and_says_how_far_it_came() -> None:
    hand = ByHand(small_config(num_blocks=7, max_model_len=24))
    hand.add(add_message(1, prompt(11, 1), max_tokens=9))
    young = hand.add(add_message(2, prompt(11, 2), max_tokens=9))
    for _ in range(3):
        hand.step()
    assert hand.scheduler.get_request_counts() == (1, 1)
    hand.scheduler.finish_requests(0, [2])
    hand.step()  # the inbox checks that the ABORT row stands at position 2
    assert (young.tokens, young.finish) == ([7, 7], FinishReason.ABORT)
