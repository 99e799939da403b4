"""How a server takes up the responses that another one has left."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from frontend.http.process.options import HttpOptions
from frontend.http.request import Request
from frontend.http.shared import Shared
from frontend.http.stored import background
from frontend.http.stored.database import MIN_STORE_BYTES, Database
from frontend.http.stored.store import RUNNING, Work
from tests.frontend.http.stored.test_store import put, record


def test_the_oldest_are_begun_first_and_then_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all began at once, none would end while servers are killed again and again."""
    clock = [0.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    work = Work(b'{"input": "Hi"}', "demo", 5, [1, 2], "f", is_streamed=False)
    left = [msgspec.structs.replace(record(f"r{number}"), status=RUNNING) for number in range(40)]
    for one in left:
        one.content.work = work

    async def run() -> None:
        database = Database(str(tmp_path / "s"), MIN_STORE_BYTES, 0)
        shared, asked, hold = Shared(HttpOptions(), database), list[str](), asyncio.Event()

        async def find(request: Request) -> Any:
            asked.append(request.id)
            await hold.wait()

        async def settle() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        assert shared.store is not None
        await put(shared.store, *left)
        served: Any = SimpleNamespace(shared=shared, service_for=find)
        monkeypatch.setattr(background, "_DOUBLED_S", 0.01)  # of the real clock, between two looks
        await background.resume(served)
        await settle()
        assert asked == [f"r{number}" for number in range(8)]
        clock[0] = 0.011
        while len(asked) < 16:
            await asyncio.sleep(0.001)
        await settle()
        assert asked == [f"r{number}" for number in range(16)]
        run = shared.runs.by_id["r0"]
        assert run.task is not None
        run.task.cancel()  # one that ends makes room for another one, and there are twice as many now
        await settle()
        assert asked[16:] == ["r16", "r17", "r18"]
        tasks = [run.task for run in shared.runs.by_id.values() if run.task is not None]
        shared.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        database.close()

    asyncio.run(run())
