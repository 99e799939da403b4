"""A large image is encoded in parts, one a step: other requests' tokens come between, and nothing of it is lost."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from core.execution.encoding import decode_plan
from core.execution.plan import encode_plan
from core.scheduling.decisions import Verdict
from core.scheduling.explain import explain
from ipc.wire.messages import AddRequest, PauseMode
from ipc.wire.scheduling_messages import Explain, Explanation, Reason
from tests.core.driving import add_message, small_config
from tests.core.scheduling.test_encoder_inputs import ROWS, Hand, with_images

PARTS = 5
LARGE, SMALL, OTHER = 2, 1, 4  # images: those with even numbers are encoded in parts


def hand(budget: int = ROWS, cache: int = 100 * ROWS, **options: Any) -> Hand:
    sizes = {"max_num_encoder_input_tokens": budget, "encoder_cache_size": cache}
    machine = Hand(small_config(**{"budget": 40, "watermark": 0.0, **sizes, **options}))
    machine.num_parts = PARTS
    return machine


def asks(number: int, length: int, places: dict[int, int], max_tokens: int = 4, **options: Any) -> AddRequest:
    ids = (np.arange(length) + 3 + 100 * number).tolist()
    return with_images(add_message(number, ids, max_tokens, **options), places, num_parts=PARTS)


def test_tokens_of_a_stream_come_between_the_parts_of_an_image() -> None:
    machine = hand()
    machine.add(asks(1, 8, {}, 30))
    assert machine.step() == {1: 8}
    machine.add(asks(2, 20, {6: LARGE}))
    steps = [machine.step() for _ in range(PARTS + 1)]
    assert steps == [{1: 1, 2: 6}, *[{1: 1}] * (PARTS - 1), {1: 1, 2: 14}]
    assert machine.encoded == [LARGE]
    stats = machine.scheduler.make_stats()
    assert (stats.num_encoder_inputs, stats.num_encoder_hits) == (1, 0)


def test_a_request_alone_has_steps_without_rows() -> None:
    machine = hand()
    machine.add(asks(1, 20, {0: LARGE, 10: OTHER}, 2))
    plans = []
    while not (plan := machine.schedule()).is_empty:
        plans.append((dict(plan.image_parts), plan.num_scheduled_tokens.tolist()))
        assert encode_plan(decode_plan(encode_plan(plan))) == encode_plan(plan)
        machine.update(plan)
    (one, other), rest = (bytes([LARGE]), bytes([OTHER])), range(2, PARTS + 1)
    assert plans == [
        *(({one: part}, []) for part in (1, *rest)),
        ({other: 1}, [10]),  # the image's tokens and those up to the next one
        *(({other: part}, []) for part in rest),
        ({}, [10]),
        ({}, [1]),
    ]


def test_a_part_counts_in_the_budget() -> None:
    """It counts as one of the image's four tokens, and the other images of its step have what is left."""
    machine = hand(ROWS + 1)
    machine.add(asks(1, 12, {0: LARGE}))
    machine.add(asks(2, 24, {4: SMALL, 12: 3}))
    assert machine.step() == {2: 12}  # up to its second image, for which there is no room
    machine = hand()
    machine.add(asks(1, 12, {0: LARGE}))
    machine.add(asks(2, 12, {4: SMALL}))
    assert [machine.step() for _ in range(PARTS)] == [{2: 4}, *[{}] * (PARTS - 1)]
    assert machine.encoded == [LARGE]
    assert machine.step() == {1: 12, 2: 8}


def test_a_large_image_waits_for_those_before_it() -> None:
    machine = hand()
    machine.add(asks(1, 12, {4: SMALL}))
    machine.add(asks(2, 12, {0: LARGE}))
    assert machine.step() == {1: 12}
    assert (machine.encoded, machine.parts) == ([SMALL], {})
    for _ in range(PARTS):
        machine.step()
    assert machine.encoded == [SMALL, LARGE]


def test_what_is_left_of_an_aborted_image_is_dropped_by_a_plan_of_its_own() -> None:
    machine = hand()
    machine.add(asks(1, 12, {0: LARGE}))
    machine.step()
    machine.scheduler.finish_requests(0, [1])
    machine.flush()
    plan = machine.schedule()
    assert (plan.freed_encoder_inputs, len(plan.rows), plan.image_parts) == ([bytes([LARGE])], 0, [])
    assert not plan.is_empty
    machine.update(plan)
    assert not machine.parts
    assert machine.schedule().is_empty


def test_a_small_image_does_not_wait_for_a_large_one() -> None:
    machine = hand(2 * ROWS)
    machine.add(asks(1, 12, {0: LARGE}))
    assert machine.step() == {}
    machine.add(asks(2, 12, {4: SMALL}))
    assert machine.step() == {2: 12}
    machine.add(asks(3, 12, {4: OTHER}))  # is begun after the first one
    assert [machine.step() for _ in range(PARTS - 2)] == [{2: 1, 3: 4}, {2: 1}, {2: 1}]
    assert machine.encoded == [SMALL, LARGE]
    assert machine.step() == {1: 12}
    for _ in range(PARTS):
        machine.step()
    assert machine.encoded == [SMALL, LARGE, OTHER]


def test_two_requests_with_a_large_image_encode_it_once() -> None:
    machine = hand()
    machine.add(asks(1, 12, {2: LARGE}))
    machine.add(asks(2, 12, {5: LARGE}))
    for _ in range(PARTS):
        machine.step()
    assert machine.step() == {1: 10, 2: 7}
    machine.add(asks(3, 12, {5: LARGE}))
    machine.step()
    stats = machine.scheduler.make_stats()
    assert (machine.encoded, stats.num_encoder_inputs, stats.num_encoder_hits) == ([LARGE], 1, 2)


def test_an_image_is_dropped_if_no_request_needs_it_any_more() -> None:
    machine = hand()
    machine.add(asks(1, 12, {0: LARGE}))
    machine.step()
    machine.scheduler.finish_requests(0, [1])
    machine.flush()
    machine.add(asks(2, 12, {0: OTHER}))
    machine.step()
    assert machine.parts == {bytes([OTHER]): 1}
    assert machine.num_dropped == 1
    # Another request that needs it goes on where it is.
    machine.add(asks(3, 12, {0: OTHER}))
    machine.step()
    machine.scheduler.finish_requests(0, [2])
    machine.flush()
    assert [machine.step() for _ in range(PARTS - 2)] == [{}] * (PARTS - 2)
    assert machine.step() == {3: 12}
    assert machine.num_dropped == 1


def test_the_last_part_waits_for_no_room_and_takes_none_that_a_step_needs() -> None:
    """The cache has room for one image: the one that is used, and the one that comes, follow each other."""
    machine = hand(cache=ROWS)
    machine.add(asks(1, 12, {0: LARGE}))
    for number in range(2, 12):
        machine.add(asks(number, 12, {0: 2 * number - 1}, 1))
        machine.step()
    while not (plan := machine.schedule()).is_empty:
        machine.update(plan)
    assert set(machine.encoded) == {LARGE, *range(3, 22, 2)}


def test_nothing_is_encoded_during_a_pause_or_without_an_executor() -> None:
    machine = hand()
    machine.add(asks(1, 12, {0: LARGE}))
    machine.step()
    machine.scheduler.pause(PauseMode.ALL)
    assert machine.schedule().is_empty
    machine.scheduler.resume()
    machine.step()
    assert machine.parts == {bytes([LARGE]): 2}
    machine.scheduler.lose_executor()
    assert machine.schedule().is_empty
    machine.scheduler.restore_executor()
    for _ in range(PARTS):
        machine.step()
    assert machine.encoded == [LARGE]


def test_a_waiting_request_says_that_it_waits_for_its_image() -> None:
    machine = hand()
    machine.add(asks(1, 12, {0: LARGE}))
    machine.step()
    decision = machine.scheduler.decision
    assert decision is not None
    assert [one.verdict for one in decision.examined] == [Verdict.NO_ENCODER_BUDGET]
    answer = explain(machine.scheduler, "fcfs", 0, Explain(1, number=1), 0)
    assert isinstance(answer, Explanation)
    assert [one.reason for one in answer.requests] == [Reason.NO_ENCODER_BUDGET]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_all_requests_end_with_their_images(seed: int, chunked: bool) -> None:
    """Hand checks each step: an image that a step needs is there, and parts follow each other."""
    rng = random.Random(seed)
    sizes = {"max_model_len": 40, "num_blocks": rng.choice([16, 40])}
    machine = hand(
        rng.choice([ROWS, 3 * ROWS]) if chunked else 40,
        rng.choice([ROWS, 3 * ROWS]) if chunked else 40,
        enable_chunked_prefill=chunked,
        scheduling_policy=rng.choice(["fcfs", "fair", "priority"]),
        **sizes,
    )
    number, live = 0, dict[int, Any]()
    for _ in range(150):
        if rng.randrange(3) == 0:
            number += 1
            places = {place: rng.randrange(1, 7) for place in rng.sample([0, 5, 10, 20], rng.randrange(4))}
            live[number] = machine.add(asks(number, 26, places, rng.randrange(1, 6)), number % 3)
        if live and rng.randrange(12) == 0:
            gone = rng.choice(sorted(live))
            machine.scheduler.finish_requests(gone % 3, [gone])
            machine.flush()
        if rng.randrange(40) == 0:
            machine.scheduler.lose_executor()
            machine.cache.clear()
            machine.parts.clear()
            machine.scheduler.restore_executor()
        plan = machine.schedule()
        if not plan.is_empty:
            machine.update(plan)
    num_steps = 0
    while machine.scheduler.has_work:
        plan = machine.schedule()
        assert not plan.is_empty
        machine.update(plan)
        num_steps += 1
        assert num_steps < 2000
    assert machine.scheduler.get_request_counts() == (0, 0)
    assert not machine.parts or machine.scheduler.schedule(0).is_empty


def test_an_older_plan_has_the_same_bytes() -> None:
    machine = hand()
    machine.add(asks(1, 12, {0: SMALL}))
    plan = machine.schedule()
    assert encode_plan(plan) == encode_plan(msgspec.structs.replace(plan, image_parts=[]))
