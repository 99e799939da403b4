"""Files of callers: what a killed server has left, what is too old, and what was damaged."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from frontend.http.callers.keys import KeyRing
from frontend.http.stored.batch_runs import Batches
from frontend.http.stored.batch_store import VALIDATING, Batch, Plan
from frontend.http.stored.database import MIN_STORE_BYTES, ROW_BYTES, Database
from frontend.http.stored.files import NEVER, PROCESSED, UPLOADING, File, FileInfo, FileStore
from frontend.http.turns import Turns
from tests.frontend.http.stored.test_store import change, fails

_ALL = 1 << 40


def using(path: Path, use: Callable[[FileStore], Coroutine[Any, Any, None]], *, max_days: float = 0) -> None:
    database = Database(str(path), MIN_STORE_BYTES, max_days)
    try:
        asyncio.run(use(FileStore(database)))
    finally:
        database.close()


async def put(
    files: FileStore, name: str, *parts: bytes, status: str = PROCESSED, age_days: float = 0, expires: int = NEVER
) -> None:
    created = int(time.time() - age_days * 86_400)
    await files.put(File(name, "t", created, expires, status, FileInfo(name, "batch", sum(map(len, parts)))), _ALL)
    for number, part in enumerate(parts):
        await files.add_part(name, "t", number, part, _ALL)


def test_what_a_killed_server_has_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def fill(files: FileStore) -> None:
        await put(files, "whole", b"abc", b"def")
        await put(files, "begun", *[b"x" * 1000] * 40, status=UPLOADING)
        await put(files, "gone", b"y", status="deleted")

    async def begin(files: FileStore) -> None:
        for name in ("begun", "gone"):
            await fails(files.get(name, "t"), 404, "no file")
        batches = Batches(files, Turns(1), KeyRing(), lambda key: _ALL)

        async def never(*_: Any, **__: Any) -> Any:
            raise AssertionError

        await batches.start(never, lambda: 1, never)
        await batches.close()

    using(path, fill)
    using(path, begin)
    assert change(path, "SELECT DISTINCT file FROM parts") == change(path, "SELECT id FROM files") == [("whole",)]
    both = "SELECT content FROM files UNION ALL SELECT content FROM parts"
    sizes = change(path, f"SELECT sum(length(content) + {ROW_BYTES}) FROM ({both})")
    assert change(path, "SELECT num_bytes FROM uses") == sizes


def test_old_files_are_removed_but_none_that_a_batch_reads(tmp_path: Path) -> None:
    async def use(files: FileStore) -> None:
        now = int(time.time())
        await put(files, "old", b"a", age_days=8)
        await put(files, "read", b"b", age_days=8)
        await put(files, "expired", b"c", expires=now - 5)
        await put(files, "new", b"d", age_days=6)
        batches = Batches(files, Turns(1), KeyRing(), lambda key: _ALL)
        plan = Plan("/v1/completions", "o", "e", "24h", now + 100)
        await batches.store.put(Batch("b", "t", now, "read", VALIDATING, plan), [], _ALL)
        await fails(files.get("expired", "t"), 404, "no file")  # at once
        await files.remove_old()
        for name in ("old", "expired"):
            await fails(files.get(name, "t"), 404, "no file")
            assert await files.parts(name, -1) == []
        assert {file.id for file in await files.all_of("t", purpose=None, newest_first=True)} == {"read", "new"}
        await fails(files.delete("read", "t"), 400, "'b' reads this file")
        batch = await batches.store.get("b", "t")
        batch.status = "failed"
        await batches.store.change(batch)
        await files.remove_old()
        await fails(files.get("read", "t"), 404, "no file")
        await batches.store.remove_old(now + 1)
        await fails(batches.store.get("b", "t"), 404, "no batch")

    using(tmp_path / "s", use, max_days=7)


@pytest.mark.parametrize(
    "changed",
    ["parts SET content = x'00'", "parts SET number = 7 WHERE number = 1", "files SET expires = expires + 1"],
)
def test_a_changed_row_is_an_error(tmp_path: Path, changed: str) -> None:
    path = tmp_path / "s"
    using(path, lambda files: put(files, "a", b"abc", b"def"))
    change(path, f"UPDATE {changed}")

    async def use(files: FileStore) -> None:
        read = files.get("a", "t") if changed.startswith("files") else files.parts("a", -1)
        await fails(read, 500, "damaged")

    using(path, use)
