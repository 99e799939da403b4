"""Heads of answers: the status line and the fields, as bytes. The date is that of the last tick()."""

import time
from email.utils import formatdate
from http import HTTPStatus

from frontend.http.errors import Headers

_STATUS_LINES = {int(one): f"HTTP/1.1 {int(one)} {one.phrase}\r\n".encode() for one in HTTPStatus}


class Heads:
    """Writer of heads for all connections of a server."""

    def __init__(self) -> None:
        self._date = b""
        self.tick()

    def tick(self) -> None:
        """Take the present second for the heads that follow."""
        self._date = b"date: %b\r\n" % formatdate(time.time(), usegmt=True).encode()

    def head(self, status: int, fields: Headers, framing: bytes) -> bytes:
        """Return a head. framing: further fields as bytes, each with its line end."""
        lines = b"".join([b"%b: %b\r\n" % field for field in fields])
        num_ends = lines.count(b"\n")
        assert num_ends == len(fields), f"{num_ends} line ends in {len(fields)} fields: {lines!r:.200}"
        return b"%b%b%b%b\r\n" % (_STATUS_LINES[status], self._date, lines, framing)
