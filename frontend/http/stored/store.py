"""ResponseStore: the responses that a server keeps, in one SQLite file.

One process uses the file: it is locked as long as that process runs. All work is done by one thread, in order. A row
has a digest of its content, so that a damaged file gives an error and never another history. A commit reaches the
operating system before the answer's end is sent, so nothing is lost if the process is killed. The file is not
encrypted.
"""

import asyncio
import hashlib
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from frontend.http.errors import HttpError
from ipc.errors import ConfigError

_T = TypeVar("_T")
_PAGE_BYTES = 4096
MIN_STORE_BYTES = 1 << 20
_APPLICATION_ID, _VERSION = 0x65637372, 1  # "ecsr", in the file's header
_SCHEMA = f"""
CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, created INTEGER NOT NULL,
    status TEXT NOT NULL, is_deleted INTEGER NOT NULL DEFAULT 0, content BLOB NOT NULL, digest BLOB NOT NULL);
CREATE INDEX by_previous ON responses (previous) WHERE previous IS NOT NULL;
CREATE INDEX by_created ON responses (created);
CREATE INDEX unfinished ON responses (created) WHERE status = 'in_progress';
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_VERSION};
"""
#: Most responses before one, and how many are removed in one step.
_MAX_EARLIER, _EACH_PURGE = 4096, 500
_PURGE_EVERY_S, _PURGES = 600.0, 64
_SPARE_PAGES = 16  # for the ends of responses that have begun
RUNNING = "in_progress"
#: Statuses of responses that others may continue.
CONTINUABLE = ("completed", "incomplete")
_log = logging.getLogger("engine_core.http")
_DAMAGED = "the store of responses is damaged: its owner must repair it or begin a new one"


class Work(msgspec.Struct):
    """What a background response is computed from. body: the request's. model: the name in the answer.

    seed: of its draws. prompt: its token ids. fingerprint: of the model and its arithmetic. is_streamed: whether its
    events were promised to the caller.
    """

    body: bytes
    model: str
    seed: int
    prompt: list[int]
    fingerprint: str
    is_streamed: bool


class Content(msgspec.Struct):
    """The content of a row. input: the request's own items, as JSON. response: the answer as JSON.

    work: of a background response. events: those of its stream, compressed.
    """

    input: bytes
    response: bytes
    work: Work | None = None
    events: bytes | None = None


class Record(msgspec.Struct):
    """One stored response. tenant: the name of the caller's key. previous: the id of the one that it continues."""

    id: str
    tenant: str
    created: int
    status: str
    content: Content
    previous: str | None = None

    @property
    def events(self) -> list[bytes]:
        """Return the events of the stream of a background response."""
        joined = b"" if self.content.events is None else zlib.decompress(self.content.events)
        return [b"%b\n\n" % one for one in joined.split(b"\n\n")[:-1]]


class _Output(msgspec.Struct):
    output: list[Any]


class ResponseStore:
    """See the module's docstring. max_bytes: of the file. max_days: how long a response is kept; 0 = without end.

    Errors: ConfigError if the file cannot be used.
    """

    def __init__(self, path: str, max_bytes: int, max_days: float) -> None:
        self._path, self._max_days = path, max_days
        self._max_pages = max(max_bytes, MIN_STORE_BYTES) // _PAGE_BYTES
        self._is_full = False
        self._purged_at = float("-inf")  # monotonic seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="http-store")
        try:
            self._database = self._thread.submit(self._open).result()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            reason = "another server uses it" if _code_of(error) == sqlite3.SQLITE_BUSY else str(error)
            raise ConfigError(f"the store {path} cannot be used: {reason}") from None
        except BaseException:
            self._thread.shutdown()
            raise

    def close(self) -> None:
        """Finish the work that was begun, and close the file."""
        self._thread.submit(self._database.close)
        self._thread.shutdown()

    async def check_room(self) -> None:
        """Check that the store is not full, as far as is known without asking it. Errors: HttpError 500, 507."""
        if self._is_full:
            await self._run(self._note_room)
        if self._is_full:
            raise self._full()

    async def get(self, response_id: str, tenant: str) -> Record:
        """Return a response. Errors: HttpError 404, 500."""
        return await self._run(lambda: self._get(response_id, tenant))

    async def put(self, make: Callable[[], Record]) -> None:
        """Store a new response. make: called on the store's thread. Errors: HttpError 500, 507."""
        await self._run(lambda: self._put(make()))

    async def finish(self, response_id: str, status: str, response: Callable[[], bytes], events: list[bytes]) -> bool:
        """Store the end of a background response; return whether it was unfinished. Errors: HttpError 500, 507."""
        return await self._run(lambda: self._finish(response_id, status, response(), events))

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response. What later responses continue is kept for them alone. Errors: HttpError 404, 500."""
        await self._run(lambda: self._delete(response_id, tenant))

    async def history(self, response_id: str, tenant: str, max_bytes: int) -> tuple[list[Any], int]:
        """Return the items of a response and of those before it, oldest first, and their size in bytes.

        Errors: HttpError 400, 404, 500.
        """
        return await self._run(lambda: self._history(response_id, tenant, max_bytes))

    async def inputs(self, record: Record, max_bytes: int) -> list[Any]:
        """Return all items that a response was made from, oldest first. Errors: HttpError 400, 500."""

        def read() -> list[Any]:
            before = record.previous
            earlier = [] if before is None else self._history(before, record.tenant, max_bytes, sees_deleted=True)[0]
            return [*earlier, *msgspec.json.decode(record.content.input)]

        return await self._run(read)

    async def unfinished(self) -> list[Record]:
        """Return the background responses that have not ended, oldest first. Damaged ones are logged and left out.

        Errors: HttpError 500.
        """

        def read() -> list[Record]:
            which = "status = 'in_progress' AND NOT is_deleted"
            found = []
            for row in self._database.execute(f"SELECT * FROM responses WHERE {which} ORDER BY created, rowid"):
                try:
                    found.append(_record(row))
                except HttpError:
                    _log.error("the response %.80r in the store is damaged", row[0])
            return found

        return await self._run(read)

    # --- on the store's thread ----------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # no other user may read it
        database = sqlite3.connect(self._path, isolation_level=None, timeout=2.0)
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA cell_size_check = ON")
            database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            (kind,), (version,) = (
                database.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
            )
            is_new = not (kind or version or database.execute("SELECT 1 FROM sqlite_master").fetchone())
            if not is_new and (kind, version) != (_APPLICATION_ID, _VERSION):
                raise ConfigError(f"the store {self._path} cannot be used: it is not a store of this version")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA journal_size_limit = 4194304")
            database.execute(f"PRAGMA max_page_count = {self._max_pages}")
            database.execute("BEGIN IMMEDIATE")  # takes the lock
            database.execute("COMMIT")
            if is_new:
                database.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
        except BaseException:
            database.close()
            raise
        return database

    async def _run(self, work: Callable[[], _T]) -> _T:
        def run() -> _T:
            try:
                self._purge()
                return work()
            except sqlite3.Error as error:
                raise self._http_error(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _http_error(self, error: sqlite3.Error) -> HttpError:
        code = _code_of(error)
        if code == sqlite3.SQLITE_FULL:
            return self._full()
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return HttpError(500, _DAMAGED, headers=[(b"x-should-retry", b"false")])
        return HttpError(500, f"the store of responses failed: {error}")

    def _full(self) -> HttpError:
        size = self._max_pages * _PAGE_BYTES
        text = f"the store of responses is full ({size} bytes, or the disk): delete some, or send store: false"
        return HttpError(507, text, headers=[(b"x-should-retry", b"false")])

    def _note_room(self) -> None:
        """Note whether little room is left, after something was written."""
        pages, free = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count")
        )
        self._is_full = pages - free > self._max_pages - _SPARE_PAGES

    def _purge(self) -> None:
        """Remove some responses that are too old, and that no other continues."""
        now = time.monotonic()
        if not self._max_days or now - self._purged_at < _PURGE_EVERY_S:
            return
        self._purged_at = now
        before = time.time() - self._max_days * 86_400
        for _ in range(_PURGES):  # each removes the last responses of conversations
            if not self._remove_leaves("created < ? AND status <> 'in_progress'", before):
                return

    def _remove_leaves(self, which: str, value: object) -> int:
        """Remove responses that no other continues; return how many, at most _EACH_PURGE."""
        leaves = f"SELECT rowid FROM responses AS one WHERE {which} AND NOT EXISTS"
        children = "(SELECT 1 FROM responses WHERE previous = one.id)"
        removed = self._database.execute(
            f"DELETE FROM responses WHERE rowid IN ({leaves} {children} ORDER BY rowid DESC LIMIT {_EACH_PURGE})",
            (value,),
        )
        return removed.rowcount

    def _get(self, response_id: str, tenant: str, *, sees_deleted: bool = False) -> Record:
        row = self._database.execute("SELECT * FROM responses WHERE id = ?", (response_id,)).fetchone()
        if row is None or row[1] != tenant or (row[5] and not sees_deleted):
            raise HttpError(404, f"there is no response {response_id!r:.80}")
        return _record(row)

    def _put(self, record: Record) -> None:
        content = msgspec.msgpack.encode(record.content)
        row = (record.id, record.tenant, record.previous, record.created, record.status)
        self._database.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, 0, ?, ?)", (*row, content, _digest(row, content))
        )
        self._note_room()

    def _finish(self, response_id: str, status: str, response: bytes, events: list[bytes]) -> bool:
        found = self._database.execute("SELECT * FROM responses WHERE id = ?", (response_id,)).fetchone()
        if found is None or found[4] != RUNNING:
            return False
        content = _record(found).content
        content.response = response
        content.events = zlib.compress(b"".join(events)) if events else None
        data, row = msgspec.msgpack.encode(content), (*found[:4], status)
        self._database.execute(
            "UPDATE responses SET status = ?, content = ?, digest = ? WHERE id = ?",
            (status, data, _digest(row, data), response_id),
        )
        self._note_room()
        return True

    def _delete(self, response_id: str, tenant: str) -> None:
        record: Record | None = self._get(response_id, tenant)
        self._database.execute("UPDATE responses SET is_deleted = 1 WHERE id = ?", (response_id,))
        at: str | None = response_id
        while at is not None and self._remove_leaves("id = ? AND is_deleted", at):
            at, record = (None if record is None else record.previous), None
            if at is not None:
                row = self._database.execute("SELECT * FROM responses WHERE id = ?", (at,)).fetchone()
                record = None if row is None else _record(row)

    def _history(
        self, response_id: str, tenant: str, max_bytes: int, *, sees_deleted: bool = False
    ) -> tuple[list[Any], int]:
        found: list[Record] = []
        at: str | None = response_id
        size = 0
        while at is not None:
            try:
                record = self._get(at, tenant, sees_deleted=sees_deleted or bool(found))
            except HttpError as error:
                if error.status == 404 and found:  # it was kept for this one
                    raise HttpError(500, _DAMAGED) from None
                raise
            if record.status not in CONTINUABLE:
                text = f"the response {at!r:.80} is {record.status}: only one that has its answer can be continued"
                raise HttpError(400, text, param="previous_response_id")
            found.append(record)
            size += len(record.content.input) + len(record.content.response)
            if size > max_bytes or len(found) > _MAX_EARLIER:
                text = f"the conversation has more than {max_bytes} bytes, or {_MAX_EARLIER} responses"
                raise HttpError(400, text, param="previous_response_id", code="context_length_exceeded")
            at = record.previous
        items: list[Any] = []
        for record in reversed(found):
            items += msgspec.json.decode(record.content.input)
            items += msgspec.json.decode(record.content.response, type=_Output).output
        return items, size


def _record(row: tuple[Any, ...]) -> Record:
    """Return a row of the table. Errors: HttpError 500 if it is damaged."""
    response_id, tenant, previous, created, status, _, content, digest = row
    if _digest(row[:5], content) != digest:
        raise HttpError(500, _DAMAGED)
    return Record(
        response_id, tenant, created, status, msgspec.msgpack.decode(content, type=Content), previous=previous
    )


def _digest(row: tuple[Any, ...], content: bytes) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode((*row, content)), digest_size=16).digest()


def _code_of(error: Exception) -> int:
    """Return SQLite's code of an error, without its details; 0 = it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
