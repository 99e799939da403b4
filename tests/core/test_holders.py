"""Holders: a key is unheld with the end of its last holder, also where the lock is taken then."""

import threading

from core.holders import Holders


class Thing:
    """Something that ends."""


def test_a_key_is_unheld_with_its_last_holder() -> None:
    ended: list[str] = []
    lock = threading.Lock()
    held = Holders[str](lock, ended.append)
    first, second, other = Thing(), Thing(), Thing()
    with lock:
        for holder, key in ((first, "a"), (second, "a"), (other, "b")):
            held.hold(holder, key)
    del first
    assert not ended
    assert "a" in held
    del second
    assert ended == ["a"]
    assert "a" not in held
    assert "b" in held
    del other, holder  # the loop has the last one, too
    assert ended == ["a", "b"]


def test_an_end_under_the_lock_waits_for_settle() -> None:
    ended: list[str] = []
    lock = threading.Lock()
    held = Holders[str](lock, ended.append)
    with lock:
        holder = Thing()
        held.hold(holder, "a")
        del holder
        assert not ended
        assert "a" in held
        held.settle()
        assert ended == ["a"]
