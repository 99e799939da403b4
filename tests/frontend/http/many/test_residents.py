"""Residents: loading, waiting and eviction, alone and on random walks next to a gold model."""

import heapq
import random
from math import inf

import pytest

from frontend.http.many.residents import FAILED_S, PATIENCE_S, Admit, Place, Refuse, Residents, Start, Stop
from tests.frontend.http.many.gold_residents import Gold, bound_s


def two(memory: int = 10, keep_s: float = 300.0) -> Residents:
    residents = Residents(memory, 600.0)
    for name in ("a", "b"):
        residents.put(name, 6, keep_s)
    return residents


def loaded(residents: Residents, request: int, name: str, now: float) -> None:
    residents.request(request, name, now)
    assert residents.take() == [Start(name)]
    residents.on_ready(name, now)
    assert residents.take() == [Admit(request)]


def test_a_model_is_loaded_on_its_first_request_and_kept() -> None:
    residents = two()
    loaded(residents, 1, "a", 0.0)
    residents.request(2, "a", 1.0)
    assert residents.take() == [Admit(2)]
    residents.leave(1, 2.0)
    residents.leave(2, 3.0)
    residents.tick(302.9)
    assert residents.take() == []
    residents.tick(303.0)
    assert residents.take() == [Stop("a")]


def test_a_model_that_answers_stays_and_the_other_waits() -> None:
    residents = two()
    loaded(residents, 1, "a", 0.0)
    residents.request(2, "b", 1.0)
    residents.tick(5.0)
    assert residents.take() == []
    residents.leave(1, 6.0)
    assert residents.take() == [Stop("a")]
    residents.on_end("a", 7.0)
    assert residents.take() == [Start("b")]


def test_both_stay_if_they_fit() -> None:
    residents = two(memory=12)
    loaded(residents, 1, "a", 0.0)
    loaded(residents, 2, "b", 0.0)
    assert residents.used == 12


def test_a_model_in_constant_use_yields_to_one_that_waits() -> None:
    residents = two()
    loaded(residents, 1, "a", 0.0)
    residents.request(2, "b", 0.0)
    residents.request(3, "a", 1.0)
    residents.leave(1, 2.0)
    residents.tick(PATIENCE_S)
    assert residents.take() == [Admit(3)]
    residents.request(4, "a", PATIENCE_S + 1)
    assert residents.take() == []
    residents.leave(3, PATIENCE_S + 2)
    assert residents.take() == [Stop("a")]
    residents.on_end("a", PATIENCE_S + 3)
    assert residents.take() == [Start("b")]
    residents.on_ready("b", PATIENCE_S + 4)
    residents.leave(2, PATIENCE_S + 5)
    assert residents.take() == [Admit(2), Stop("b")]
    residents.on_end("b", PATIENCE_S + 6)
    residents.on_ready("a", PATIENCE_S + 7)
    assert residents.take() == [Start("a"), Admit(4)]


def test_it_takes_requests_again_if_the_waiting_ones_leave() -> None:
    residents = two()
    loaded(residents, 1, "a", 0.0)
    residents.request(2, "b", 0.0)
    residents.tick(PATIENCE_S)
    residents.request(3, "a", PATIENCE_S)
    assert residents.take() == []
    residents.leave(2, PATIENCE_S + 1)
    assert residents.take() == [Admit(3)]


def test_it_yields_to_one_model_at_a_time() -> None:
    residents = two()
    residents.put("c", 6, inf)
    loaded(residents, 1, "a", 0.0)
    residents.request(2, "b", 0.0)
    residents.request(4, "c", 2.0)
    residents.tick(PATIENCE_S)
    residents.request(3, "a", PATIENCE_S)
    residents.leave(2, PATIENCE_S + 1)
    assert residents.take() == [Admit(3)]


@pytest.mark.parametrize(("kept", "later", "stops"), [(0.0, 0.0, True), (inf, 1e9, False)])
def test_keep_alive_of_a_request(kept: float, later: float, *, stops: bool) -> None:
    residents = two()
    residents.request(1, "a", 0.0, kept)
    residents.on_ready("a", 0.0)
    residents.take()
    residents.leave(1, 1.0)
    residents.tick(1.0 + later)
    assert residents.take() == ([Stop("a")] if stops else [])


def test_what_cannot_fit_is_refused_with_sizes() -> None:
    residents = two(memory=5)
    residents.request(1, "a", 0.0)
    (refusal,) = residents.take()
    assert isinstance(refusal, Refuse)
    assert refusal.is_final
    assert "6 bytes" in refusal.text
    assert "5" in refusal.text


def test_a_failed_load_answers_its_requests_and_is_not_repeated_at_once() -> None:
    residents = two()
    residents.request(1, "a", 0.0)
    residents.on_end("a", 1.0, "no such file")
    residents.request(2, "a", 1.5)
    assert residents.take() == [Start("a"), Refuse(1, "no such file"), Refuse(2, "no such file")]
    residents.request(3, "a", 1.0 + FAILED_S)
    assert residents.take() == [Start("a")]


def test_a_model_that_died_is_loaded_again() -> None:
    residents = two()
    loaded(residents, 1, "a", 0.0)
    residents.on_end("a", 1.0)
    residents.request(2, "a", 1.0)
    assert residents.take() == [Start("a")]
    residents.leave(1, 1.0)
    residents.on_ready("a", 2.0)
    assert residents.take() == [Admit(2)]


def test_a_wait_ends() -> None:
    residents = Residents(10, 20.0)
    residents.put("a", 6, inf)
    residents.request(1, "a", 0.0)
    residents.tick(20.0)
    assert [type(one) for one in residents.take()] == [Start, Refuse]


def walk(seed: int, num_events: int) -> Gold:
    """Requests at random times; engines that load, fail and die; callers that leave."""
    draw = random.Random(seed)
    sizes = {name: draw.randint(1, 6) for name in "abcde"[: draw.randint(2, 5)]}
    keep = {name: draw.choice([0.0, 5.0, 60.0, inf]) for name in sizes}
    memory = draw.randint(4, 12)
    answer_s, load_s = draw.choice([0.5, 5.0, 15.0]), draw.choice([0.1, 3.0])
    max_wait_s = bound_s(len(sizes), answer_s, load_s)
    residents, gold = Residents(memory, max_wait_s), Gold(sizes, keep, memory, max_wait_s)
    for name, size in sizes.items():
        residents.put(name, size, keep[name])
    events = [(draw.uniform(0, num_events / draw.choice([1, 10])), at, "ask") for at in range(num_events)]
    heapq.heapify(events)
    number, now, ends = num_events, 0.0, dict[int, str]()
    faults, quits = draw.choice([0.0, 0.1]), draw.choice([0.0, 0.2])
    generation = dict.fromkeys(sizes, 0)  # of engines: an event of an earlier one is dropped

    def later(seconds: float, what: str) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now + seconds, number, what))

    later(1.0, "tick")
    while events:
        now, at, what = heapq.heappop(events)
        kind, _, name = what.partition(" ")
        name, _, known = name.partition(" ")
        if known and int(known) != generation[name]:
            continue
        if kind == "ask":
            wanted, kept = draw.choice([*sizes]), draw.choice([None, None, 0.0, 3.0, inf])
            residents.request(at, wanted, now, kept)
            gold.request(at, wanted, now, kept)
            ends[at] = wanted
            if draw.random() < quits:
                later(draw.uniform(0, 10), f"leave {at}")
        elif kind == "leave":
            residents.leave(int(name), now)
            gold.leave(int(name), now)
            ends.pop(int(name), None)
        elif kind == "ready":
            residents.on_ready(name, now)
            gold.on_ready(name, now)
            if draw.random() < faults:
                later(draw.uniform(0, 20), f"end {name} {generation[name]}")
        elif kind == "end":
            generation[name] += 1
            residents.on_end(name, now)
            gold.on_end(name, now)
        else:
            residents.tick(now)
            if events:
                later(1.0, "tick")
        actions = residents.take()
        gold.check(actions, now)
        for action in actions:
            if isinstance(action, Start):
                fails = draw.random() < faults
                later(draw.uniform(0, load_s), f"{'end' if fails else 'ready'} {action.name} {generation[action.name]}")
            elif isinstance(action, Stop):
                generation[action.name] += 1
                later(draw.uniform(0, load_s), f"end {action.name} {generation[action.name]}")
            elif isinstance(action, Admit):
                later(draw.uniform(0, answer_s), f"leave {action.request}")
            else:
                del ends[action.request]
    assert ends == {}, "requests without an end"
    assert not gold.running
    assert not gold.waiting
    assert all(one.place in (Place.OUT, Place.READY) for one in residents.by_name.values())
    return gold


@pytest.mark.parametrize("seed", range(40))
def test_random_walks(seed: int) -> None:
    walk(seed, 150)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 300))
def test_long_random_walks(seed: int) -> None:
    walk(seed, 1500)
