"""Turns: bounded work at once, in turns between tenants, with a bound on what waits."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from frontend.http import turns
from frontend.http.errors import HttpError
from frontend.http.turns import Turns


class Work:
    """Work that waits for a word, and notes in which order it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()
        self.num_running = self.most_running = 0
        self._lock = threading.Lock()

    def of(self, name: str) -> Callable[[], str]:
        def work() -> str:
            with self._lock:
                self.begun.append(name)
                self.num_running += 1
                self.most_running = max(self.most_running, self.num_running)
            assert self.go.wait(30)
            with self._lock:
                self.num_running -= 1
            return name

        return work


def test_a_tenant_waits_behind_its_own_work_only() -> None:
    work = Work()

    async def run() -> None:
        shared = Turns(1)
        tasks = [asyncio.create_task(shared.run("flood", 1000, work.of(f"flood {index}"))) for index in range(50)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(shared.run("alice", 10, work.of(f"alice {index}"))) for index in range(3)]
        await asyncio.sleep(0)
        work.go.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert work.most_running == 1
    assert len(work.begun) == 53
    assert [work.begun.index(f"alice {index}") for index in range(3)] == [2, 4, 6]
    assert [name for name in work.begun if "flood" in name] == [f"flood {index}" for index in range(50)]


def test_large_work_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MAX_RUNNING", 100)
    work = Work()

    async def run() -> None:
        shared = Turns(8)
        tasks = [asyncio.create_task(shared.run("", size, work.of(str(size)))) for size in (60, 40, 500, 30, 30)]
        for _ in range(5):
            await asyncio.sleep(0)
        while len(work.begun) < 2:
            await asyncio.sleep(0.001)
        assert sorted(work.begun) == ["40", "60"]
        work.go.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert work.most_running == 2
    assert work.begun[2] == "500"


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MAX_WAITING", 1000)
    monkeypatch.setattr(turns, "_MAX_OF_TENANT", 500)
    work = Work()

    async def run() -> None:
        shared = Turns(1)
        tasks = [asyncio.create_task(shared.run("flood", 200, work.of("flood"))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(HttpError) as refused:
            await shared.run("flood", 200, work.of("never"))
        assert refused.value.status == 503
        assert (b"retry-after", b"1") in refused.value.headers
        tasks.append(asyncio.create_task(shared.run("alice", 200, work.of("alice"))))
        leaves = asyncio.create_task(shared.run("bob", 200, work.of("bob")))
        await asyncio.sleep(0)
        leaves.cancel()
        work.go.set()
        assert await asyncio.gather(*tasks) == ["flood"] * 3 + ["alice"]
        assert await shared.run("flood", 200, lambda: "again") == "again"

    asyncio.run(run())
    assert "never" not in work.begun
    assert "bob" not in work.begun


def test_an_error_gives_its_turn_away() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def run() -> None:
        shared = Turns(1)
        found = await asyncio.gather(*(shared.run("", 1, fail) for _ in range(5)), return_exceptions=True)
        assert [str(one) for one in found] == ["no"] * 5
        assert await shared.run("", 1, lambda: 7) == 7

    asyncio.run(run())
