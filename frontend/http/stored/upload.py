"""read_form(): a form of multipart/form-data (RFC 7578), read part by part as it arrives.

Its small fields are kept, and the content of its one file is passed on, so that a large file takes no memory.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from frontend.http.errors import HttpError, retry_after
from ipc.log_lines import counted

MAX_OF_TENANT, _MAX_UPLOADS = 8, 64  # uploads at the same time
_MAX_FIELDS, _MAX_FIELD_BYTES = 32, 4096
_MAX_NAME_CHARS = 512
_AT_ONCE = 16 << 10  # bytes that are parsed in one turn: up to 5 ms, if they are chosen to take long
FILE_FIELD = "file"


class Uploads:
    """The uploads of one server that are being read. Each takes up to 350 KiB of memory, for as long as it lasts."""

    def __init__(self) -> None:
        self._num_running: dict[str, int] = {}  # by tenant

    @contextlib.contextmanager
    def begin(self, tenant: str) -> Iterator[None]:
        """Count an upload until it has ended. Errors: HttpError 429, 503."""
        running = self._num_running.get(tenant, 0)
        if running >= MAX_OF_TENANT:
            text = f"{counted(running, 'upload')} of this key are being read, its limit"
            raise HttpError(429, text, headers=retry_after(1000))
        if sum(self._num_running.values()) >= _MAX_UPLOADS:
            raise HttpError(503, f"{_MAX_UPLOADS} uploads are being read, the limit", headers=retry_after(1000))
        self._num_running[tenant] = running + 1
        try:
            yield
        finally:
            self._num_running[tenant] -= 1
            if not self._num_running[tenant]:
                del self._num_running[tenant]


class _Form:
    """The callbacks of the parser. It only collects: the file's bytes in `arrived`, until they are passed on."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.arrived = bytearray()
        self.is_complete = False
        self._name = ""
        self._is_file = False
        self._field = bytearray()
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self.num_parts = 0

    def callbacks(self) -> Any:
        """Return them as the parser takes them: by name."""
        return {
            "on_part_begin": self.part_begin,
            "on_part_data": self.part_data,
            "on_part_end": self.part_end,
            "on_header_begin": self.header_begin,
            "on_header_field": self.header_field,
            "on_header_value": self.header_value,
            "on_header_end": self.header_end,
            "on_headers_finished": self.headers_finished,
            "on_end": self.end,
        }

    def part_begin(self) -> None:
        """Begin a field or the file."""
        self.num_parts += 1
        if self.num_parts > _MAX_FIELDS:
            raise HttpError(400, f"the form has more than {_MAX_FIELDS} fields")
        self._field.clear()
        self._disposition = b""

    def header_begin(self) -> None:
        """Begin a header of a part."""
        self._header.clear()
        self._value.clear()

    def header_field(self, data: bytes, start: int, end: int) -> None:
        """Take a part of its name."""
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        """Take a part of its value."""
        self._value += data[start:end]

    def header_end(self) -> None:
        """Keep the one header that matters."""
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def headers_finished(self) -> None:
        """Read what the part is."""
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise HttpError(400, "a part of the form has no content-disposition with a name")
        self._name = options[b"name"].decode(errors="replace")
        self._is_file = self._name == FILE_FIELD
        if self._is_file:
            if self.file_name is not None:
                raise HttpError(400, "the form has two files; send one", param=FILE_FIELD)
            self.file_name = options.get(b"filename", b"file").decode(errors="replace")[:_MAX_NAME_CHARS]

    def part_data(self, data: bytes, start: int, end: int) -> None:
        """Take some of its content."""
        if self._is_file:
            self.arrived += memoryview(data)[start:end]
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            raise HttpError(400, f"the field has more than {_MAX_FIELD_BYTES} bytes", param=self._name)

    def part_end(self) -> None:
        """Keep a field."""
        if not self._is_file:
            self.fields[self._name] = self._field.decode(errors="replace")

    def end(self) -> None:
        """Note the last boundary."""
        self.is_complete = True


async def read_form(
    content_type: bytes, parts: AsyncIterator[bytes], take: Callable[[bytes], Awaitable[None]], size: int
) -> tuple[dict[str, str], str]:
    """Return the fields of a form and its file's name. take: called with `size` bytes of the file at a time, and the
    rest.

    Errors: HttpError 400 for what is no such form, or has no file; those of take().
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise HttpError(400, "a file is sent as multipart/form-data with a boundary", param=FILE_FIELD)
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks())
        async for part in parts:
            for at in range(0, len(part), _AT_ONCE):
                parser.write(part[at : at + _AT_ONCE])
                await asyncio.sleep(0)
            while len(form.arrived) >= size:
                await take(bytes(form.arrived[:size]))
                del form.arrived[:size]
    except FormParserError as error:
        raise HttpError(400, f"the form cannot be read: {error}") from None
    if not form.is_complete:
        raise HttpError(400, "the form ends before its last boundary")
    if form.file_name is None:
        raise HttpError(400, "the form has no file", param=FILE_FIELD)
    if form.arrived:
        await take(bytes(form.arrived))
    return form.fields, form.file_name
