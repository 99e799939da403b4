"""KV blocks that the window has passed: who gets them, who finds them, and who keeps all of his."""

from core.batch.request import NO_ROW
from core.scheduling.decisions import Cause
from core.scheduling.draft import Draft
from tests.core.driving import ByHand, add_message, small_config

WINDOW = 9


def sliding(num_blocks: int = 40, **options: object) -> ByHand:
    return ByHand(small_config(num_blocks, watermark=0.0, **{"kv_window": WINDOW, **options}))  # type: ignore[arg-type]


def held(hand: ByHand, number: int, choice: int = 0) -> int:
    (row,) = [
        request.row
        for request in hand.scheduler.live_requests()
        if (request.number, request.choice) == (number, choice)
    ]
    assert row != NO_ROW
    return len(hand.scheduler.table.block_ids(row))


def test_blocks_go_with_the_tokens_that_no_later_one_sees() -> None:
    """At a next token with place p, blocks of 4 tokens before p - 8 are free; the first of them at p = 12."""
    hand = sliding()
    hand.add(add_message(1, range(11), 20))
    hand.step()  # computes the prompt
    assert held(hand, 1) == 3
    hand.step()  # the token at 11
    assert held(hand, 1) == 3
    hand.step()  # the one at 12, which sees 4 to 12
    assert held(hand, 1) == 3
    assert hand.scheduler.table.num_released.max() == 1


def test_more_requests_run_than_could_hold_all_their_blocks() -> None:
    counts = []
    for window in (0, WINDOW):
        hand = sliding(25, kv_window=window, max_num_seqs=4, prefix_caching=False)
        received = [hand.add(add_message(number, [number * 100 + i for i in range(4)], 40)) for number in range(4)]
        for _ in range(400):
            hand.step()
            hand.scheduler.check_integrity()
        assert [len(one.tokens) for one in received] == [40] * 4
        counts.append(hand.scheduler.stats.num_preemptions)
    assert counts[0] > counts[1] == 0


def test_choices_of_one_message_keep_their_blocks() -> None:
    hand = sliding()
    hand.add(add_message(1, range(30), 8, n=2, temperature=1.0))
    for _ in range(4):
        hand.step()
        hand.scheduler.check_integrity()
    assert (held(hand, 1), held(hand, 1, 1)) == (9, 8)


def test_a_request_that_lacks_blocks_is_computed_again_and_not_copied() -> None:
    hand = sliding(preemption_mode="swap", num_swap_blocks=30)
    hand.add(add_message(1, range(6), 30))
    hand.add(add_message(2, range(100, 130), 30))
    hand.step()
    hand.step()
    scheduler = hand.scheduler
    for row in scheduler.running.tolist():
        request = scheduler.table.request[row]
        assert request is not None
        scheduler.preemption.preempt(Draft(0, 0, 0), row, Cause.MORE_URGENT)
        assert (request.swapped is not None) == (request.number == 1)
    for _ in range(60):
        hand.step()
        scheduler.check_integrity()
    assert not scheduler.has_unfinished_requests
