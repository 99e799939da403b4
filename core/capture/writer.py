"""CaptureWriter: the queue of records from the engine thread to the capture's files.

The engine thread encodes and appends records, and never waits. Records above MAX_QUEUED_BYTES are lost, and a Gap is
written instead. The writer thread numbers, frames and writes records, in one batch at most every BATCH_S. It sleeps
while the queue is empty. There is a checkpoint every CHECKPOINT_BYTES, and at the start of each further file.
"""

import contextlib
import os
import threading
import time
from collections import deque

import msgspec

from core import log
from core.capture.output import CaptureOutput, Item, check_capture, open_capture
from core.capture.records import TAGS, Checkpoint, Header, Input, Step, encode_record
from core.capture.snapshot import Snapshot
from ipc.errors import ConfigError

__all__ = ["CaptureWriter", "check_capture", "open_capture"]

MAX_QUEUED_BYTES = 32 << 20
CHECKPOINT_BYTES = 64 << 20  # bytes of records between two checkpoints of a file
BATCH_S = 0.05  # pause before each batch
CLOSE_S = 2.0  # longest wait in close() for the last batch
PAUSE_S = 0.0005  # pause that gives the GIL to the engine thread while a checkpoint is encoded


class CaptureWriter:
    """Owns the files and the writer thread.

    rotate_bytes: size of records after which a new file starts, 0 = never; the files are PATH, PATH-2, PATH-3, ...
    keep_files: how many of them are kept, 0 = all. Errors: ConfigError if the header cannot be written.
    """

    def __init__(self, path: str, fd: int, header: Header, rotate_bytes: int = 0, *, keep_files: int = 0) -> None:
        self._path = path
        self._header = header
        self._rotates = rotate_bytes > 0
        self._keep_files = keep_files
        try:
            self._output = CaptureOutput(path, fd, header)  # owned by the writer thread from here on
        except OSError as error:
            raise ConfigError(f"capture={path!r}: {error.strerror}") from error
        self._files = [path]  # the kept ones
        self._num_files = 1
        self._num_taken_bytes = 0
        self._num_put_bytes = 0  # owned by the engine thread from here on
        self._checkpoint_bytes = rotate_bytes or CHECKPOINT_BYTES
        self._next_checkpoint = self._checkpoint_bytes  # due when this many bytes were put
        self._num_lost = 0  # records lost since the last one that was queued
        self._queue: deque[Item | tuple[Snapshot, int, int]] = deque()
        self._has_ended = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def add(self, record: Input | Step) -> None:
        """Queue a record, or count it as lost if too much is queued. This never waits and never fails.

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

    @property
    def wants_checkpoint(self) -> bool:
        """Return whether enough was recorded since the last checkpoint to make another one due."""
        return self._num_put_bytes >= self._next_checkpoint and not self._has_ended

    def add_checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> None:
        """Queue a checkpoint; see Checkpoint. Only the engine thread calls this."""
        self._next_checkpoint = self._num_put_bytes + self._checkpoint_bytes
        self._queue.append((snapshot, num_steps, num_inputs))
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
                self._output.cut()  # so that the file ends with a complete record
            text = f"{error.strerror}; it ends after {self._output.size} bytes, the engine goes on without it"
            log.say(f"engine-core: the capture {self._output.path} stopped: {text}")
        except ConfigError as error:
            log.say(f"engine-core: the capture stopped: {error}; the engine goes on without it")
        finally:
            self._has_ended = True
            self._queue.clear()
            self._output.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._output.seconds_until_sync())
            self._closing.wait(BATCH_S)
            self._wake.clear()
            self._write_queued()
            if self._output.seconds_until_sync() == 0.0:
                self._output.sync()
        self._has_ended = True
        self._write_queued()
        if self._num_lost:
            self._output.write([self._num_lost])
        self._output.finish()

    def _write_queued(self) -> None:
        items: list[Item] = []
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, int):
                items.append(item)
            elif len(item) == 2:
                self._num_taken_bytes += len(item[1])
                items.append(item)
            else:
                self._output.write(items)
                items = [self._checkpoint(*item)]
        if items:
            self._output.write(items)

    def _checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> Item:
        """Return the record of a checkpoint. If files rotate, a new file is started for it."""
        state = snapshot.encode(lambda: time.sleep(PAUSE_S))
        if self._rotates:
            self._rotate()
        return TAGS[Checkpoint], encode_record(Checkpoint(num_steps, num_inputs, state))

    def _rotate(self) -> None:
        """Close this file and start the next one. Errors: OSError, ConfigError."""
        self._output.finish()
        path = f"{self._path}-{self._num_files + 1}"
        header = msgspec.structs.replace(self._header, wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns())
        output = CaptureOutput(path, open_capture(path), header)
        self._output.close()
        self._output = output
        self._files.append(path)
        self._num_files += 1
        while self._keep_files and len(self._files) > self._keep_files:
            with contextlib.suppress(OSError):  # it was moved away
                os.unlink(self._files[0])
            del self._files[0]
