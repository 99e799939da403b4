"""The thread that carries out orders: each gets its answer, whatever becomes of the disk and of the thread."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.inputs import BlocksArrived, BlocksFound, BlocksStored, StoreNews
from core.kv.orders import Leave, Look, Order, Store
from core.tiers import connector, store_thread
from core.tiers.store_thread import StoreThread
from tests.core.tiers.test_block_store import TOKENS, Parts, fetch

pytestmark = pytest.mark.timeout(60)
LOOK = Look(1, -1, TOKENS, 0)
STORE = Store(3, np.array([4], np.int32), np.array([2]))


class Answers:
    """What a thread tells; wait() takes the next ones."""

    def __init__(self) -> None:
        self.told: list[StoreNews] = []
        self._changed = threading.Condition()

    def tell(self, news: StoreNews) -> None:
        with self._changed:
            self.told.append(news)
            self._changed.notify()

    def wait(self, count: int) -> list[StoreNews]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.told) >= count, 30), self.told
            taken, self.told = self.told, []
            return taken


class Gate:
    """Stands in for carry_out: a disk that hangs until it is opened. seen: orders that have come through."""

    def __init__(self, parts: Parts) -> None:
        self.seen: list[Order] = []
        self.is_open, self.hangs = threading.Event(), threading.Event()
        self._carry_out = parts.store.carry_out

    def __call__(self, order: Order) -> StoreNews | None:
        self.hangs.set()
        assert self.is_open.wait(30)
        self.seen.append(order)
        return self._carry_out(order)


@pytest.fixture(name="parts")
def make_parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "kv")


@pytest.fixture(name="gate")
def make_gate(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(parts)
    monkeypatch.setattr(parts.store, "carry_out", gate)
    yield gate
    gate.is_open.set()


def test_the_thread_answers_and_ends_with_all_that_is_left(parts: Parts) -> None:
    answers = Answers()
    thread = StoreThread(parts.store, answers.tell)
    thread.put([])
    thread.put([parts.leave(), LOOK, fetch()])
    assert {type(answer) for answer in answers.wait(2)[:2]} == {BlocksFound, BlocksArrived}
    thread.close(30)
    assert thread_names().count("kv files") == 0
    assert len(os.listdir(parts.path / "blocks")) == 3


def test_an_error_of_the_disk_is_an_answer_of_none(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(order: Order) -> StoreNews | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    said: list[str] = []
    monkeypatch.setattr(connector.log, "say", said.append)
    answers = Answers()
    thread = StoreThread(parts.store, answers.tell)
    with monkeypatch.context() as patch:
        patch.setattr(parts.store, "carry_out", fail)
        for order, answer in ((LOOK, BlocksFound(1, 0)), (fetch(), BlocksArrived(7, 0)), (STORE, BlocksStored(3, 0))):
            thread.put([order])
            assert answers.wait(1) == [answer]
    assert len(said) == 3
    thread.put([parts.leave(), LOOK])
    assert answers.wait(1) == [BlocksFound(1, 0)], "it goes on"
    thread.close(30)


def test_after_the_death_of_the_thread_each_order_has_its_answer(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that came before it, the one at work, and those that come later. The log says so once."""
    may_die = threading.Event()

    def die(order: Order) -> StoreNews | None:
        assert may_die.wait(30)
        raise ValueError("planted")

    said: list[str] = []
    hooked: list[Any] = []
    monkeypatch.setattr(connector.log, "say", said.append)
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    monkeypatch.setattr(parts.store, "carry_out", die)
    answers = Answers()
    thread = StoreThread(parts.store, answers.tell)
    thread.put([LOOK, fetch(), parts.leave(), STORE])
    may_die.set()
    assert sorted(map(str, answers.wait(3))) == sorted(
        map(str, [BlocksFound(1, 0), BlocksArrived(7, 0), BlocksStored(3, 0)])
    )
    for _ in range(2):
        thread.put([LOOK, parts.leave(), STORE])
        assert answers.wait(2) == [BlocksFound(1, 0), BlocksStored(3, 0)]
    thread.close(30)
    assert [str(one.exc_value) for one in hooked] == ["planted"]
    assert len(said) == 1
    assert "has died" in said[0]


@pytest.mark.parametrize("bound", ["MAX_LEAVES", "MAX_LEAVE_BYTES"])
def test_a_disk_that_hangs_holds_a_bounded_number_of_leaves(
    parts: Parts, gate: Gate, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """The oldest give way, and no order that has an answer does."""
    one = parts.leave()
    size = one.token_ids.nbytes + one.blocks.nbytes + one.contents.nbytes + one.evictions.nbytes
    monkeypatch.setattr(store_thread, bound, {"MAX_LEAVES": 4, "MAX_LEAVE_BYTES": 4 * size}[bound])
    answers = Answers()
    thread = StoreThread(parts.store, answers.tell)
    thread.put([LOOK])
    assert gate.hangs.wait(30)
    leaves = [parts.leave() for _ in range(10)]
    for leave in leaves:
        thread.put([leave, LOOK])
    thread.put([STORE])
    gate.is_open.set()
    answers.wait(12)
    thread.close(30)
    came = [order for order in gate.seen if isinstance(order, Leave)]
    assert len(came) == 4
    assert all(left is right for left, right in zip(came, leaves[6:], strict=True))


def test_a_thread_without_time_ends_after_the_order_at_work(parts: Parts, gate: Gate) -> None:
    answers = Answers()
    thread = StoreThread(parts.store, answers.tell)
    thread.put([parts.leave(), LOOK])
    assert gate.hangs.wait(30)
    thread.close(0)
    gate.is_open.set()
    thread.close(30)
    assert thread_names().count("kv files") == 0
    assert gate.seen == [LOOK]
    assert os.listdir(parts.path / "blocks") == []


def thread_names() -> list[str]:
    return [one.name for one in threading.enumerate()]
