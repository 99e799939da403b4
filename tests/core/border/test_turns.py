"""Whose item a thread takes next."""

import time
from types import SimpleNamespace

import pytest

from core.border import turns as module
from core.border.turns import BURST_S, Turns


def set_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock whose `now` the tests set, in seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_an_item_given_back_comes_before_its_owners_others_and_behind_other_owners() -> None:
    turns: Turns[str] = Turns()
    for client, item in ((1, "a"), (1, "b"), (2, "c")):
        turns.put(client, item)
    taken = []
    for _ in range(5):
        item = turns.take()
        assert item is not None
        taken.append(item)
        if taken.count("a") < 3 and item == "a":
            turns.give_back(1, item)
    assert taken == ["a", "c", "a", "a", "b"]


def test_who_has_had_more_than_a_share_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns = set_clock(monkeypatch), Turns[str](0.25)
    for owner, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2")):
        turns.put(owner, item)
    assert turns.take() == "a1"
    turns.charge("a", BURST_S)
    assert [turns.take(), turns.take()] == ["b1", "a2"], "a burst is free"
    turns.charge("a", 1.0)
    assert turns.take() == "b2"
    turns.put("b", "b3")
    clock.now += 3.99
    assert turns.take() == "b3"
    clock.now += 0.02
    turns.put("b", "b4")
    assert [turns.take(), turns.take()] == ["a3", "b4"], "four seconds pay for one"


def test_time_without_work_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns = set_clock(monkeypatch), Turns[str](0.5)
    turns.charge("a", 1.0)
    clock.now += 1000.0
    turns.charge("a", 2 * BURST_S)
    turns.put("a", "a1")
    turns.put("b", "b1")
    assert turns.take() == "b1"
    clock.now += 2 * BURST_S + 0.001
    assert turns.take() == "a1"


def test_take_waits_for_the_end_of_a_rest() -> None:
    turns = Turns[str](0.5)
    turns.charge("a", BURST_S + 0.02)
    begin = time.monotonic()
    turns.put("a", "a1")
    assert turns.take() == "a1"
    assert time.monotonic() - begin > 0.03


def test_resting_owners_are_forgotten_when_they_are_many_and_have_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns = set_clock(monkeypatch), Turns[str](0.5)
    monkeypatch.setattr(module, "_MAX_RESTING", 10)
    turns.charge("debtor", 1000.0)
    for owner in range(100):
        turns.charge(owner, 0.001)
        clock.now += 1.0
    assert len(turns._paid_at) <= 10
    assert turns._paid_at["debtor"] == 2100.0


def test_after_close_nothing_is_taken() -> None:
    turns = Turns[str](0.25)
    turns.put("a", "a1")
    turns.charge("a", 1000.0)
    turns.close()
    assert turns.take() is None
