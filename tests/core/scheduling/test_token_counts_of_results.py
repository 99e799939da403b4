"""Results with counts, made up by hand: what ends a row in the middle of a step's tokens, and rows that fail."""

import numpy as np
import pytest

from core.execution.plan import FAILED_TOKEN, LogprobColumns, ModelRunnerOutput, SchedulerOutput
from ipc.tables.arrays import Int32s
from ipc.wire.messages import FinishReason, Outputs
from tests.core.driving import EOS, ByHand, add_message, small_config


def int32s(*values: int) -> Int32s:
    return np.array(values, np.int32)


def result(plan: SchedulerOutput, *runs: list[int], **fields: object) -> ModelRunnerOutput:
    """runs: the tokens of each row."""
    tokens = [token for run in runs for token in run]
    return ModelRunnerOutput(plan.step, int32s(*tokens), counts=int32s(*map(len, runs)), **fields)  # type: ignore[arg-type]


def update(hand: ByHand, output: ModelRunnerOutput, plan: SchedulerOutput) -> None:
    hand.inbox.take(hand.scheduler.update_from_output(plan, output))
    hand.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("options", "kept", "finish", "stop_token"),
    [
        ({"max_tokens": 3}, 3, FinishReason.LENGTH, None),
        ({"stop_token_ids": [8, 11]}, 2, FinishReason.STOP, 8),
        ({"stop_token_ids": [8, 11], "min_tokens": 3}, 5, FinishReason.STOP, 11),
        ({"ignore_eos": False}, 4, FinishReason.STOP, None),
        ({"ignore_eos": False, "min_tokens": 6, "stop_token_ids": [13]}, 6, FinishReason.STOP, 13),
        ({"ignore_eos": False, "max_tokens": 4}, 4, FinishReason.STOP, None),
        ({}, 7, None, None),
    ],
    ids=str,
)
def test_the_first_end_cuts_a_rows_tokens(
    options: dict[str, object], kept: int, finish: FinishReason | None, stop_token: int | None
) -> None:
    """Beside rows that go on, before and after it."""
    hand = ByHand(small_config())
    others = [hand.add(add_message(number, [5, number], 20)) for number in (1, 3)]
    entry = hand.add(add_message(2, [5, 9, 9], **{"max_tokens": 20, **options}))  # type: ignore[arg-type]
    plan = hand.scheduler.schedule(0)
    tokens = [7, 8, 9, EOS, 11, 13, 14]
    runs = {1: [20], 2: tokens, 3: [30, 31, 32]}
    numbers = hand.scheduler.table.number[plan.rows].tolist()
    update(hand, result(plan, *(runs[number] for number in numbers)), plan)
    assert (entry.tokens, entry.finish, entry.stop_token) == (tokens[:kept], finish, stop_token)
    assert [other.tokens for other in others] == [[20], [30, 31, 32]]
    assert hand.scheduler.stats.num_generation_tokens == 4 + kept
    assert len(hand.scheduler.running) == 2 + (finish is None)


def test_what_a_step_has_not_computed_is_computed_by_the_next() -> None:
    hand = ByHand(small_config())
    hand.add(add_message(1, [5, 6], 20))
    update(hand, result(plan := hand.scheduler.schedule(0), [7, 8, 9]), plan)
    plan = hand.scheduler.schedule(0)
    assert plan.num_scheduled_tokens.tolist() == [3]
    update(hand, result(plan, [10]), plan)
    assert hand.scheduler.schedule(0).num_scheduled_tokens.tolist() == [1]


def test_a_step_in_flight_samples_no_more_after_a_step_with_several() -> None:
    """Depth 2: the row has a token in flight when three come; the step in flight computes the first of them only."""
    hand = ByHand(small_config(depth=2))
    entry = hand.add(add_message(1, [5, 6], 20))
    first, second = hand.scheduler.schedule(0), hand.scheduler.schedule(0)
    assert second.num_scheduled_tokens.tolist() == [1]
    assert hand.scheduler.table.num_placeholders[first.rows].tolist() == [2]
    update(hand, result(first, [7, 8, 9]), first)
    assert hand.scheduler.table.num_placeholders[first.rows].tolist() == [0]
    third = hand.scheduler.schedule(0)
    assert third.num_scheduled_tokens.tolist() == [2]
    update(hand, result(second, []), second)
    update(hand, result(third, [10]), third)
    assert entry.tokens == [7, 8, 9, 10]


def test_clients_get_their_own_rows() -> None:
    """Rows of two clients, not in their order, are cut out of one column."""
    hand = ByHand(small_config())
    entries = [hand.add(add_message(number, [5, number], 20, stop_token_ids=[99]), number % 2) for number in range(5)]
    plan = hand.scheduler.schedule(0)
    runs = [[10 * number + place for place in range(number + 1)] for number in range(5)]
    runs[2][1] = 99
    update(hand, result(plan, *runs), plan)
    assert [entry.tokens for entry in entries] == [*runs[:2], runs[2][:2], *runs[3:]]
    assert [entry.stop_token for entry in entries] == [None, None, 99, None, None]


def logprobs(*places: tuple[int, int]) -> LogprobColumns:
    """One entry at each (row, position), its token 100 + position."""
    rows, positions = (int32s(*column) for column in zip(*places, strict=True))
    ones = np.ones_like(rows)
    return LogprobColumns(rows, positions, ones, ones, 100 + positions, -ones.astype(np.float32))


def test_log_probabilities_after_the_end_are_dropped() -> None:
    hand = ByHand(small_config())
    hand.add(add_message(1, [5, 6], 2, logprobs=0, prompt_logprobs=0))
    hand.add(add_message(2, [5, 7, 8], 20, logprobs=0))
    plan = hand.scheduler.schedule(0)
    columns = logprobs((0, 1), (0, 2), (0, 3), (0, 4), (1, 3), (1, 4))
    ((_, message),) = hand.scheduler.update_from_output(plan, result(plan, [7, 8, 9], [20, 21], logprobs=columns))
    assert isinstance(message, Outputs)
    assert message.logprobs is not None
    assert np.frombuffer(message.logprobs.numbers, "<u4").tolist() == [1, 1, 1, 2, 2]
    assert np.frombuffer(message.logprobs.positions, "<u4").tolist() == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("counted", [False, True])
def test_a_row_fails_with_its_own_text(counted: bool) -> None:
    """And one without a text with that of logits that are not finite; the others go on."""
    hand = ByHand(small_config())
    entries = [hand.add(add_message(number, [5, number], 20)) for number in range(4)]
    plan = hand.scheduler.schedule(0)
    texts = [(2, "the grammar of this request allows no token")]
    if counted:
        output = result(plan, [7, 8], [FAILED_TOKEN], [FAILED_TOKEN], [9], failures=texts)
    else:
        output = ModelRunnerOutput(plan.step, int32s(7, FAILED_TOKEN, FAILED_TOKEN, 9), failures=texts)
    update(hand, output, plan)
    failed = [entry.failed.message if entry.failed else None for entry in entries]
    assert (failed[0], failed[2], failed[3]) == (None, texts[0][1], None)
    assert "not finite" in str(failed[1])
    assert [entry.tokens for entry in entries] == [[7, 8] if counted else [7], [], [], [9]]
    assert len(hand.scheduler.running) == 2


def test_counts_that_do_not_fit_are_broken_invariants() -> None:
    for counts in (int32s(1), int32s(1, 2, 1), int32s(1, 2)):
        hand = ByHand(small_config())
        for number in range(2):
            hand.add(add_message(number, [5, number], 20))
        plan = hand.scheduler.schedule(0)
        with pytest.raises(AssertionError, match="counts"):
            hand.scheduler.update_from_output(plan, ModelRunnerOutput(plan.step, int32s(7, 8), counts=counts))
