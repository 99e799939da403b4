"""Forks: the prompt of several choices is computed once, whatever becomes of the choice that computes it."""

import pytest

from core.inputs import HoldClient, ReleaseClient
from ipc.wire.messages import Abort, Explain, FinishReason, Pause, PauseMode, Resume
from ipc.wire.scheduling_messages import Explanation, Reason
from tests.columns import pack_numbers
from tests.core.driving import Driver, add_message, small_config
from tests.core.scheduling.test_choices import Client, engine, expected, run
from tests.in_turn import in_turn

CACHING = pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])


@CACHING
@pytest.mark.parametrize("length", [41, 44, 45, 2, 1])
def test_the_prompt_is_computed_once(length: int, prefix_caching: bool) -> None:
    """Of a prompt of one token there is nothing to share. Blocks have 4 tokens."""
    core, client = engine(num_blocks=100, budget=16, prefix_caching=prefix_caching), Client()
    message, pool = add_message(1, range(length), 5, temperature=1.0, n=4), core.scheduler.pool
    client.take(core.step([(0, message)], 0))
    while core.scheduler.get_request_counts() != (4, 0):
        client.take(core.step([], 0))
    num_decoded = len(client.tokens[1, 0]) - 1
    assert core.scheduler.stats.num_scheduled_tokens == length + 3 + num_decoded
    assert num_decoded == (length > 1)
    num_shared = (length - 1) // 4
    assert pool.num_blocks - 1 - pool.num_free == num_shared + 4 + (length % 4 == 0)  # one has its second token
    assert core.scheduler.stats.prefix_cache_hits == (3 * 4 * num_shared if prefix_caching else 0)
    while core.has_work:
        client.take(core.step([], 0))
    assert client.tokens == {(1, choice): expected(message, choice) for choice in range(4)}


@pytest.mark.parametrize(
    ("mode", "block_size", "depth", "prefix_caching"),
    in_turn(["recompute", "swap", "by_choices"], [4, 1], [1, 2], [True, False]),
)
def test_tokens_are_the_oracles_where_rows_are_preempted(
    block_size: int, mode: str, depth: int, prefix_caching: bool
) -> None:
    core = engine(
        num_blocks=56 // block_size,
        block_size=block_size,
        depth=depth,
        budget=16,
        prefix_caching=prefix_caching,
        preemption_mode=mode,
        num_swap_blocks=0 if mode == "recompute" else 30,
    )
    messages = [add_message(n, range(n, n + 11), 9, temperature=1.0, seed=n + 50, n=n % 5 + 1) for n in range(9)]
    client = run(core, *messages)
    for message in messages:
        for choice in range(message.params.n):
            assert client.tokens[message.number, choice] == expected(message, choice)
    assert core.scheduler.stats.num_preemptions > 0
    assert (core.scheduler.stats.num_swapped_in_blocks > 0) == (mode != "recompute")


@CACHING
@pytest.mark.parametrize("depth", [1, 2])
def test_a_choice_that_ends_at_once_leaves_its_prompt(depth: int, prefix_caching: bool) -> None:
    core = engine(depth=depth, budget=16, prefix_caching=prefix_caching)
    message = add_message(1, range(42), 1, temperature=1.0, n=4)
    client = run(core, message)
    assert client.tokens == {(1, choice): expected(message, choice) for choice in range(4)}
    assert core.scheduler.stats.num_scheduled_tokens == 42 + 3


def test_the_next_choice_computes_where_the_first_is_aborted() -> None:
    core, client = engine(budget=8, prefix_caching=False), Client()
    message = add_message(1, range(30), 4, temperature=1.0, n=3)
    client.take(core.step([(0, message)], 0))
    assert core.scheduler.get_request_counts() == (1, 2)
    client.take(core.step([(0, Abort(pack_numbers([1]), b"\0\0"))], 0))
    assert core.scheduler.get_request_counts() == (1, 1)
    client.take(core.step([(0, Abort(pack_numbers([1]), b"\2\0"))], 0))  # one that only follows
    assert core.scheduler.get_request_counts() == (1, 0)
    while core.has_work:
        client.take(core.step([], 0))
    assert client.tokens[1, 1] == expected(message, 1)
    assert client.finish[1, 0] == client.finish[1, 2] == FinishReason.ABORT
    core.scheduler.check_integrity()


def test_all_are_aborted_while_they_follow() -> None:
    core, client = engine(budget=8), Client()
    client.take(core.step([(0, add_message(1, range(30), 4, temperature=1.0, n=3))], 0))
    client.take(core.step([(0, Abort(pack_numbers([1])))], 0))
    assert client.finish == {(1, choice): FinishReason.ABORT for choice in range(3)}
    assert not core.has_work
    core.scheduler.check_integrity()


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 8])
def test_a_hold_at_any_step(steps: int) -> None:
    core, client = engine(budget=8, prefix_caching=False), Client()
    message = add_message(1, range(30), 6, temperature=1.0, n=3)
    client.take(core.step([(0, message)], 0))
    for _ in range(steps):
        client.take(core.step([], 0))
    client.take(core.step([(0, HoldClient())], 0))
    assert core.scheduler.get_request_counts() == (0, 3 - len(client.finish))
    core.scheduler.check_integrity()
    client.take(core.step([(0, ReleaseClient())], 0))
    while core.has_work:
        client.take(core.step([], 0))
    assert client.tokens == {(1, choice): expected(message, choice) for choice in range(3)}


def test_a_pause_keeps_followers_that_have_not_started() -> None:
    core, client = engine(budget=8), Client()
    message = add_message(1, range(30), 6, temperature=1.0, n=3)
    client.take(core.step([(0, message)], 0))
    client.take(core.step([(0, Pause(1, PauseMode.NEW))], 0))
    while core.has_work:
        client.take(core.step([], 0))
    assert client.tokens == {(1, 0): expected(message, 0)}
    assert core.scheduler.get_request_counts() == (0, 2)
    client.take(core.step([(0, Resume(2))], 0))
    while core.has_work:
        client.take(core.step([], 0))
    assert client.tokens == {(1, choice): expected(message, choice) for choice in range(3)}


def test_explain_says_that_a_choice_waits_for_another() -> None:
    driver = Driver(small_config(budget=8))
    driver.step([(1, add_message(1, range(30), 6, temperature=1.0, n=3))])
    for number in (1, -1):
        (answer,) = [reply for _, reply in driver.step([(1, Explain(3, number))]) if isinstance(reply, Explanation)]
        assert [one.reason for one in answer.requests] == [Reason.NONE, Reason.FIRST_CHOICE, Reason.FIRST_CHOICE]
        assert [one.position for one in answer.requests] == [0, -1, -1]


def test_a_choice_of_a_reset_cache_computes_its_prompt() -> None:
    """The blocks of a running row lose their names, and what follows could not be named after them."""
    core, client = engine(max_num_seqs=2), Client()
    message = add_message(1, range(30), 6, temperature=1.0, n=3)
    client.take(core.step([(0, message)], 0))
    client.take(core.step([], 0))
    assert core.scheduler.get_request_counts() == (2, 1)
    core.scheduler.reset_prefix_cache()
    while core.has_work:
        client.take(core.step([], 0))
        core.scheduler.check_integrity()
    assert client.tokens == {(1, choice): expected(message, choice) for choice in range(3)}
    assert core.scheduler.stats.num_scheduled_tokens == 30 + 1 + 30 + 3 * 5
