"""What the engine process says on standard error, which never holds it up: a full disk or a pipe that nobody reads
costs lines, not requests."""

import contextlib
import os
import threading
from collections import deque

MAX_LINES = 1000  # that wait to be written; older ones are dropped

_lines: deque[str] = deque(maxlen=MAX_LINES)
_changed = threading.Condition()
_writer: threading.Thread | None = None
_is_writing = False


def say(text: str) -> None:
    """Write a line or several, some time soon; returns at once."""
    global _writer
    with _changed:
        _lines.append(text)
        if _writer is None:
            _writer = threading.Thread(target=_write, name="log", daemon=True)
            _writer.start()
        _changed.notify_all()


def flush(timeout: float) -> None:
    """Wait until all is written, at most `timeout` seconds."""
    with _changed:
        _changed.wait_for(lambda: not _lines and not _is_writing, timeout)


def _write() -> None:
    global _is_writing
    while True:
        with _changed:
            _is_writing = False
            _changed.notify_all()
            _changed.wait_for(lambda: bool(_lines))
            text, _is_writing = _lines.popleft(), True
        data = memoryview(f"{text.rstrip()}\n".encode(errors="backslashreplace"))
        with contextlib.suppress(OSError):  # a full disk, a closed pipe
            while data:
                data = data[os.write(2, data) :]
