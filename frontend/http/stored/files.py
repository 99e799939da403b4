"""FileStore: the files of callers in the server's database, as numbered parts.

An uploaded file has parts of up to PART_BYTES. A file of answers has one part for each line, numbered as the line of
the input that it answers, so no line can be there twice.
"""

import time
from collections.abc import Sequence

import msgspec

from frontend.http.errors import HttpError
from frontend.http.stored.database import Database, damaged, digest_of

PART_BYTES = 256 << 10
_EACH_READ, _EACH_REMOVED = 64, 16  # parts
UPLOADING, HIDDEN, PROCESSED, DELETED = "uploading", "hidden", "processed", "deleted"
NEVER = 1 << 40  # Unix seconds
_RUNNING = "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"  # of batches


class FileInfo(msgspec.Struct):
    """The content of a row. purpose: "batch", "batch_output" or another one of OpenAI's. num_bytes: of all parts."""

    name: str
    purpose: str
    num_bytes: int = 0


class File(msgspec.Struct):
    """One file. tenant: the name of its caller's key. created, expires: Unix seconds.

    status: UPLOADING; HIDDEN until the batch that writes it has ended; PROCESSED; DELETED until its parts are removed.
    """

    id: str
    tenant: str
    created: int
    expires: int
    status: str
    info: FileInfo

    def shown(self) -> dict[str, object]:
        """Return the file as callers see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.info.num_bytes,
            "created_at": self.created,
            "expires_at": None if self.expires == NEVER else self.expires,
            "filename": self.info.name,
            "purpose": self.info.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """See the module's docstring."""

    def __init__(self, database: Database) -> None:
        self.database, self._sql, self._run = database, database.sql, database.run

    async def put(self, file: File, most: int) -> None:
        """Store a new file, without parts. most: bytes that its tenant may use. Errors: HttpError 500, 507."""
        await self._run(lambda: self.insert(file, most))

    async def add_part(self, file_id: str, tenant: str, number: int, content: bytes, most: int) -> None:
        """Store a part of a tenant's file. most: bytes that the tenant may use. Errors: HttpError 500, 507."""

        def add() -> None:
            self.database.check_use(tenant, len(content), most)
            row = (file_id, number, tenant)
            self._sql.execute("INSERT INTO parts VALUES (?, ?, ?, ?, ?)", (*row, content, digest_of(row, content)))
            self.database.note(tenant)

        await self._run(add)

    async def change(self, file: File) -> None:
        """Store another state of a file. Errors: HttpError 500, 507."""
        await self._run(lambda: self.update(file))

    async def get(self, file_id: str, tenant: str) -> File:
        """Return a file that callers see. Errors: HttpError 404, 500."""
        return await self._run(lambda: self._get(file_id, tenant))

    async def all_of(self, tenant: str, *, purpose: str | None, newest_first: bool) -> list[File]:
        """Return the files of a tenant that callers see. Errors: HttpError 500."""

        def read() -> list[File]:
            order = "DESC" if newest_first else "ASC"
            which = "tenant = ? AND status = 'processed' AND expires > ?"
            rows = self._sql.execute(
                f"SELECT * FROM files WHERE {which} ORDER BY created {order}, rowid {order}", (tenant, int(time.time()))
            )
            files = [_file(row) for row in rows]
            return [file for file in files if purpose is None or file.info.purpose == purpose]

        return await self._run(read)

    async def parts(self, file_id: str, after: int) -> list[tuple[int, bytes]]:
        """Return some of a file's parts after number `after`, in order, some PART_BYTES in all; none at its end.

        Errors: HttpError 500.
        """

        def read() -> list[tuple[int, bytes]]:
            found, size = list[tuple[int, bytes]](), 0
            which = "file = ? AND number > ? ORDER BY number LIMIT ?"
            for row in self._sql.execute(f"SELECT * FROM parts WHERE {which}", (file_id, after, _EACH_READ)):
                if digest_of(row[:3], row[3]) != row[4]:
                    raise damaged()
                found.append((row[1], row[3]))
                size += len(row[3])
                if size >= PART_BYTES:
                    break
            return found

        return await self._run(read)

    async def numbers(self, file_ids: Sequence[str]) -> set[int]:
        """Return the numbers of the parts of these files. Errors: HttpError 500."""

        def read() -> set[int]:
            marks = ", ".join("?" * len(file_ids))
            rows = self._sql.execute(f"SELECT number FROM parts WHERE file IN ({marks})", list(file_ids))
            return {number for (number,) in rows}

        return await self._run(read)

    async def delete(self, file_id: str, tenant: str) -> None:
        """Delete a file that callers see. Errors: HttpError 400, 404, 500."""

        def mark() -> None:
            self._get(file_id, tenant)
            row = self._sql.execute(f"SELECT id FROM batches WHERE input = ? AND {_RUNNING}", (file_id,)).fetchone()
            if row is not None:
                raise HttpError(400, f"the batch {row[0]!r} reads this file: cancel it first, or wait for its end")
            self._mark(file_id)

        await self._run(mark)
        await self.remove(file_id)

    async def remove(self, file_id: str) -> None:
        """Remove a file that callers do not see, some parts at a time. Errors: HttpError 500."""
        while await self._run(lambda: self._remove_some(file_id)):
            continue

    async def remove_left(self) -> None:
        """Remove what a killed server has left of uploads and deletions. Errors: HttpError 500."""

        def read() -> list[str]:
            rows = self._sql.execute("SELECT id FROM files WHERE status IN ('uploading', 'deleted')")
            return [file_id for (file_id,) in rows]

        for file_id in await self._run(read):
            await self.remove(file_id)

    async def remove_old(self) -> None:
        """Delete files that have expired or are too old, except those that a batch reads. Errors: HttpError 500."""

        def read() -> list[str]:
            now, days = time.time(), self.database.max_days
            before = now - days * 86_400 if days else 0
            which = "(created < ? OR expires < ?) AND status = 'processed'"
            unread = f"NOT EXISTS (SELECT 1 FROM batches WHERE input = files.id AND {_RUNNING})"
            rows = self._sql.execute(f"SELECT id FROM files WHERE {which} AND {unread}", (before, now))
            return [file_id for (file_id,) in rows]

        for file_id in await self._run(read):
            await self._run(lambda one=file_id: self._mark(one))  # type: ignore[misc]
            await self.remove(file_id)

    # --- on the database's thread -------------------------------------------------------------------------------------

    def insert(self, file: File, most: int) -> None:
        """Store a new file, without parts. Errors: HttpError 507."""
        content = msgspec.msgpack.encode(file.info)
        self.database.check_use(file.tenant, len(content), most)
        row = (file.id, file.tenant, file.created, file.expires, file.status)
        self._sql.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, content, digest_of(row, content)))
        self.database.note(file.tenant)

    def update(self, file: File) -> None:
        """Store another state of a file."""
        content = msgspec.msgpack.encode(file.info)
        digest = digest_of((file.id, file.tenant, file.created, file.expires, file.status), content)
        self._sql.execute(
            "UPDATE files SET expires = ?, status = ?, content = ?, digest = ? WHERE id = ?",
            (file.expires, file.status, content, digest, file.id),
        )

    def publish(self, file_id: str) -> bool:
        """Show a hidden file to callers if it has parts, otherwise remove it; return whether it has."""
        (count, size) = self._sql.execute(
            "SELECT count(*), sum(length(content)) FROM parts WHERE file = ?", (file_id,)
        ).fetchone()
        row = self._sql.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
        if row is None:
            return False
        if not count:
            self._sql.execute("DELETE FROM files WHERE id = ?", (file_id,))
            return False
        file = _file(row)
        file.status, file.info.num_bytes = PROCESSED, size
        self.update(file)
        return True

    def _get(self, file_id: str, tenant: str) -> File:
        row = self._sql.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
        if row is None or row[1] != tenant or row[4] != PROCESSED or row[3] <= time.time():
            raise HttpError(404, f"there is no file {file_id!r:.80}")
        return _file(row)

    def _mark(self, file_id: str) -> None:
        """Hide a file whose parts are about to be removed. Errors: HttpError 500."""
        row = self._sql.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
        if row is not None:
            self.update(msgspec.structs.replace(_file(row), status=DELETED))

    def _remove_some(self, file_id: str) -> bool:
        """Remove some parts, or the file after the last of them; return whether there is more to remove."""
        which = "SELECT rowid FROM parts WHERE file = ? LIMIT ?"
        if self._sql.execute(f"DELETE FROM parts WHERE rowid IN ({which})", (file_id, _EACH_REMOVED)).rowcount:
            return True
        self._sql.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return False


def _file(row: tuple[object, ...]) -> File:
    """Return a row of the table. Errors: HttpError 500 if it is damaged."""
    *columns, content, digest = row
    assert isinstance(content, bytes), "a blob"
    if digest_of(tuple(columns), content) != digest:
        raise damaged()
    return File(*columns, msgspec.msgpack.decode(content, type=FileInfo))  # type: ignore[call-arg, arg-type]
