"""Database: the SQLite file of a server, with all that it keeps for its callers.

One process uses the file: it is locked as long as that process runs. All work is done by one thread, in order. A row
has a digest of its content, so that a damaged file gives an error and never another content. A commit reaches the
operating system before its caller goes on, so nothing is lost if the process is killed. The file is not encrypted.

Triggers count the bytes of each tenant, in the transaction that changes them, so the count is always right.
"""

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from frontend.http.errors import HttpError
from ipc.errors import ConfigError

_T = TypeVar("_T")
_PAGE_BYTES = 4096
MIN_STORE_BYTES = 1 << 20
#: Bytes that a row counts in addition to its content: its other columns, and its places in the indexes.
ROW_BYTES = 512
_APPLICATION_ID, _VERSION = 0x65637372, 2  # "ecsr", in the file's header
_PURGE_EVERY_S = 600.0
_SPARE_PAGES = 16  # for the ends of what has begun
DAMAGED = "the store is damaged: its owner must repair it or begin a new one"
_TABLES = """
CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, created INTEGER NOT NULL,
    status TEXT NOT NULL, is_deleted INTEGER NOT NULL DEFAULT 0, content BLOB NOT NULL, digest BLOB NOT NULL);
CREATE INDEX by_previous ON responses (previous) WHERE previous IS NOT NULL;
CREATE INDEX by_created ON responses (created);
CREATE INDEX unfinished ON responses (created) WHERE status = 'in_progress';
CREATE TABLE files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL,
    status TEXT NOT NULL, content BLOB NOT NULL, digest BLOB NOT NULL);
CREATE INDEX files_of_tenant ON files (tenant, created);
CREATE TABLE parts (file TEXT NOT NULL, number INTEGER NOT NULL, tenant TEXT NOT NULL, content BLOB NOT NULL,
    digest BLOB NOT NULL, UNIQUE (file, number));
CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, input TEXT NOT NULL,
    status TEXT NOT NULL, content BLOB NOT NULL, digest BLOB NOT NULL);
CREATE INDEX batches_of_tenant ON batches (tenant, created);
CREATE INDEX running ON batches (input) WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE conversations (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL,
    changed INTEGER NOT NULL, content BLOB NOT NULL, digest BLOB NOT NULL);
CREATE INDEX conversations_by_age ON conversations (changed);
CREATE TABLE items (conversation TEXT NOT NULL, number INTEGER NOT NULL, id TEXT NOT NULL, tenant TEXT NOT NULL,
    content BLOB NOT NULL, digest BLOB NOT NULL, UNIQUE (conversation, number), UNIQUE (conversation, id));
CREATE TABLE uses (tenant TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
"""
_COUNTED = (
    "responses",
    "files",
    "parts",
    "batches",
    "conversations",
    "items",
)  # tables whose rows have a tenant and a content


def _schema() -> str:
    parts = [_TABLES]
    for table in _COUNTED:
        size = f"length({{}}.content) + {ROW_BYTES}"
        change = "UPDATE uses SET num_bytes = num_bytes + {} WHERE tenant = {}.tenant;"
        parts.append(
            f"CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN"
            f" INSERT INTO uses VALUES (new.tenant, {size.format('new')})"
            " ON CONFLICT (tenant) DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes; END;\n"
            f"CREATE TRIGGER {table}_changed AFTER UPDATE OF content ON {table} BEGIN "
            + change.format("length(new.content) - length(old.content)", "new")
            + f" END;\nCREATE TRIGGER {table}_removed AFTER DELETE ON {table} BEGIN "
            + change.format(f"-({size.format('old')})", "old")
            + " END;\n"
        )
    return "".join(parts) + f"PRAGMA application_id = {_APPLICATION_ID};\nPRAGMA user_version = {_VERSION};\n"


class Database:
    """See the module's docstring. max_bytes: of the file. max_days: how long its rows are kept; 0 = without end.

    Errors: ConfigError if the file cannot be used.
    """

    def __init__(self, path: str, max_bytes: int, max_days: float) -> None:
        self._path, self.max_days = path, max_days
        self._max_pages = max(max_bytes, MIN_STORE_BYTES) // _PAGE_BYTES
        self._is_full = False
        self._uses: dict[str, int] = {}  # bytes by tenant, as far as they are known without asking the file
        self._purged_at = float("-inf")  # monotonic seconds
        #: Called on the thread with the Unix seconds before which rows are too old.
        self.purges: list[Callable[[float], None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="http-store")
        try:
            self.sql = self._thread.submit(self._open).result()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            reason = "another server uses it" if _code_of(error) == sqlite3.SQLITE_BUSY else str(error)
            raise ConfigError(f"the store {path} cannot be used: {reason}") from None
        except BaseException:
            self._thread.shutdown()
            raise

    def close(self) -> None:
        """Finish the work that was begun, and close the file."""
        self._thread.submit(self.sql.close)
        self._thread.shutdown()

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, which may use `sql`, run on the thread. Errors: HttpError 500, 507; its own."""

        def run() -> _T:
            try:
                self._purge()
                return work()
            except sqlite3.Error as error:
                raise self._http_error(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def check_room(self, tenant: str, most: int) -> None:
        """Check that a tenant may store more, as far as is known without asking the file. most: its bytes.

        Errors: HttpError 500, 507.
        """
        if self._is_full or self._uses.get(tenant, 0) >= most:
            await self.run(lambda: self.note(tenant))
        if self._is_full:
            raise self._full()
        if self._uses.get(tenant, 0) >= most:
            raise too_much(most)

    # --- on the thread ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make several changes as one."""
        self.sql.execute("BEGIN")
        try:
            yield
            self.sql.execute("COMMIT")
        except BaseException:
            if self.sql.in_transaction:  # an error of SQLite may have ended it
                self.sql.execute("ROLLBACK")
            raise

    def check_use(self, tenant: str, num_bytes: int, most: int) -> None:
        """Check that a tenant may store a row with this content. Errors: HttpError 507."""
        if self._is_full:
            self.note(tenant)
            if self._is_full:  # the rest is for the ends of what has begun
                raise self._full()
        if self._used(tenant) + num_bytes + ROW_BYTES > most:
            raise too_much(most)

    def note(self, tenant: str) -> None:
        """Note how much room is left, after something of a tenant was written."""
        pages, free = (self.sql.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count"))
        self._is_full = pages - free > self._max_pages - _SPARE_PAGES
        self._uses[tenant] = self._used(tenant)

    def _used(self, tenant: str) -> int:
        found = self.sql.execute("SELECT num_bytes FROM uses WHERE tenant = ?", (tenant,)).fetchone()
        return 0 if found is None else int(found[0])

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # no other user may read it
        sql = sqlite3.connect(self._path, isolation_level=None, timeout=2.0)
        try:
            sql.execute("PRAGMA locking_mode = EXCLUSIVE")
            sql.execute("PRAGMA cell_size_check = ON")
            sql.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            (kind,), (version,) = (
                sql.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
            )
            is_new = not (kind or version or sql.execute("SELECT 1 FROM sqlite_master").fetchone())
            if not is_new and (kind, version) != (_APPLICATION_ID, _VERSION):
                raise ConfigError(f"the store {self._path} cannot be used: it is not a store of this version")
            sql.execute("PRAGMA journal_mode = WAL")
            sql.execute("PRAGMA synchronous = NORMAL")
            sql.execute("PRAGMA journal_size_limit = 4194304")
            sql.execute(f"PRAGMA max_page_count = {self._max_pages}")
            sql.execute("BEGIN IMMEDIATE")  # takes the lock
            sql.execute("COMMIT")
            if is_new:
                sql.executescript(f"BEGIN;{_schema()}COMMIT;")
        except BaseException:
            sql.close()
            raise
        return sql

    def _purge(self) -> None:
        """Remove some rows that are too old."""
        now = time.monotonic()
        if not self.max_days or now - self._purged_at < _PURGE_EVERY_S:
            return
        self._purged_at = now
        for purge in self.purges:
            purge(time.time() - self.max_days * 86_400)

    def _http_error(self, error: sqlite3.Error) -> HttpError:
        code = _code_of(error)
        if code == sqlite3.SQLITE_FULL:
            return self._full()
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return damaged()
        return HttpError(500, f"the store failed: {error}")

    def _full(self) -> HttpError:
        size = self._max_pages * _PAGE_BYTES
        text = f"the store is full ({size} bytes, or the disk): delete some of it, or send store: false"
        return HttpError(507, text, headers=[(b"x-should-retry", b"false")])


def too_much(most: int) -> HttpError:
    """Return the error of a key that has used its part of the store. most: bytes."""
    text = f"this key has used its part of the store ({most} bytes): delete some of it, or send store: false"
    return HttpError(507, text, headers=[(b"x-should-retry", b"false")])


def damaged() -> HttpError:
    """Return the error of a damaged row or file."""
    return HttpError(500, DAMAGED, headers=[(b"x-should-retry", b"false")])


def digest_of(row: tuple[Any, ...], content: bytes) -> bytes:
    """Return the digest of a row: of its columns that never change without it, and its content."""
    return hashlib.blake2b(msgspec.msgpack.encode((*row, content)), digest_size=16).digest()


def _code_of(error: Exception) -> int:
    """Return SQLite's code of an error, without its details; 0 = it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
