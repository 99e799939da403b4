"""Watchdog under a virtual clock: what hangs is found in time, and nothing else is."""

import pytest

from frontend.engine.supervised_engine import Watchdog
from ipc.records.black_box import NO_READING, Reading

TICK_S = 0.5
S = 1_000_000_000


def reading(**changes: int) -> Reading:
    """An engine in a step of 4 tokens, whose like has taken 0.1 s."""
    values = {"epoch": 0, "pid": 1, "num_begun": 5, "num_ended": 4, "num_tokens": 4, "expected_ns": S // 10}
    return NO_READING._replace(**values | changes)


def alarm_after(watchdog: Watchdog, one: Reading, limit_s: float = 1000.0) -> float | None:
    """Seconds of looking at the same reading until the alarm; None = there is none."""
    for look in range(int(limit_s / TICK_S)):
        if watchdog.look(one, look * TICK_S):
            return look * TICK_S
    return None


@pytest.mark.parametrize(
    ("one", "seconds"),
    [
        (reading(), 5.5),
        (reading(expected_ns=S), 20.5),
        (reading(expected_ns=0), 300.5),  # the first step of all may be long: a large model's prompt
        (reading(num_ended=5), 10.5),  # idle: the loop turns every 5 s
        (NO_READING, 300.5),
    ],
)
def test_what_shows_no_sign_hangs(one: Reading, seconds: float) -> None:
    assert alarm_after(Watchdog(), one) == seconds


def test_an_engine_that_goes_on_is_left_alone() -> None:
    """A hundred steps ten times as slow as any before, then an hour of idling."""
    watchdog = Watchdog()
    now = 0.0
    for step in range(100):
        for _ in range(8):
            assert not watchdog.look(reading(num_begun=step + 1, num_ended=step, expected_ns=S * 4 // 10), now)
            now += TICK_S
    for turn in range(720):
        for _ in range(10):
            assert not watchdog.look(reading(num_begun=100, num_ended=100, num_turns=turn), now)
            now += TICK_S


def test_time_in_which_nobody_looked_does_not_count() -> None:
    watchdog = Watchdog()
    assert not watchdog.look(reading(), 0.0)
    assert not watchdog.look(reading(), 3600.0), "the machine was suspended"
    assert alarm_after(watchdog, reading()) is not None


def test_it_can_be_switched_off() -> None:
    assert alarm_after(Watchdog(least_s=0.0), reading()) is None


def test_an_alarm_says_what_and_how_long() -> None:
    watchdog = Watchdog()
    alarm_after(watchdog, reading())
    assert watchdog.text == "its step 5 has not ended for 5.5 s; the limit is 5.0 s"
    alarm_after(watchdog, reading(num_ended=5))
    assert watchdog.text == "its loop does not turn for 10.5 s; the limit is 10.0 s"
