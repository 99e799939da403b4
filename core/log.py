"""The engine process's log lines on standard error. Logging never blocks the engine.

On a full disk or a pipe without a reader, lines are lost and requests go on.
"""

import contextlib
import os
import threading
from collections import deque

from ipc.log_lines import LogFormat, log_line

MAX_LINES = 1000  # lines waiting to be written; older ones are dropped

_lines: deque[str] = deque(maxlen=MAX_LINES)
_changed = threading.Condition()
_writer: threading.Thread | None = None
_is_writing = False
_format: LogFormat = "text"


def use_format(form: LogFormat) -> None:
    """Write lines as text or as JSON from now on."""
    global _format
    _format = form


def say(text: str, **fields: object) -> None:
    """Queue one or more lines for the writer thread and return at once.

    fields: structured data of the lines, by name.
    """
    global _writer
    line = log_line(_format, text, fields)
    with _changed:
        _lines.append(line)
        if _writer is None:
            _writer = threading.Thread(target=_write, name="log", daemon=True)
            _writer.start()
        _changed.notify_all()


def flush(timeout: float) -> None:
    """Wait until all lines are written, at most `timeout` seconds."""
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
