"""Keyboard: single keys from a terminal, whose settings are put back at the end however the program ends."""

import os
import select
import termios
import tty
from types import TracebackType
from typing import Self

_ESCAPES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}
_PLAIN = {b"\r": "enter", b"\n": "enter", b"\x03": "q", b"\x04": "q"}


class Keyboard:
    """The keys of a terminal, unechoed. A context manager. fd: the terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._saved = termios.tcgetattr(fd)
        self._unread = b""

    def read(self, timeout: float) -> str | None:
        """Return the next key within `timeout` seconds: a character, up, down, enter; q at the terminal's end."""
        if not self._unread:
            if not select.select([self._fd], [], [], max(0.0, timeout))[0]:
                return None
            self._unread = os.read(self._fd, 64)
        if not self._unread:
            return "q"
        if (key := _ESCAPES.get(self._unread[:3])) is not None:
            self._unread = self._unread[3:]
            return key
        first, self._unread = self._unread[:1], self._unread[1:]
        return _PLAIN.get(first) or first.decode("ascii", "replace")

    def __enter__(self) -> Self:
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)
