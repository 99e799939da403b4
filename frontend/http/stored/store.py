"""ResponseStore: the responses that a server keeps, in its database."""

import logging
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from frontend.http.errors import HttpError
from frontend.http.stored.conversations import ConversationStore
from frontend.http.stored.database import damaged, digest_of

#: Most responses before one, and how many are removed in one step.
_MAX_EARLIER, _EACH_PURGE = 4096, 500
_PURGES = 64
RUNNING = "in_progress"
#: Statuses of responses that others may continue.
CONTINUABLE = ("completed", "incomplete")
_log = logging.getLogger("engine_core.http")


class Work(msgspec.Struct):
    """What a background response is computed from. body: the request's. model: the name in the answer.

    seed: of its draws. prompt: its token ids. fingerprint: of the model and its arithmetic. is_streamed: whether its
    events were promised to the caller. last_item: number of the last item of its conversation when it began; -1 = there
    was none.
    """

    body: bytes
    model: str
    seed: int
    prompt: list[int]
    fingerprint: str
    is_streamed: bool
    last_item: int = -1


class Content(msgspec.Struct):
    """The content of a row. input: the request's own items, as JSON. response: the answer as JSON.

    work: of a background response. events: those of its stream, compressed. conversation: the id of the one that its
    items are added to.
    """

    input: bytes
    response: bytes
    work: Work | None = None
    events: bytes | None = None
    conversation: str | None = None


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
    """See the module's docstring. The end of a response is stored together with its items in a conversation."""

    def __init__(self, conversations: ConversationStore) -> None:
        self._conversations, self._database = conversations, conversations.database
        self._sql, self._run = self._database.sql, self._database.run
        self._database.purges.append(self._purge)

    async def get(self, response_id: str, tenant: str) -> Record:
        """Return a response. Errors: HttpError 404, 500."""
        return await self._run(lambda: self._get(response_id, tenant))

    async def check_room(self, tenant: str, most: int) -> None:
        """See Database."""
        await self._database.check_room(tenant, most)

    async def put(self, make: Callable[[], Record], most: int) -> None:
        """Store a new response. make: called on the store's thread. most: bytes that its tenant may use.

        Errors: HttpError 500, 507.
        """
        await self._run(lambda: self._put(make(), most))

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
            for row in self._sql.execute(f"SELECT * FROM responses WHERE {which} ORDER BY created, rowid"):
                try:
                    found.append(_record(row))
                except HttpError:
                    _log.error("the response %.80r in the store is damaged", row[0])
            return found

        return await self._run(read)

    # --- on the store's thread ----------------------------------------------------------------------------------------

    def _purge(self, before: float) -> None:
        """Remove some responses that are too old, and that no other continues."""
        for _ in range(_PURGES):  # each removes the last responses of conversations
            if not self._remove_leaves("created < ? AND status <> 'in_progress'", before):
                return

    def _remove_leaves(self, which: str, value: object) -> int:
        """Remove responses that no other continues; return how many, at most _EACH_PURGE."""
        leaves = f"SELECT rowid FROM responses AS one WHERE {which} AND NOT EXISTS"
        children = "(SELECT 1 FROM responses WHERE previous = one.id)"
        removed = self._sql.execute(
            f"DELETE FROM responses WHERE rowid IN ({leaves} {children} ORDER BY rowid DESC LIMIT {_EACH_PURGE})",
            (value,),
        )
        return removed.rowcount

    def _get(self, response_id: str, tenant: str, *, sees_deleted: bool = False) -> Record:
        row = self._sql.execute("SELECT * FROM responses WHERE id = ?", (response_id,)).fetchone()
        if row is None or row[1] != tenant or (row[5] and not sees_deleted):
            raise HttpError(404, f"there is no response {response_id!r:.80}")
        return _record(row)

    def _put(self, record: Record, most: int) -> None:
        content = msgspec.msgpack.encode(record.content)
        self._database.check_use(record.tenant, len(content), most)
        row = (record.id, record.tenant, record.previous, record.created, record.status)
        with self._database.transaction():
            self._sql.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, 0, ?, ?)", (*row, content, digest_of(row, content))
            )
            self._converse(record.tenant, record.status, record.content)
        self._database.note(record.tenant)

    def _finish(self, response_id: str, status: str, response: bytes, events: list[bytes]) -> bool:
        found = self._sql.execute("SELECT * FROM responses WHERE id = ?", (response_id,)).fetchone()
        if found is None or found[4] != RUNNING:
            return False
        content = _record(found).content
        content.response = response
        content.events = zlib.compress(b"".join(events)) if events else None
        data, row = msgspec.msgpack.encode(content), (*found[:4], status)
        with self._database.transaction():
            self._sql.execute(
                "UPDATE responses SET status = ?, content = ?, digest = ? WHERE id = ?",
                (status, data, digest_of(row, data), response_id),
            )
            self._converse(found[1], status, content)
        self._database.note(found[1])
        return True

    def _converse(self, tenant: str, status: str, content: Content) -> None:
        """Add the items of a response that has its answer to its conversation."""
        if content.conversation is not None and status in CONTINUABLE:
            output = msgspec.json.decode(content.response, type=_Output).output
            self._conversations.append(content.conversation, tenant, [*msgspec.json.decode(content.input), *output])

    def _delete(self, response_id: str, tenant: str) -> None:
        record: Record | None = self._get(response_id, tenant)
        with self._database.transaction():
            self._sql.execute("UPDATE responses SET is_deleted = 1 WHERE id = ?", (response_id,))
            self._remove_chain(record)
        self._database.note(tenant)

    def _remove_chain(self, record: Record | None) -> None:
        """Remove a deleted response, and those before it that were kept for it alone."""
        at = None if record is None else record.id
        while at is not None and self._remove_leaves("id = ? AND is_deleted", at):
            at, record = (None if record is None else record.previous), None
            if at is not None:
                row = self._sql.execute("SELECT * FROM responses WHERE id = ?", (at,)).fetchone()
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
                    raise damaged() from None
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
    if digest_of(row[:5], content) != digest:
        raise damaged()
    return Record(
        response_id, tenant, created, status, msgspec.msgpack.decode(content, type=Content), previous=previous
    )
