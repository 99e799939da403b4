"""ConversationStore: the conversations of callers in the server's database: lists of items, one row each."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.http.bodies import Json
from frontend.http.errors import HttpError
from frontend.http.replies.answer_format import json_bytes
from frontend.http.request import new_id
from frontend.http.stored.database import Database, damaged, digest_of

#: Most items of a conversation.
MAX_ITEMS = 4096
_EACH_PURGE = 500


class Conversation(msgspec.Struct):
    """One conversation. tenant: the name of its caller's key. created: Unix seconds. metadata: the caller's notes."""

    id: str
    tenant: str
    created: int
    metadata: dict[str, str]

    def shown(self) -> Json:
        """Return the conversation as callers see it."""
        fields = {"id": self.id, "object": "conversation", "created_at": self.created}
        return {**fields, "metadata": self.metadata}


class ConversationStore:
    """See the module's docstring."""

    def __init__(self, database: Database) -> None:
        self.database, self._sql, self._run = database, database.sql, database.run
        database.purges.append(self._purge)

    async def put(self, conversation: Conversation, items: Sequence[Json], most: int) -> None:
        """Store a new conversation. most: bytes that its tenant may use. Errors: HttpError 500, 507."""

        def put() -> None:
            content = msgspec.msgpack.encode(conversation.metadata)
            row = (conversation.id, conversation.tenant, conversation.created)
            with self.database.transaction():
                self.database.check_use(conversation.tenant, len(content), most)
                self._sql.execute(
                    "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)",
                    (*row, conversation.created, content, digest_of(row, content)),
                )
                self.append(conversation.id, conversation.tenant, items, most)

        await self._run(put)

    async def get(self, conversation_id: str, tenant: str) -> Conversation:
        """Return a conversation. Errors: HttpError 404, 500."""
        return await self._run(lambda: self._get(conversation_id, tenant))

    async def change(self, conversation: Conversation) -> None:
        """Store other metadata. Errors: HttpError 500, 507."""

        def change() -> None:
            content = msgspec.msgpack.encode(conversation.metadata)
            row = (conversation.id, conversation.tenant, conversation.created)
            self._sql.execute(
                "UPDATE conversations SET content = ?, digest = ? WHERE id = ?",
                (content, digest_of(row, content), conversation.id),
            )

        await self._run(change)

    async def add(self, conversation_id: str, tenant: str, items: Sequence[Json], most: int) -> None:
        """Add items, each with an id. Errors: HttpError 400, 404, 500, 507."""

        def add() -> None:
            self._get(conversation_id, tenant)
            with self.database.transaction():
                self.append(conversation_id, tenant, items, most)

        await self._run(add)

    async def delete(self, conversation_id: str, tenant: str) -> None:
        """Delete a conversation with its items. Errors: HttpError 404, 500."""

        def delete() -> None:
            self._get(conversation_id, tenant)
            with self.database.transaction():
                self._remove(conversation_id)
            self.database.note(tenant)

        await self._run(delete)

    async def delete_item(self, conversation_id: str, tenant: str, item_id: str) -> None:
        """Delete an item. Errors: HttpError 404, 500."""

        def delete() -> None:
            self._get(conversation_id, tenant)
            which = "conversation = ? AND id = ?"
            if not self._sql.execute(f"DELETE FROM items WHERE {which}", (conversation_id, item_id)).rowcount:
                raise HttpError(404, f"the conversation has no item {item_id!r:.80}")
            self.database.note(tenant)

        await self._run(delete)

    async def history(
        self, conversation_id: str, tenant: str, max_bytes: int, until: int | None = None
    ) -> tuple[list[Any], int, int]:
        """Return the items in order, their size in bytes, and the number of the last one; -1 = there is none.

        until: number of the last one that is wanted. Errors: HttpError 400, 404, 500.
        """

        def read() -> tuple[list[Any], int, int]:
            self._get(conversation_id, tenant)
            items, size, last = [], 0, -1
            end = 1 << 60 if until is None else until
            which = "conversation = ? AND number <= ? ORDER BY number"
            for row in self._sql.execute(f"SELECT * FROM items WHERE {which}", (conversation_id, end)):
                *columns, content, digest = row
                if digest_of(tuple(columns), content) != digest:
                    raise damaged()
                size += len(content)
                if size > max_bytes:
                    text = f"the conversation has more than {max_bytes} bytes"
                    raise HttpError(400, text, param="conversation", code="context_length_exceeded")
                items.append(msgspec.json.decode(content))
                last = row[1]
            return items, size, last

        return await self._run(read)

    # --- on the database's thread -------------------------------------------------------------------------------------

    def append(self, conversation_id: str, tenant: str, items: Sequence[Json], most: int | None = None) -> None:
        """Add items behind the others, in a transaction. Of a conversation that is gone, nothing is kept.

        most: bytes that the tenant may use; None = what has begun may end. Errors: HttpError 400, 507.
        """
        if self._sql.execute("SELECT 1 FROM conversations WHERE id = ?", (conversation_id,)).fetchone() is None:
            return
        which = "SELECT count(*), max(number) FROM items WHERE conversation = ?"
        count, last = self._sql.execute(which, (conversation_id,)).fetchone()
        if count + len(items) > MAX_ITEMS and most is not None:
            text = f"the conversation would have {count + len(items)} items; at most {MAX_ITEMS} are allowed"
            raise HttpError(400, text, param="conversation")
        first = 0 if last is None else last + 1
        for number, item in enumerate(items, first):
            if self._has(conversation_id, item["id"]):  # a client that sends earlier items again
                item = {**item, "id": f"item_{new_id()}"}
            content = json_bytes(item)
            if most is not None:
                self.database.check_use(tenant, len(content), most)
            row = (conversation_id, number, item["id"], tenant)
            self._sql.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", (*row, content, digest_of(row, content)))
        changed = "UPDATE conversations SET changed = ? WHERE id = ?"
        self._sql.execute(changed, (int(time.time()), conversation_id))
        self.database.note(tenant)

    def _has(self, conversation_id: str, item_id: str) -> bool:
        which = "SELECT 1 FROM items WHERE conversation = ? AND id = ?"
        return self._sql.execute(which, (conversation_id, item_id)).fetchone() is not None

    def _get(self, conversation_id: str, tenant: str) -> Conversation:
        row = self._sql.execute("SELECT * FROM conversations WHERE id = ?", (conversation_id,)).fetchone()
        if row is None or row[1] != tenant:
            raise HttpError(404, f"there is no conversation {conversation_id!r:.80}")
        own, (_, content, digest) = row[:3], row[3:]
        if digest_of(own, content) != digest:
            raise damaged()
        return Conversation(*own, msgspec.msgpack.decode(content))  # type: ignore[call-arg]

    def _remove(self, conversation_id: str) -> None:
        self._sql.execute("DELETE FROM items WHERE conversation = ?", (conversation_id,))
        self._sql.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

    def _purge(self, before: float) -> None:
        """Remove some conversations to which nothing was added for too long."""
        which = "SELECT id FROM conversations WHERE changed < ? LIMIT ?"
        for (conversation_id,) in self._sql.execute(which, (before, _EACH_PURGE)).fetchall():
            with self.database.transaction():
                self._remove(conversation_id)
