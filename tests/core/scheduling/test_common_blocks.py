"""num_common_prefix_blocks of a plan: the leading blocks that all running rows have in common."""

import msgspec
import numpy as np
import pytest

from core.capture.packed_steps import digest_of
from core.execution.plan import decided_fields, encode_fields, encode_plan
from core.scheduling.explain import explain
from ipc.wire.scheduling_messages import Explain, Explanation
from tests.core.driving import ByHand, add_message, small_config

PREFIX = list(range(100, 109))  # two blocks of 4, and one token more


def num_common(hand: ByHand) -> int:
    plan = hand.schedule()
    tables = [hand.scheduler.table.blocks.read(row, 0, 4).tolist() for row in hand.scheduler.batch.rows.tolist()]
    if len(tables) > 1:  # the number is exact
        columns = list(zip(*tables, strict=True))
        assert all(len(set(column)) == 1 for column in columns[: plan.num_common_prefix_blocks])
        assert len(set(columns[plan.num_common_prefix_blocks])) > 1
    hand.update(plan)
    return plan.num_common_prefix_blocks


def test_all_running_rows_have_them() -> None:
    hand = ByHand(small_config())
    hand.add(add_message(1, [*PREFIX, 1], 12))
    assert num_common(hand) == 0  # one row has nothing in common
    hand.add(add_message(2, [*PREFIX, 2], 12))
    assert [num_common(hand) for _ in range(3)] == [2, 2, 2]
    hand.add(add_message(3, [*PREFIX[:5], 3, 3, 3], 3))
    assert [num_common(hand) for _ in range(3)] == [1, 1, 1]
    assert num_common(hand) == 2  # the third has ended
    answer = explain(hand.scheduler, "fcfs", 0, Explain(1), 0)
    assert isinstance(answer, Explanation)
    assert answer.num_common_prefix_blocks == 2
    hand.add(add_message(4, [7, 7, 7], 2))
    assert num_common(hand) == 0
    hand.scheduler.finish_requests(0, [2, 4])
    assert num_common(hand) == 0


def test_choices_have_their_prompt_in_common_without_a_prefix_cache() -> None:
    hand = ByHand(small_config(prefix_caching=False))
    hand.add(add_message(1, PREFIX, 8, n=3, temperature=0.5))
    assert [num_common(hand) for _ in range(4)] == [0, 2, 2, 2]


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"kv_window": 64}])
def test_there_are_none_without_sharing_or_with_windows(options: dict[str, int]) -> None:
    hand = ByHand(small_config(**options))
    for number in (1, 2):
        hand.add(add_message(number, [*PREFIX, number], 12))
    for _ in range(3):
        plan = hand.schedule()
        hand.update(plan)
        assert plan.num_common_prefix_blocks == 0


def test_executors_learn_the_number_and_decisions_do_not_depend_on_it() -> None:
    hand = ByHand(small_config())
    for number in (1, 2):
        hand.add(add_message(number, [*PREFIX, number], 12))
    hand.step()
    plan = hand.schedule()
    assert plan.num_common_prefix_blocks == 2
    without = msgspec.structs.replace(plan, num_common_prefix_blocks=0)
    assert encode_plan(plan) != encode_plan(without)
    assert digest_of(encode_fields(decided_fields(plan))) == digest_of(encode_plan(without))
    assert np.array_equal(plan.rows, without.rows)
