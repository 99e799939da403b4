"""CaptureOutput: one capture file being written: its header, its records and its end."""

import itertools
import os
import stat
import time

from core.capture.records import TAGS, Close, Gap, Header, Input, Step, encode_record
from ipc.errors import ConfigError
from ipc.records.log_frames import pack_frame

SYNC_S = 1.0  # longest time from a write to the next fdatasync

#: What is written: (tag, payload) of a record, or the number of lost records.
Item = tuple[int, bytes] | int


def check_capture(path: str) -> None:
    """Check the path before loading a model, which may take minutes. Errors: ConfigError."""
    folder = os.path.dirname(path) or "."
    if os.path.lexists(path):
        raise ConfigError(f"capture={path!r} already exists and is never overwritten: remove it or use another name")
    if not os.path.isdir(folder):
        raise ConfigError(f"capture={path!r}: the folder {folder!r} does not exist")


def open_capture(path: str) -> int:
    """Create the file, readable only by its owner, and return its descriptor. Errors: ConfigError."""
    check_capture(path)
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"capture={path!r}: {error.strerror}") from error


class CaptureOutput:
    """Owns a file's descriptor. One thread uses it. Errors: OSError if the header cannot be written."""

    def __init__(self, path: str, fd: int, header: Header) -> None:
        self.path = path
        self.size = 0  # bytes of complete frames
        self._fd = fd
        self._sequence = 0
        self._unsynced_since = 0.0  # monotonic seconds; 0: everything is on disk
        self._num_written = dict.fromkeys(TAGS.values(), 0)
        self._num_lost = 0
        try:
            self.write([(TAGS[Header], encode_record(header))])
        except OSError:
            if stat.S_ISREG(os.fstat(fd).st_mode):  # a file without a header is not a capture
                os.unlink(path)
            os.close(fd)
            raise

    def write(self, items: list[Item]) -> None:
        """Append these records, and add those that are completely written to `size`. Errors: OSError."""
        frames = [self._gap(item) if isinstance(item, int) else self._frame(*item) for item in items]
        data = b"".join(frames)
        num_written = 0
        try:
            while num_written < len(data):
                num_written += os.write(self._fd, memoryview(data)[num_written:])
        finally:
            ends = itertools.accumulate(map(len, frames))
            self.size += max((end for end in ends if end <= num_written), default=0)
        self._unsynced_since = self._unsynced_since or time.monotonic()

    def seconds_until_sync(self) -> float | None:
        """Return the time until the next sync() is due, or None if there is nothing to sync."""
        if not self._unsynced_since:
            return None
        return max(0.0, self._unsynced_since + SYNC_S - time.monotonic())

    def sync(self) -> None:
        """Flush what was written to the disk. Errors: OSError."""
        os.fdatasync(self._fd)
        self._unsynced_since = 0.0

    def finish(self) -> None:
        """Write Close, the last record. Errors: OSError."""
        close = Close(self._num_written[TAGS[Input]], self._num_written[TAGS[Step]], self._num_lost)
        self.write([(TAGS[Close], encode_record(close))])
        self.sync()

    def cut(self) -> None:
        """Truncate the file after its last complete record. Errors: OSError."""
        os.ftruncate(self._fd, self.size)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def _gap(self, count: int) -> bytes:
        first = self._sequence
        self._sequence += count
        self._num_lost += count
        return self._frame(TAGS[Gap], encode_record(Gap(first, count)))

    def _frame(self, tag: int, payload: bytes) -> bytes:
        frame = pack_frame(self._sequence, tag, payload)
        self._sequence += 1
        self._num_written[tag] += 1
        return frame
