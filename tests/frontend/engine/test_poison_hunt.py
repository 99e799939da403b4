"""PoisonHunt: who is found, after how many deaths, and who is not accused. The engine is played."""

import math
import random

import pytest

from frontend.engine.death import Cause
from frontend.engine.supervisor import MAX_FREE_DEATHS, PoisonHunt
from ipc.records.black_box import Suspect

PLACE = 40  # tokens: where all requests are, in lockstep, and the poisons kill


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def play(hunt: PoisonHunt, num_requests: int, poisons: set[int], cause: Cause = Cause.CRASHED) -> int:
    """Run requests in lockstep until all have ended or are quarantined; return the number of deaths."""
    left = set(range(num_requests))
    num_deaths = 0
    for _ in range(1000):
        isolate = hunt.isolate(float(num_deaths))
        left -= {number for number in left if name(number) in isolate.quarantined}
        running = sorted(number for number in left if name(number) not in isolate.parked)
        if not left:
            return num_deaths
        rows = [Suspect(name(number), 0, PLACE) for number in running]
        if poisons & set(running):
            num_deaths += 1
            hunt.on_death(cause, rows, float(num_deaths))
            continue
        hunt.on_step([one._replace(start=PLACE, end=PLACE + 1) for one in rows], float(num_deaths))
        left -= set(running)  # they have passed the place, and end
    raise AssertionError("it does not end")


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 64, 100])
@pytest.mark.parametrize("seed", range(20))
def test_a_poison_is_found(num_requests: int, seed: int) -> None:
    poison, hunt = random.Random(seed).randrange(num_requests), PoisonHunt()
    num_deaths = play(hunt, num_requests, {poison})
    assert hunt.isolate(1.0).quarantined == [name(poison)]
    assert num_deaths <= math.ceil(math.log2(num_requests)) + 2


@pytest.mark.parametrize("num_requests", [2, 8, 64])
@pytest.mark.parametrize("seed", range(20))
def test_two_poisons_are_found(num_requests: int, seed: int) -> None:
    poisons, hunt = set(random.Random(seed).sample(range(num_requests), 2)), PoisonHunt()
    num_deaths = play(hunt, num_requests, poisons)
    assert set(hunt.isolate(1.0).quarantined) == {name(poison) for poison in poisons}
    assert num_deaths <= 2 * (math.ceil(math.log2(num_requests)) + 2)


def play_chunks(seed: int) -> tuple[PoisonHunt, int]:
    """Run prompts in chunks of changing sizes, one of which hangs each step that it is in, until it is quarantined.

    The supervisor looks at each step while it runs, also at the one that does not end. Return the deaths, too.
    """
    rng, hunt = random.Random(seed), PoisonHunt()
    count = rng.choice([2, 5, 12, 40])
    num_done = [0] * count  # tokens that the clients have; those that come back are computed anew
    for num_deaths in range(1, 40):
        isolate, at = hunt.isolate(float(num_deaths)), [0] * count
        for step in range(60):
            budget, rows = rng.randrange(24, 96), []
            for number in range(count):
                if name(number) in (*isolate.parked, *isolate.quarantined) or not budget or num_done[number] > 90:
                    continue
                chunk = min(budget, max(1, PLACE + num_done[number] - at[number]))
                rows.append(Suspect(name(number), at[number], at[number] + chunk))
                budget -= chunk
            now = num_deaths + step / 100
            if hunt.on_step(rows, now):
                isolate = hunt.isolate(now)
            if name(count // 2) in [row.digest for row in rows]:
                hunt.on_death(Cause.HUNG, rows, now)
                break
            for row in rows:
                number = int.from_bytes(row.digest, "big")
                at[number] = row.end
                num_done[number] = max(num_done[number], row.end - PLACE)
        if isolate.quarantined or hunt.isolate(now).quarantined:
            return hunt, num_deaths
    raise AssertionError("it is not found")


def test_in_chunks_of_prompts_nobody_else_is_accused() -> None:
    """A row of the step that hangs has passed nothing, though the step goes beyond where it died before."""
    for seed in range(300):
        hunt, num_deaths = play_chunks(seed)
        assert hunt.isolate(num_deaths + 1.0).quarantined == [name(_count(seed) // 2)], seed
        assert num_deaths <= math.ceil(math.log2(_count(seed))) + 2, seed


def _count(seed: int) -> int:
    return random.Random(seed).choice([2, 5, 12, 40])


def test_kills_from_outside_accuse_nobody() -> None:
    hunt = PoisonHunt()
    rows = [Suspect(name(number), 0, PLACE) for number in range(8)]
    for number in range(20):
        assert not hunt.on_death(Cause.KILLED, rows, float(number))
    assert hunt.isolate(20.0).parked == hunt.isolate(20.0).quarantined == []


def test_crashes_at_other_places_accuse_nobody() -> None:
    """Streams that have passed the place where the engine died before did not kill it there."""
    hunt = PoisonHunt()
    for number in range(20):
        rows = [Suspect(name(row), 10 * number + 5, 10 * number + 6) for row in range(8)]
        assert not hunt.on_death(Cause.CRASHED, rows, float(number))
    assert not hunt.is_searching


def test_what_happened_long_ago_is_forgotten() -> None:
    hunt = PoisonHunt()
    row = [Suspect(name(1), 0, PLACE)]
    hunt.on_death(Cause.HUNG, row, 0.0)
    assert not hunt.on_death(Cause.HUNG, row, 601.0)
    assert hunt.on_death(Cause.HUNG, row, 602.0)
    assert hunt.isolate(1201.0).quarantined == [name(1)]
    assert hunt.isolate(1202.0).quarantined == []


def test_a_search_is_free_up_to_a_bound() -> None:
    hunt = PoisonHunt()
    free = [hunt.on_death(Cause.CRASHED, [Suspect(name(number // 2), 0, PLACE)], 1.0) for number in range(40)]
    assert free.count(True) == MAX_FREE_DEATHS
    assert free[:4] == [False, True, False, True]


def test_a_crash_outside_of_a_step_accuses_nobody() -> None:
    hunt = PoisonHunt()
    assert not hunt.on_death(Cause.CRASHED, [], 0.0)
    assert not hunt.on_death(Cause.CRASHED, [], 1.0)


def suspected(count: int) -> PoisonHunt:
    """A hunt in which so many requests were twice in a step that died."""
    hunt = PoisonHunt()
    for time in (0.0, 1.0):
        hunt.on_death(Cause.CRASHED, [Suspect(name(number), 0, PLACE) for number in range(count)], time)
    return hunt


def test_the_other_half_is_released_when_this_one_has_passed_ended_or_left() -> None:
    hunt = suspected(6)
    assert hunt.isolate(1.0).parked == [name(0), name(1), name(2)]
    at_place = [Suspect(name(number), 0, PLACE) for number in (3, 4)]
    assert not hunt.on_step(at_place, 2.0)
    passed = [Suspect(name(3), PLACE, PLACE + 1), at_place[1]]
    assert not hunt.on_step(passed, 3.0)
    assert not hunt.on_step([], 3.5), "one was left out of a step, or is gone"
    assert not hunt.on_step([], 4.0), "one has not begun yet"
    assert not hunt.on_step([], 11.9)
    assert hunt.on_step([], 12.0)
    assert hunt.isolate(12.0).parked == [name(0)], "a half of the others runs"
