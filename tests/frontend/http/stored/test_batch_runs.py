"""The work on batches, with made-up answers: no line is lost or doubled, whatever ends the server."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.http.callers.keys import Key, KeyRing
from frontend.http.errors import HttpError
from frontend.http.openai.batch_lines import BatchRequest, read_line
from frontend.http.request import LocalAnswer
from frontend.http.stored import batch_runs
from frontend.http.stored.batch_runs import PRIORITY, Batches, own_body
from frontend.http.stored.batch_store import UNFINISHED, VALIDATING, Batch, Plan
from frontend.http.stored.database import MIN_STORE_BYTES, Database
from frontend.http.stored.files import HIDDEN, NEVER, PROCESSED, File, FileInfo, FileStore
from frontend.http.stored.slots import Slots
from frontend.http.turns import Turns
from tests.frontend.http.stored.test_store import change

_ALL = 1 << 40
URL = "/v1/completions"


def line(custom_id: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode() + b"\n"


LINES = [line(f"c{number}", prompt=f"p{number}") for number in range(40)]


class Server:
    """One server's batches. answer: of a line, given its body and the number of lines that were asked before."""

    def __init__(self, path: Path, answer: Callable[[Any, int], Awaitable[LocalAnswer]], *, most: int = _ALL) -> None:
        self.database = Database(str(path), MIN_STORE_BYTES, 0)
        self.files = FileStore(self.database)
        self.batches = Batches(self.files, Turns(1), KeyRing(), lambda key: most)
        self.num_asked = self.num_running = self.most_running = 0
        self._answer, self.has_room = answer, True

    async def post(
        self, path: str, body: bytes, *, key: Key | None = None, request_id: str | None = None
    ) -> LocalAnswer:
        self.num_asked += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._answer(json.loads(body), self.num_asked - 1)
        finally:
            self.num_running -= 1

    async def start(self, width: int = 4) -> None:
        async def has_room() -> bool:
            return self.has_room

        await self.batches.start(self.post, lambda: width, has_room)

    async def create(self, parts: Sequence[bytes], *, ends_in: int = 1000) -> Batch:
        now = int(time.time())
        source = File("file-in", "", now, NEVER, PROCESSED, FileInfo("in", "batch", sum(map(len, parts))))
        await self.files.put(source, _ALL)
        for number, part in enumerate(parts):
            await self.files.add_part(source.id, "", number, part, _ALL)
        outputs = [File(name, "", now, NEVER, HIDDEN, FileInfo(name, "batch_output")) for name in ("out", "err")]
        batch = Batch("b", "", now, source.id, VALIDATING, Plan(URL, "out", "err", "24h", now + ends_in))
        await self.batches.store.put(batch, outputs, _ALL)
        self.batches.begin(batch)
        return batch

    async def end(self) -> Batch:
        """Return the batch once it has ended."""
        while self.batches.runs:
            await asyncio.sleep(0.001)
        return await self.batches.store.get("b", "")

    async def lines(self, file_id: str) -> list[Any]:
        parts, at = b"", -1
        while found := await self.files.parts(file_id, at):
            parts += b"".join(part for _, part in found)
            at = found[-1][0]
        return [json.loads(one) for one in parts.splitlines()]


@contextlib.asynccontextmanager
async def serving(path: Path, answer: Any, *, most: int = _ALL, width: int = 4) -> AsyncIterator[Server]:
    server = Server(path, answer, most=most)
    try:
        await server.start(width)
        yield server
    finally:
        await server.batches.close()
        server.database.close()


async def echo(body: Any, asked: int) -> LocalAnswer:
    await asyncio.sleep(0)
    answer = json.dumps({"text": body["prompt"], "seed": body["seed"]}).encode()
    return LocalAnswer(400 if body["prompt"] == "p7" else 200, {}, answer)


def test_each_line_is_answered_once_in_order_of_the_input(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path / "s", echo) as server:
            data = b"\r\n".join(LINES)[:-1]
            await server.create([data[:100], data[100:1001], data[1001:]])  # cut in the middle of lines
            batch = await server.end()
            shown, plan = batch.shown(), batch.plan
            assert shown["status"] == "completed"
            assert shown["request_counts"] == {"total": 40, "completed": 39, "failed": 1}
            assert (shown["output_file_id"], shown["error_file_id"], shown["errors"]) == ("out", "err", None)
            assert shown["in_progress_at"] <= shown["finalizing_at"] <= shown["completed_at"]
            answers = await server.lines(plan.output)
            assert [one["custom_id"] for one in answers] == [f"c{number}" for number in range(40) if number != 7]
            assert [one["response"]["body"]["text"] for one in answers][:2] == ["p0", "p1"]
            assert [one["response"]["status_code"] for one in await server.lines(plan.errors)] == [400]
            assert (server.num_asked, server.most_running) == (40, 4)
            assert len({one["response"]["body"]["seed"] for one in answers}) == 39
            file = await server.files.get("out", "")
            assert file.info.num_bytes == sum(len(part) for _, part in await server.files.parts("out", -1))

    asyncio.run(run())


def test_nothing_is_lost_doubled_or_different_if_the_server_ends_anywhere(tmp_path: Path) -> None:
    draw = random.Random(3)

    async def slow(body: Any, asked: int) -> LocalAnswer:
        for _ in range(draw.randrange(20)):
            await asyncio.sleep(0)
        return await echo(body, asked)

    async def undisturbed() -> Any:
        async with serving(tmp_path / "a", echo) as server:
            await server.create([b"".join(LINES)])
            await server.end()
            return await server.lines("out"), await server.lines("err")

    async def killed() -> Any:
        num_asked, num_servers, is_over = 0, 0, False
        while not is_over:
            async with serving(tmp_path / "b", slow) as server:
                if not num_servers:
                    await server.create([b"".join(LINES)])
                most = draw.randrange(16)
                while server.batches.runs and server.num_asked < most:
                    await asyncio.sleep(0)
                is_over = not server.batches.runs
            num_asked += server.num_asked
            num_servers += 1
        assert num_servers > 4
        assert num_asked > 40
        async with serving(tmp_path / "b", echo) as server:
            completed = (await server.end()).plan.completed
            return await server.lines("out"), await server.lines("err"), completed

    wanted, found = asyncio.run(undisturbed()), asyncio.run(killed())
    assert [(one["id"], one["custom_id"], one["response"]) for one in found[0]] == [
        (one["id"], one["custom_id"], one["response"]) for one in wanted[0]
    ]
    assert found[1] == wanted[1]
    assert found[2] == 39


def test_a_refused_line_is_sent_again_and_holds_no_place(tmp_path: Path) -> None:
    async def full(body: Any, asked: int) -> LocalAnswer:
        if asked < 3:
            return LocalAnswer(503 if asked else 429, {b"retry-after-ms": b"1"}, b"{}")
        return await echo(body, asked)

    async def final(body: Any, asked: int) -> LocalAnswer:
        return LocalAnswer(503, {b"x-should-retry": b"false"}, b"{}")

    async def run(answer: Any, path: Path) -> Any:
        async with serving(path, answer, width=1) as server:
            await server.create(LINES[:3])
            return (await server.end()).shown()["request_counts"]

    assert asyncio.run(run(full, tmp_path / "a")) == {"total": 3, "completed": 3, "failed": 0}
    assert asyncio.run(run(final, tmp_path / "b")) == {"total": 3, "completed": 0, "failed": 3}


@pytest.mark.parametrize(
    ("parts", "code", "number"),
    [
        ([b"{}\n", *LINES], "invalid_line", 1),
        ([*LINES[:2], b"\n", LINES[1]], "duplicate_custom_id", 4),
        ([LINES[0], LINES[1].replace(b"completions", b"embeddings")], "invalid_line", 2),
        ([line("x", prompt="p", stream=True)], "invalid_line", 1),
        ([b"\n\n"], "empty_file", None),
        ([b"x" * 300_000] * 29, "invalid_line", 1),
    ],
)
def test_a_wrong_input_fails_before_any_line_runs(
    tmp_path: Path, parts: list[bytes], code: str, number: int | None
) -> None:
    async def run() -> None:
        database_bytes, server = 1 << 26, Server(tmp_path / "s", echo)
        server.database.close()
        server.database = Database(str(tmp_path / "s"), database_bytes, 0)
        server.files = FileStore(server.database)
        server.batches = Batches(server.files, Turns(1), KeyRing(), lambda key: _ALL)
        await server.start()
        await server.create(parts)
        shown = (await server.end()).shown()
        await server.batches.close()
        server.database.close()
        assert (shown["status"], server.num_asked) == ("failed", 0)
        assert (shown["output_file_id"], shown["error_file_id"]) == (None, None)
        first = shown["errors"]["data"][0]
        assert (first["code"], first["line"]) == (code, number)
        assert len(shown["errors"]["data"]) == 1

    asyncio.run(run())


def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    async def stuck(body: Any, asked: int) -> LocalAnswer:
        if asked >= 5:
            await asyncio.sleep(100)
        return await echo(body, asked)

    async def run() -> None:
        async with serving(tmp_path / "s", stuck) as server:
            batch = await server.create(LINES)
            while server.num_asked < 9:
                await asyncio.sleep(0.001)
            await server.batches.cancel(batch)
            shown = (await server.end()).shown()
            assert shown["status"] == "cancelled"
            assert shown["cancelling_at"] <= shown["cancelled_at"]
            assert shown["request_counts"] == {"total": 40, "completed": 5, "failed": 0}
            assert len(await server.lines("out")) == 5
            assert await server.batches.cancel(batch) == batch

    asyncio.run(run())


def test_lines_that_are_late_are_errors(tmp_path: Path) -> None:
    async def stuck(body: Any, asked: int) -> LocalAnswer:
        if asked >= 5:
            await asyncio.sleep(100)
        return await echo(body, asked)

    async def run() -> None:
        async with serving(tmp_path / "s", stuck) as server:
            batch = await server.create(LINES[:20])
            while batch.plan.completed < 5:
                await asyncio.sleep(0)
            server.batches.runs["b"].expire()
            shown = (await server.end()).shown()
            assert shown["status"] == "expired"
            assert shown["request_counts"] == {"total": 20, "completed": 5, "failed": 15}
            late = await server.lines("err")
            assert {one["error"]["code"] for one in late} == {"batch_expired"}
            assert {one["response"] for one in late} == {None}
            assert len(await server.lines("out")) == 5
        async with serving(tmp_path / "late", stuck) as server:
            await server.create(LINES, ends_in=-1)
            assert (await server.end()).status == "expired"

    asyncio.run(run())


def test_a_full_store_ends_the_batch_with_what_it_has(tmp_path: Path) -> None:
    async def long(body: Any, asked: int) -> LocalAnswer:
        return LocalAnswer(200, {}, json.dumps({"text": "x" * 60_000}).encode())

    async def run(most: int) -> Any:
        async with serving(tmp_path / f"s{most}", long, most=most) as server:
            await server.create(LINES)
            batch = await server.end()
            assert len(await server.lines("out")) == batch.plan.completed
            return batch.shown()

    for most, words in ((_ALL, "the store is full"), (300_000, "has used its part")):
        shown = asyncio.run(run(most))
        assert (shown["status"], shown["errors"]["data"][0]["code"]) == ("failed", "insufficient_storage")
        assert words in shown["errors"]["data"][0]["message"]
        assert 3 < shown["request_counts"]["completed"] < 20


@pytest.mark.parametrize("parts", [LINES, [line(f"c{number}", prompt="x" * 1000) for number in range(40)]])
def test_few_lines_wait_in_memory_and_each_place_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[bytes]
) -> None:
    monkeypatch.setattr(batch_runs, "_MAX_PENDING", 12)
    monkeypatch.setattr(batch_runs, "_MAX_PENDING_BYTES", 8000)
    asked = set[str]()

    async def refuse(body: Any, number: int) -> LocalAnswer:
        asked.add(json.dumps(body))
        return LocalAnswer(503, {}, b"{}")

    async def run() -> None:
        async with serving(tmp_path / "s", refuse) as server:
            batch = await server.create(parts)
            while server.num_asked < 30:
                await asyncio.sleep(0.001)
            assert 1 < len(asked) <= (12 if len(parts[0]) < 500 else 8)
            await server.batches.cancel(batch)
            assert (await server.end()).status == "cancelled"
            for _ in range(4):
                await asyncio.wait_for(server.batches.lines.take("other"), 1)

    asyncio.run(run())


def test_a_line_that_fails_gives_its_place_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async def fail(*_: Any) -> None:
            raise HttpError(507, "full")

        async with serving(tmp_path / "s", echo, width=1) as server:
            await server.create(LINES)
            monkeypatch.setattr(server.files, "add_part", fail)
            assert (await server.end()).status == "failed"
            await asyncio.wait_for(server.batches.lines.take("other"), 1)

    asyncio.run(run())


def test_one_line_runs_while_callers_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runs, "_LOOK_S", 0.0001)

    server: Server

    async def answer(body: Any, asked: int) -> LocalAnswer:
        while server.has_room and server.most_running == 1 and server.num_asked < 10:
            await asyncio.sleep(0)  # until another line runs, too
        return await echo(body, asked)

    async def run() -> None:
        nonlocal server
        async with serving(tmp_path / "s", answer) as server:
            server.has_room = False
            await server.create(LINES[:10])
            while server.num_asked < 5:
                await asyncio.sleep(0)
            assert server.most_running == 1
            server.has_room = True
            assert (await server.end()).plan.completed == 9
            assert server.most_running > 1

    asyncio.run(run())


def test_an_end_that_cannot_be_stored_is_shown_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_runs, "_STORE_AGAIN_S", 0.001)

    async def run() -> None:
        async with serving(tmp_path / "s", echo) as server:
            finish, is_full = server.batches.store.finish, True

            async def maybe(batch: Batch) -> None:
                if is_full:
                    raise HttpError(507, "the store is full")
                await finish(batch)

            monkeypatch.setattr(server.batches.store, "finish", maybe)
            await server.create([b"{}\n"])
            while not caplog.text.count("is not stored yet: the store is full") > 1:
                await asyncio.sleep(0.001)
            assert server.batches.runs["b"].batch.status == "failed"
            assert (await server.batches.store.get("b", "")).status == "validating"
            is_full = False
            assert (await server.end()).status == "failed"

    asyncio.run(run())


@pytest.mark.parametrize(("parts", "status"), [(LINES, "completed"), ([b"{}\n"], "failed")])
def test_who_sees_the_end_finds_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: Sequence[bytes], status: str
) -> None:
    """Storing the end takes time, in which callers ask, and cancel."""

    async def run() -> None:
        is_stored, may_end = asyncio.Event(), asyncio.Event()
        async with serving(tmp_path / "s", echo) as server:
            finish = server.batches.store.finish

            async def late(batch: Batch) -> None:
                await finish(batch)
                is_stored.set()
                await may_end.wait()

            monkeypatch.setattr(server.batches.store, "finish", late)
            await server.create(parts)
            await asyncio.wait_for(is_stored.wait(), 60)
            run = server.batches.runs["b"]
            assert run.batch.shown()["status"] in UNFINISHED
            assert run.batch.shown()[f"{status}_at"] is None
            await server.batches.cancel(run.batch)  # too late
            may_end.set()
            stored = (await server.end()).shown()
            assert run.batch.shown() == stored
            assert stored["status"] == status
            assert (stored["output_file_id"] is not None) == (status == "completed")

    asyncio.run(run())


@pytest.mark.parametrize("table", ["parts", "batches"])
def test_a_damaged_row_is_an_error_and_no_other_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    async def never(body: Any, asked: int) -> LocalAnswer:
        await asyncio.sleep(100)
        raise AssertionError

    async def begin() -> None:
        async with serving(tmp_path / "s", never) as server:
            await server.create(LINES)
            while not server.num_asked:
                await asyncio.sleep(0.001)

    async def go_on() -> Any:
        async with serving(tmp_path / "s", echo) as server:
            while server.batches.runs:
                await asyncio.sleep(0.001)
            return None if table == "batches" else (await server.end()).shown()

    asyncio.run(begin())
    change(tmp_path / "s", f"UPDATE {table} SET digest = x''")
    shown = asyncio.run(go_on())
    assert "damaged" in caplog.text
    if shown is not None:
        assert (shown["status"], shown["errors"]["data"][0]["code"]) == ("failed", "store_failed")


def test_a_batch_whose_key_is_gone_fails(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path / "s", echo) as server:
            server.batches.keys = KeyRing(("00" * 32,))
            await server.create(LINES)
            assert (await server.end()).plan.problems[0].code == "key_gone"

    asyncio.run(run())


def test_places_are_given_in_turns() -> None:
    async def run() -> list[str]:
        slots, order = Slots(lambda: 1), list[str]()

        async def use(tenant: str) -> None:
            await slots.take(tenant)
            order.append(tenant)
            await asyncio.sleep(0)
            slots.give()

        tasks = [asyncio.create_task(use(tenant)) for tenant in ("a", "a", "a", "b", "b", "c")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(slots.take("d"), 1)
        return order

    assert asyncio.run(run()) == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"priority": PRIORITY, "store": False}),
        ({"priority": None, "store": None, "seed": None}, {"priority": PRIORITY, "store": False}),
        ({"priority": -5, "store": True, "seed": 7}, {"priority": PRIORITY - 5, "store": True, "seed": 7}),
        ({"priority": 2**31 - 1, "seed": 1}, {"priority": 2**31 - 1, "store": False, "seed": 1}),
        ({"priority": "x", "seed": 1}, {"priority": "x", "store": False, "seed": 1}),
    ],
)
def test_a_line_is_less_urgent_and_has_a_seed(given: Any, added: Any) -> None:
    request = BatchRequest("c", "/v1/responses", msgspec.Raw(json.dumps({"input": "x", **given}).encode()))
    made, again, other = (json.loads(own_body(request, name, 3)) for name in ("b", "b", "d"))
    assert made == again
    assert {**made, "seed": 0} == {"input": "x", **added, "seed": 0}
    if "seed" not in added:
        assert made["seed"] != other["seed"]


def test_a_line_has_its_endpoint() -> None:
    assert read_line(LINES[0], (URL,)).custom_id == "c0"
