"""BatchStore: the batches of callers in the server's database. Their answers are parts of files (FileStore)."""

import msgspec

from frontend.http.bodies import Json
from frontend.http.errors import HttpError
from frontend.http.stored.database import damaged, digest_of
from frontend.http.stored.files import File, FileStore

VALIDATING, RUNNING, FINALIZING, CANCELLING = UNFINISHED = "validating", "in_progress", "finalizing", "cancelling"
#: The name of the time at which a batch reached a status, if it is not the status with "_at".
_AT = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Problem(msgspec.Struct):
    """Why a batch failed. line: of its input, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Plan(msgspec.Struct):
    """The content of a row: what a batch is to do, and what it has done. output, errors: ids of its files.

    times: Unix seconds by status. total, completed, failed: requests.
    """

    endpoint: str
    output: str
    errors: str
    window: str
    expires: int
    metadata: dict[str, str] | None = None
    times: dict[str, int] = {}
    problems: list[Problem] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False
    end_as: str = ""  # its last status, once it is FINALIZING


class Batch(msgspec.Struct):
    """One batch. tenant: the name of its caller's key. created: Unix seconds. input: the id of its file."""

    id: str
    tenant: str
    created: int
    input: str
    status: str
    plan: Plan

    def shown(self) -> Json:
        """Return the batch as callers see it."""
        plan, problems = self.plan, [msgspec.to_builtins(one) for one in self.plan.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": plan.endpoint,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input,
            "completion_window": plan.window,
            "status": self.status,
            "output_file_id": plan.output if plan.has_output else None,
            "error_file_id": plan.errors if plan.has_errors else None,
            "created_at": self.created,
            "expires_at": plan.expires,
            **{f"{status}_at": plan.times.get(status) for status in _AT},
            "request_counts": {"total": plan.total, "completed": plan.completed, "failed": plan.failed},
            "metadata": plan.metadata,
        }


class BatchStore:
    """See the module's docstring."""

    def __init__(self, files: FileStore) -> None:
        self._files, self._database, self._run = files, files.database, files.database.run
        self._sql = files.database.sql

    async def put(self, batch: Batch, outputs: list[File], most: int) -> None:
        """Store a new batch and its hidden files. Errors: HttpError 500, 507."""

        def put() -> None:
            content = msgspec.msgpack.encode(batch.plan)
            self._database.check_use(batch.tenant, len(content), most)
            row = (batch.id, batch.tenant, batch.created, batch.input, batch.status)
            with self._database.transaction():
                for file in outputs:
                    self._files.insert(file, most)
                self._sql.execute(
                    "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, content, digest_of(row, content))
                )

        await self._run(put)

    async def change(self, batch: Batch) -> None:
        """Store another state of a batch. Errors: HttpError 500, 507."""
        await self._run(lambda: self._change(batch))

    async def finish(self, batch: Batch) -> None:
        """Store the last state of a batch, and show its files. Errors: HttpError 500, 507."""

        def finish() -> None:
            plan = batch.plan
            with self._database.transaction():
                shown = [self._files.publish(file) for file in (plan.output, plan.errors)]
                last = msgspec.structs.replace(plan, has_output=shown[0], has_errors=shown[1])
                self._change(msgspec.structs.replace(batch, plan=last))
            plan.has_output, plan.has_errors = shown

        await self._run(finish)

    async def get(self, batch_id: str, tenant: str) -> Batch:
        """Return a batch. Errors: HttpError 404, 500."""

        def get() -> Batch:
            row = self._sql.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if row is None or row[1] != tenant:
                raise HttpError(404, f"there is no batch {batch_id!r:.80}")
            return _batch(row)

        return await self._run(get)

    async def all_of(self, tenant: str) -> list[Batch]:
        """Return the batches of a tenant, the newest first. Errors: HttpError 500."""
        which = "tenant = ? ORDER BY created DESC, rowid DESC"
        return await self._run(
            lambda: [_batch(row) for row in self._sql.execute(f"SELECT * FROM batches WHERE {which}", (tenant,))]
        )

    async def unfinished(self) -> tuple[list[Batch], list[str]]:
        """Return the batches that have not ended, the oldest first, and the ids of damaged ones.

        Errors: HttpError 500.
        """

        def read() -> tuple[list[Batch], list[str]]:
            found, lost = list[Batch](), list[str]()
            marks = ", ".join("?" * len(UNFINISHED))
            which = f"status IN ({marks}) ORDER BY created, rowid"
            for row in self._sql.execute(f"SELECT * FROM batches WHERE {which}", UNFINISHED).fetchall():
                try:
                    found.append(_batch(row))
                except HttpError:
                    lost.append(row[0])
            return found, lost

        return await self._run(read)

    async def remove_old(self, before: float) -> None:
        """Remove batches that ended and were made before this time, in Unix seconds. Errors: HttpError 500."""
        marks = ", ".join("?" * len(UNFINISHED))
        statement = f"DELETE FROM batches WHERE created < ? AND status NOT IN ({marks})"
        await self._run(lambda: self._sql.execute(statement, (before, *UNFINISHED)))

    def _change(self, batch: Batch) -> None:
        content = msgspec.msgpack.encode(batch.plan)
        row = (batch.id, batch.tenant, batch.created, batch.input, batch.status)
        self._sql.execute(
            "UPDATE batches SET status = ?, content = ?, digest = ? WHERE id = ?",
            (batch.status, content, digest_of(row, content), batch.id),
        )


def _batch(row: tuple[object, ...]) -> Batch:
    """Return a row of the table. Errors: HttpError 500 if it is damaged."""
    *columns, content, digest = row
    assert isinstance(content, bytes), "a blob"
    if digest_of(tuple(columns), content) != digest:
        raise damaged()
    return Batch(*columns, msgspec.msgpack.decode(content, type=Plan))  # type: ignore[call-arg, arg-type]
