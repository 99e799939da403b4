"""/v1/files: the handlers."""

import asyncio
import time
from collections.abc import Mapping

from frontend.http.errors import HttpError
from frontend.http.replies.answer_format import json_bytes
from frontend.http.replies.reply import STALL_S
from frontend.http.request import Request, Response, WrittenAnswer, new_id
from frontend.http.served import Served
from frontend.http.service import tenant_of
from frontend.http.stored.files import NEVER, PART_BYTES, PROCESSED, UPLOADING, File, FileInfo, FileStore
from frontend.http.stored.lists import page_of, read_number, read_order, read_query
from frontend.http.stored.upload import FILE_FIELD, read_form

#: What an uploaded file may be for. Batches read those of the first.
PURPOSES = ("batch", "user_data")
_MAX_FILES = 10_000  # of one list
_MIN_KEPT_S, _MAX_KEPT_S = 3600, 2_592_000
_BYTES = b"application/octet-stream"


async def create_file(served: Served, request: Request) -> Response:
    """Store a file: a form with `purpose` and `file`, and maybe `expires_after[seconds]`."""
    files, tenant, most = files_of(served), tenant_of(request), served.shared.most_stored(request.key)
    await files.database.check_room(tenant, most)
    file = File(f"file-{new_id()}", tenant, int(time.time()), NEVER, UPLOADING, FileInfo("", ""))
    with served.shared.uploads.begin(tenant):
        await files.put(file, most)
        try:
            await _read_file(request, files, file, most)
            await files.change(file)
        except BaseException:
            await asyncio.shield(files.remove(file.id))
            raise
    return Response(json_bytes(file.shown()))


async def _read_file(request: Request, files: FileStore, file: File, most: int) -> None:
    """Store the parts of a file as they arrive, and set what the form says of it. Errors: HttpError 400, 507."""
    num_parts = 0

    async def take(part: bytes) -> None:
        nonlocal num_parts
        await files.add_part(file.id, file.tenant, num_parts, part, most)
        num_parts += 1
        file.info.num_bytes += len(part)

    assert request.parts is not None, "the body is read here"
    content_type = request.headers.get(b"content-type", b"")
    fields, file.info.name = await read_form(content_type, request.parts, take, PART_BYTES)
    if not num_parts:
        raise HttpError(400, "the file is empty", param=FILE_FIELD)
    file.info.purpose = fields.get("purpose", "")
    if file.info.purpose not in PURPOSES:
        text = f"purpose must be one of {', '.join(PURPOSES)}; got {file.info.purpose!r:.40}"
        raise HttpError(400, text, param="purpose")
    file.expires, file.status = _expires(fields, file.created), PROCESSED


async def list_files(served: Served, request: Request) -> Response:
    """List the caller's files."""
    query = read_query(request)
    limit = read_number(query, "limit", _MAX_FILES, low=1, high=_MAX_FILES)
    newest_first = not read_order(query)
    found = await files_of(served).all_of(
        tenant_of(request), purpose=query.get("purpose") or None, newest_first=newest_first
    )
    return Response(json_bytes(page_of([file.shown() for file in found], query.get("after"), limit)))


async def get_file(served: Served, request: Request) -> Response:
    """Describe a file."""
    return Response(json_bytes((await files_of(served).get(request.target, tenant_of(request))).shown()))


async def delete_file(served: Served, request: Request) -> Response:
    """Delete a file, unless a batch reads it."""
    await files_of(served).delete(request.target, tenant_of(request))
    return Response(json_bytes({"id": request.target, "object": "file", "deleted": True}))


async def get_content(served: Served, request: Request) -> WrittenAnswer:
    """Return the content of a file."""
    files = files_of(served)
    file = await files.get(request.target, tenant_of(request))
    return _Content(served, request, files, file, parts=await files.parts(file.id, -1))


def files_of(served: Served) -> FileStore:
    """Return the store of files. Errors: HttpError 404 if there is none."""
    if served.shared.files is None:
        raise HttpError(404, "nothing is stored here: the server was started without --store")
    return served.shared.files


def _expires(fields: Mapping[str, str], now: int) -> int:
    """Return when a file expires, in Unix seconds. Errors: HttpError 400."""
    if "expires_after[seconds]" not in fields and "expires_after[anchor]" not in fields:
        return NEVER
    if (anchor := fields.get("expires_after[anchor]")) != "created_at":
        raise HttpError(400, f"expires_after[anchor] must be created_at; got {anchor!r:.40}", param="expires_after")
    return now + read_number(fields, "expires_after[seconds]", 0, low=_MIN_KEPT_S, high=_MAX_KEPT_S)


class _Content(WrittenAnswer):
    """The content of a file, some parts at a time. parts: the first ones.

    If a later part is damaged, the connection is cut, so that no caller takes it for the whole.
    """

    def __init__(
        self, served: Served, request: Request, files: FileStore, file: File, *, parts: list[tuple[int, bytes]]
    ) -> None:
        self._served, self._request, self._files = served, request, files
        self._file, self._next = file, parts

    async def write(self) -> None:
        """Write the parts until their end, or until the peer has left."""
        exchange, news = self._request.exchange, asyncio.Event()
        exchange.on_left = news.set
        exchange.begin([(b"content-type", _BYTES), *self._request.answer_headers])
        exchange.write(b"")
        num_left = self._file.info.num_bytes
        try:
            while self._next and not exchange.has_left:
                news.clear()
                exchange.on_writable = news.set
                data = b"".join(part for _, part in self._next)
                num_left -= len(data)
                if exchange.write(data):
                    async with asyncio.timeout(STALL_S):
                        await news.wait()
                self._next = await self._files.parts(self._file.id, self._next[-1][0])
            if num_left:  # it was deleted
                exchange.abort()
            elif not exchange.has_left:
                exchange.end(b"")
        except (TimeoutError, HttpError):
            exchange.abort()
        finally:
            exchange.on_left = exchange.on_writable = None
            self._served.shared.note(self._request, Response(b""), time.monotonic())
