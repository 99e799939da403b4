"""CaptureWriter: the queue of records from the engine thread to the capture's file.

The engine thread encodes and appends records, and never waits. Records beyond MAX_QUEUED_BYTES are lost, and a Gap is
written instead. The writer thread numbers, frames and writes records, in one batch every BATCH_S at most. While the
queue is empty, it sleeps.
"""

import contextlib
import itertools
import os
import threading
import time
from collections import deque

from core import log
from core.capture.records import TAGS, Close, Gap, Header, Input, Step, encode_record
from ipc.errors import ConfigError
from ipc.log_frames import pack_frame

MAX_QUEUED_BYTES = 32 << 20
BATCH_S = 0.05  # pause before each batch
SYNC_S = 1.0  # longest time from a write to the fdatasync that follows it
CLOSE_S = 2.0  # longest wait in close() for the last batch


def check_capture(path: str) -> None:
    """Check the path before a model is loaded, which may take minutes. Errors: ConfigError."""
    folder = os.path.dirname(path) or "."
    if os.path.lexists(path):
        raise ConfigError(f"capture={path!r} exists already and is never overwritten: remove it, or give another name")
    if not os.path.isdir(folder):
        raise ConfigError(f"capture={path!r}: there is no folder {folder!r}")


def open_capture(path: str) -> int:
    """Create the file, readable by its owner only, and return its descriptor. Errors: ConfigError."""
    check_capture(path)
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"capture={path!r}: {error.strerror}") from error


class CaptureWriter:
    """The owner of the file descriptor and of the writer thread.

    Errors: ConfigError when the header cannot be written.
    """

    def __init__(self, path: str, fd: int, header: Header) -> None:
        self._path = path
        self._fd = fd
        self._sequence = 0  # owner from here on: the writer thread
        self._size = 0  # bytes of whole frames
        self._unsynced_since = 0.0  # monotonic seconds; 0: all is on disk
        self._num_written = dict.fromkeys(TAGS.values(), 0)
        self._num_all_lost = 0
        self._num_taken_bytes = 0
        self._num_put_bytes = 0  # owner from here on: the engine thread
        self._num_lost = 0  # records, since the last one that was queued
        self._queue: deque[tuple[int, bytes] | int] = deque()  # (tag, payload), or a number of lost records
        self._has_ended = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        try:
            self._write([self._frame(TAGS[Header], encode_record(header))])
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"capture={path!r}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def add(self, record: Input | Step) -> None:
        """Queue a record, or count it as lost when too much is queued. Never wait and never fail.

        Only the engine thread calls this.
        """
        if self._has_ended:
            return
        payload = encode_record(record)
        if self._num_put_bytes - self._num_taken_bytes + len(payload) > MAX_QUEUED_BYTES:
            self._num_lost += 1
            return
        self._num_put_bytes += len(payload)
        if self._num_lost:
            self._queue.append(self._num_lost)
            self._num_lost = 0
        self._queue.append((TAGS[type(record)], payload))
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Write the queued records, then Close. Any thread may call this, repeatedly."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._serve()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # so that the file ends with a whole record
            text = f"{error.strerror}; it ends after {self._size} bytes, the engine goes on without it"
            log.say(f"engine-core: the capture {self._path} stopped: {text}")
        finally:
            self._has_ended = True
            self._queue.clear()
            os.close(self._fd)

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._seconds_until_sync())
            self._closing.wait(BATCH_S)
            self._wake.clear()
            self._write_queued()
            if self._seconds_until_sync() == 0.0:
                self._sync()
        self._has_ended = True
        self._write_queued()
        if self._num_lost:
            self._write([self._gap(self._num_lost)])
        close = Close(self._num_written[TAGS[Input]], self._num_written[TAGS[Step]], self._num_all_lost)
        self._write([self._frame(TAGS[Close], encode_record(close))])
        self._sync()

    def _seconds_until_sync(self) -> float | None:
        """Return the time until the next fdatasync is due; None: there is nothing to sync."""
        if not self._unsynced_since:
            return None
        return max(0.0, self._unsynced_since + SYNC_S - time.monotonic())

    def _sync(self) -> None:
        os.fdatasync(self._fd)
        self._unsynced_since = 0.0

    def _write_queued(self) -> None:
        frames = []
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, int):
                frames.append(self._gap(item))
            else:
                self._num_taken_bytes += len(item[1])
                frames.append(self._frame(*item))
        if frames:
            self._write(frames)

    def _gap(self, count: int) -> bytes:
        first = self._sequence
        self._sequence += count
        self._num_all_lost += count
        return self._frame(TAGS[Gap], encode_record(Gap(first, count)))

    def _frame(self, tag: int, payload: bytes) -> bytes:
        frame = pack_frame(self._sequence, tag, payload)
        self._sequence += 1
        self._num_written[tag] += 1
        return frame

    def _write(self, frames: list[bytes]) -> None:
        """Write the frames, and add those that are whole in the file to _size. Errors: OSError."""
        data = b"".join(frames)
        num_written = 0
        try:
            while num_written < len(data):
                num_written += os.write(self._fd, memoryview(data)[num_written:])
        finally:
            ends = itertools.accumulate(map(len, frames))
            self._size += max((end for end in ends if end <= num_written), default=0)
        self._unsynced_since = self._unsynced_since or time.monotonic()
