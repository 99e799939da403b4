"""What a request can come to compute is said by the request: the scheduler asks for no reason."""

from core.batch.request import Request, request_from_message
from tests.core.driving import ByHand, add_message, small_config

LENGTH = 9  # tokens: three blocks of four, and two would do for one token less


def generating(max_tokens: int) -> Request:
    return request_from_message(add_message(1, list(range(LENGTH)), max_tokens), 0, 0, 40)


def computing_its_prompt() -> Request:
    """A test-only task: whatever it may still be given, nothing behind its prompt is computed."""
    request = generating(20)
    request.max_computed_tokens = LENGTH
    return request


def test_the_last_generated_token_is_not_computed() -> None:
    assert [generating(count).max_computed_tokens for count in (1, 5, 100)] == [LENGTH, LENGTH + 4, 39]
    assert generating(5).max_total_tokens == LENGTH + 5


def test_blocks_are_those_of_what_is_computed() -> None:
    for request, num_blocks in (
        (generating(1), 3),
        (generating(4), 3),
        (generating(5), 4),
        (computing_its_prompt(), 3),
    ):
        hand = ByHand(small_config(12, reserve_full_length=True))
        hand.scheduler.add_request([request], 0)
        hand.scheduler.schedule(0)
        assert hand.scheduler.batch.has_all_blocks(hand.scheduler.running).all()
        assert int(hand.scheduler.table.num_blocks[request.row]) == num_blocks


def test_what_could_never_run_is_refused_by_what_it_computes() -> None:
    hand = ByHand(small_config(3))
    assert hand.scheduler.admission.never_fits(computing_its_prompt()) == (
        "the request may need 3 KV blocks for 9 tokens, and there are 2"
    )
