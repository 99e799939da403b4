"""The file of stored responses: a full one and a damaged one give errors, and the old ones are removed."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.http.errors import HttpError
from frontend.http.stored.conversations import Conversation, ConversationStore
from frontend.http.stored.database import MIN_STORE_BYTES, ROW_BYTES, Database
from frontend.http.stored.files import NEVER, PROCESSED, File, FileInfo, FileStore
from frontend.http.stored.store import Content, Record, ResponseStore
from ipc.errors import ConfigError

_LIMIT, _ALL = 1 << 20, 1 << 40


def record(name: str, previous: str | None = None, *, size: int = 1, age_days: float = 0) -> Record:
    response = msgspec.json.encode({"output": [{"text": name * size}]})
    content = Content(msgspec.json.encode([{"input": name}]), response)
    return Record(name, "t", int(time.time() - age_days * 86_400), "completed", content, previous)


async def put_file(files: FileStore, name: str, *parts: bytes) -> None:
    size = sum(map(len, parts))
    await files.put(File(name, "t", int(time.time()), NEVER, PROCESSED, FileInfo(name, "batch", size)), _ALL)
    for number, part in enumerate(parts):
        await files.add_part(name, "t", number, part, _ALL)


def using(path: Path, use: Callable[[ResponseStore], Coroutine[Any, Any, Any]], *, max_days: float = 0) -> Any:
    database = Database(str(path), MIN_STORE_BYTES, max_days)
    try:
        return asyncio.run(use(ResponseStore(ConversationStore(database))))
    finally:
        database.close()


async def put(store: ResponseStore, *records: Record) -> None:
    for one in records:
        await store.put(lambda one=one: one, _ALL)  # type: ignore[misc]


async def fails(work: Coroutine[Any, Any, Any], status: int, words: str) -> None:
    with pytest.raises(HttpError, match=words) as caught:
        await work
    assert caught.value.status == status


def test_a_history_is_in_order_and_of_its_tenant(tmp_path: Path) -> None:
    async def use(store: ResponseStore) -> None:
        await put(store, record("a"), record("b", "a"), record("c", "b"))
        items, size = await store.history("c", "t", _LIMIT)
        assert items == [one for name in "abc" for one in ({"input": name}, {"text": name})]
        assert size > 0
        assert await store.inputs(await store.get("c", "t"), _LIMIT) == items[:5]
        await fails(store.history("c", "other", _LIMIT), 404, "no response 'c'")
        await fails(store.history("c", "t", 100), 400, "more than 100 bytes")

    using(tmp_path / "s", use)


def test_what_is_deleted_is_kept_for_what_continues_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def use(store: ResponseStore) -> None:
        await put(store, record("a"), record("b", "a"), record("c", "b"))
        for name in ("a", "b"):
            await store.delete(name, "t")
            await fails(store.history(name, "t", _LIMIT), 404, "no response")
            assert len((await store.history("c", "t", _LIMIT))[0]) == 6
        await store.delete("c", "t")

    using(path, use)
    assert change(path, "SELECT count(*) FROM responses") == [(0,)]


def test_old_responses_are_removed_but_not_before_what_continues_them(tmp_path: Path) -> None:
    async def fill(store: ResponseStore) -> None:
        old = [record("a", age_days=9), record("b", "a", age_days=9), record("x", age_days=9)]
        await put(store, *old, record("y", "x"), record("z", age_days=6))

    async def use(store: ResponseStore) -> None:
        for name in ("a", "b"):
            await fails(store.get(name, "t"), 404, "no response")
        assert len((await store.history("y", "t", _LIMIT))[0]) == 4
        assert (await store.get("z", "t")).id == "z"

    using(tmp_path / "s", fill)
    using(tmp_path / "s", use, max_days=7)


def test_a_conversation_is_kept_as_long_as_something_is_added(tmp_path: Path) -> None:
    path, old = tmp_path / "s", int(time.time()) - 9 * 86_400

    def with_conversations(use: Callable[[ConversationStore], Coroutine[Any, Any, Any]], max_days: float) -> None:
        database = Database(str(path), MIN_STORE_BYTES, max_days)
        try:
            asyncio.run(use(ConversationStore(database)))
        finally:
            database.close()

    async def fill(store: ConversationStore) -> None:
        for name in ("silent", "used"):
            await store.put(Conversation(name, "t", old, {}), [], _ALL)
        await store.add("used", "t", [{"id": "i", "type": "message"}], _ALL)

    async def use(store: ConversationStore) -> None:
        assert (await store.get("used", "t")).created == old
        await fails(store.get("silent", "t"), 404, "no conversation")

    with_conversations(fill, 0)
    change(path, "UPDATE conversations SET changed = created WHERE id = 'silent'")
    with_conversations(use, 7)
    change(path, "UPDATE items SET content = CAST(content || ' ' AS BLOB)")
    with_conversations(lambda store: fails(store.history("used", "t", _LIMIT), 500, "damaged"), 0)
    change(path, "UPDATE conversations SET tenant = 'other'")
    with_conversations(lambda store: fails(store.get("used", "other"), 500, "damaged"), 0)


def test_a_full_store_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    async def use(store: ResponseStore) -> None:
        stored: list[str] = []

        async def fill() -> None:
            for number in range(100):
                name = f"n{number}"
                await put(store, record(name, size=20_000))
                stored.append(name)

        await fails(fill(), 507, "is full")
        await fails(store.check_room("t", _ALL), 507, "is full")
        assert len(stored) > 10
        for name in stored:
            assert (await store.get(name, "t")).content == record(name, size=20_000).content
        for name in stored[:8]:
            await store.delete(name, "t")
        await store.check_room("t", _ALL)
        await put(store, record("later"))

    using(tmp_path / "s", use)
    assert (tmp_path / "s").stat().st_size <= MIN_STORE_BYTES


def test_a_tenant_has_its_part_and_no_more(tmp_path: Path) -> None:
    path, most = tmp_path / "s", 20_000

    async def store_one(store: ResponseStore, name: str, tenant: str, size: int) -> None:
        made = msgspec.structs.replace(record(name, size=size), tenant=tenant)
        await store.put(lambda: made, most)

    async def use(store: ResponseStore) -> None:
        await store_one(store, "a", "t", 9000)
        await store.check_room("t", most)
        await store_one(store, "b", "t", 9000)
        await fails(store_one(store, "c", "t", 1000), 507, "its part of the store .20000 bytes.")
        await store_one(store, "d", "other", 9000)
        await store_one(store, "e", "t", 1)
        await fails(store_one(store, "f", "t", 1), 507, "its part")

    async def use_again(store: ResponseStore) -> None:
        await store_one(store, "g", "t", 1)

    async def check(store: ResponseStore) -> None:
        await store.delete("a", "t")
        await store.check_room("t", most)

    using(path, use)
    using(path, lambda store: fails(use_again(store), 507, "its part"))
    using(path, check)
    stored = change(path, f"SELECT tenant, sum(length(content) + {ROW_BYTES}) FROM responses GROUP BY tenant")
    assert change(path, "SELECT * FROM uses ORDER BY tenant") == stored
    assert dict(stored)["t"] > 9000


def change(path: Path, *statements: str) -> list[Any]:
    """Change a file that no store uses; return the rows of the last statement."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        return [database.execute(one).fetchall() for one in statements][-1]


@pytest.mark.parametrize(
    "changed",
    [
        "content = CAST(content || x'00' AS BLOB)",
        "status = 'incomplete'",
        "previous = NULL",
        "created = 1",
        "digest = x''",
    ],
)
def test_a_changed_row_is_an_error_and_no_history(tmp_path: Path, changed: str) -> None:
    path = tmp_path / "s"
    using(path, lambda store: put(store, record("a"), record("b", "a"), record("c", "b")))
    change(path, f"UPDATE responses SET {changed} WHERE id = 'b'")

    async def use(store: ResponseStore) -> None:
        await fails(store.get("b", "t"), 500, "damaged")
        await fails(store.history("c", "t", _LIMIT), 500, "damaged")
        assert (await store.get("a", "t")).id == "a"

    using(path, use)


def test_a_damaged_response_does_not_hide_the_other_unfinished_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = [msgspec.structs.replace(record(name), status="in_progress") for name in "ab"]
    using(tmp_path / "s", lambda store: put(store, *begun))
    change(tmp_path / "s", "UPDATE responses SET digest = x'' WHERE id = 'a'")

    async def use(store: ResponseStore) -> None:
        assert [one.id for one in await store.unfinished()] == ["b"]

    using(tmp_path / "s", use)
    assert "'a' in the store is damaged" in caplog.text


def test_a_missing_earlier_response_is_no_shorter_history(tmp_path: Path) -> None:
    path = tmp_path / "s"
    using(path, lambda store: put(store, record("a"), record("b", "a")))
    change(path, "DELETE FROM responses WHERE id = 'a'")
    using(path, lambda store: fails(store.history("b", "t", _LIMIT), 500, "damaged"))


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database" * 1000)
    change(tmp_path / "other", "CREATE TABLE t (x)")
    for path, words in (("text", "not a database"), ("other", "not a store"), ("none/s", "No such file")):
        with pytest.raises(ConfigError, match=words):
            Database(str(tmp_path / path), MIN_STORE_BYTES, 0)
    first = Database(str(tmp_path / "s"), MIN_STORE_BYTES, 0)
    with pytest.raises(ConfigError, match="another server uses it"):
        Database(str(tmp_path / "s"), MIN_STORE_BYTES, 0)
    first.close()
    Database(str(tmp_path / "s"), MIN_STORE_BYTES, 0).close()
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_cut_file_gives_errors(tmp_path: Path) -> None:
    path = tmp_path / "s"
    using(path, lambda store: put(store, *(record(f"n{number}", size=5000) for number in range(20))))
    data = path.read_bytes()
    path.write_bytes(data[:8192] + bytes(len(data) // 2) + data[8192 + len(data) // 2 :])

    async def use(store: ResponseStore) -> None:
        for number in range(20):
            name = f"n{number}"
            try:
                found = await store.get(name, "t")
            except HttpError as error:
                assert error.status in (404, 500)  # noqa: PT017 - or it is what was stored
            else:
                assert found.content == record(name, size=5000).content

    try:
        using(path, use)
    except ConfigError as error:
        assert "cannot be used" in str(error)  # noqa: PT017 - so no server begins with it


def test_conversations_and_files_of_a_full_store_keep_what_they_have(tmp_path: Path) -> None:
    async def use(database: Database) -> None:
        talks, files, item = ConversationStore(database), FileStore(database), {"type": "message", "text": "x" * 20_000}
        await talks.put(Conversation("c", "t", int(time.time()), {}), [{"id": "i", **item}], _ALL)
        await put_file(files, "f", b"y" * 20_000)
        added = list[str]()

        async def fill() -> None:
            for number in range(100):
                await put_file(files, f"f{number}", b"z" * 20_000)
                added.append(f"f{number}")

        await fails(fill(), 507, "is full")
        items = [{"id": f"i{number}", **item} for number in range(20)]
        await fails(talks.add("c", "t", items, _ALL), 507, "is full")
        assert (await talks.history("c", "t", _LIMIT))[0] == [{"id": "i", **item}]  # all items or none
        assert len(added) > 10
        for name in ["f", *added]:
            assert [len(part) for _, part in await files.parts(name, -1)] == [20_000]
        assert await files.parts(f"f{len(added)}", -1) == []

    with contextlib.closing(Database(str(tmp_path / "s"), MIN_STORE_BYTES, 0)) as database:
        asyncio.run(use(database))


def test_a_damaged_file_gives_errors_and_no_other_conversation_or_file(tmp_path: Path) -> None:
    path, item = tmp_path / "s", {"type": "message", "text": "x" * 3000}
    stored = {f"c{number}": [{"id": f"i{number}-{place}", **item} for place in range(4)] for number in range(12)}

    async def fill(database: Database) -> None:
        talks, files = ConversationStore(database), FileStore(database)
        for name, items in stored.items():
            await talks.put(Conversation(name, "t", int(time.time()), {}), items, _ALL)
            await put_file(files, name, name.encode() * 1500, name.encode() * 700)

    async def use(database: Database) -> int:
        talks, files, num_errors = ConversationStore(database), FileStore(database), 0
        for name, items in stored.items():
            try:
                assert (await talks.history(name, "t", _LIMIT))[0] == items
            except HttpError as error:
                num_errors += error.status in (404, 500)
            try:
                await files.get(name, "t")
                parts = [part for _, part in await files.parts(name, -1)]
                assert parts == [name.encode() * 1500, name.encode() * 700]
            except HttpError as error:
                num_errors += error.status in (404, 500)
        return num_errors

    with contextlib.closing(Database(str(path), MIN_STORE_BYTES, 0)) as database:
        asyncio.run(fill(database))
    data, num_errors, num_refused = path.read_bytes(), 0, 0
    for page in range(2, len(data) // 4096, 5):
        path.write_bytes(data[: 4096 * page] + bytes(4096) + data[4096 * (page + 1) :])
        try:
            with contextlib.closing(Database(str(path), MIN_STORE_BYTES, 0)) as database:
                num_errors += asyncio.run(use(database))
        except ConfigError as error:
            assert "cannot be used" in str(error)  # noqa: PT017 - so no server begins with it
            num_refused += 1
    assert num_errors > 9
