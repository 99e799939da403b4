"""Whole features: no chunk of a prompt ends within one, whatever cuts chunks; all requests come to their end."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from core.scheduling.decisions import Verdict
from core.scheduling.whole_features import last_end
from ipc.wire.feature_messages import FeatureUse
from ipc.wire.messages import AddRequest
from tests.core.driving import ByHand, add_message, small_config

ROWS = 10


def message_with(number: int, length: int, places: list[int], max_tokens: int = 4, **options: Any) -> AddRequest:
    """A prompt of `length` tokens with images, which depend on their places; half of the requests have another text."""
    ids, uses = np.arange(length) + 3, []
    ids[1:] += number % 2
    for place in places:
        image = place % 3
        ids[place : place + ROWS] = -1 - image
        uses.append(FeatureUse(place, ROWS, bytes([image]), True))
    return msgspec.structs.replace(add_message(number, ids.tolist(), max_tokens, **options), features=uses)


def test_where_a_chunk_may_end() -> None:
    uses = [FeatureUse(5, 10, b"", True), FeatureUse(15, 10, b"", True), FeatureUse(30, 10, b"")]
    ends = [last_end(uses, 0, end) for end in (4, 5, 6, 14, 15, 16, 24, 25, 29, 35)]
    assert ends == [4, 5, 5, 5, 15, 15, 15, 25, 29, 35]
    assert last_end(uses, 8, 12) == 8


@pytest.mark.parametrize("threshold", [0, ROWS])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_no_chunk_ends_within_a_feature(policy: str, threshold: int) -> None:
    num_cut = num_preemptions = num_cached = 0
    for seed in range(6):
        rng = random.Random(seed)
        options = {"scheduling_policy": policy, "long_prefill_token_threshold": threshold, "watermark": 0.0}
        config = small_config(28, max_num_seqs=4, budget=rng.choice([13, 17, 40]), max_model_len=80, **options)
        hand = ByHand(config)
        received, uses = [], {}
        for number in range(12):
            places = sorted(rng.sample(range(1, 50, ROWS + 1), rng.randrange(4)))
            message = message_with(number, 61 if places else rng.randrange(1, 40), places, rng.randrange(1, 15))
            message = msgspec.structs.replace(message, priority=rng.randrange(3))
            uses[number] = message.features
            received.append(hand.add(message, client=rng.randrange(2) if policy == "fair" else 0))
        for _ in range(600):
            plan = hand.schedule()
            if plan.is_empty:
                break
            table = hand.scheduler.table
            for row, count in zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True):
                end, number = int(table.num_computed_tokens[row]), int(table.number[row])
                assert not any(use.position < end < use.position + ROWS for use in uses[number]), (number, end)
                num_cut += any(use.position < end - count < use.position + ROWS for use in uses[number])
            assert plan.num_tokens <= config.max_num_batched_tokens  # type: ignore[operator]
            hand.update(plan)
        assert all(one.finish is not None for one in received), hand.scheduler.get_request_counts()
        num_preemptions += hand.scheduler.stats.num_preemptions
        num_cached += hand.scheduler.stats.prefix_cache_hits
    assert num_preemptions > 0
    assert num_cached > 0
    assert num_cut > 0, "no prefix hit has ended within a feature"


def test_one_that_finds_no_room_for_its_image_waits_and_starts() -> None:
    hand = ByHand(small_config(100, max_num_seqs=4, budget=13))
    hand.add(message_with(1, 30, [10]))
    hand.add(message_with(2, 30, [0]))
    assert hand.step() == {1: 10}  # up to its image; three tokens are left, and the other begins with its image
    assert hand.scheduler.decision is not None
    examined = hand.scheduler.decision.examined
    assert [(one.request.number, one.verdict, one.needed) for one in examined] == [(2, Verdict.NO_BUDGET, ROWS)]
    assert hand.step() == {1: 13}
    assert hand.step() == {1: 7}  # its prompt's end; the other's image needs ten
    assert hand.step() == {1: 1, 2: 12}


def test_without_chunked_prefill_prompts_are_whole_anyway() -> None:
    hand = ByHand(small_config(100, budget=64, max_model_len=64, enable_chunked_prefill=False))
    hand.add(message_with(1, 40, [10, 20]))
    assert hand.step() == {1: 40}
