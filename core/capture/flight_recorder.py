"""FlightRecorder: the engine's last records in shared memory (ipc/records/flight_ring.py), where its owner finds them.

The engine thread writes each record at once, so the ring has everything except the step in which the engine died. When
a half is three quarters full, or old enough, a checkpoint is due. While a separate thread encodes it into the other
half, records still go into the first half and are also kept. Then they are added to the other half, which takes over.
"""

import contextlib
import mmap
import queue
import threading
import time
from typing import Any

import msgspec

from core import log
from core.capture.records import TAGS, Checkpoint, Header, Input, Step, encode_record
from core.capture.snapshot import Snapshot
from ipc.records.flight_ring import HALF, HALVES_AT, numbers_of, ring_half_bytes
from ipc.records.log_frames import MAX_PAYLOAD_BYTES, UNCHECKED_BYTES, frame_of, pack_frame, put_frame

PAUSE_S = 0.0005  # pause that gives the GIL to the engine thread while a checkpoint is encoded
_COPY_BYTES = 1 << 18  # bytes copied without a pause
_SETTLE_S = 1.0  # after this time the ring gets its pages; an engine that ends sooner does not need them
_PAGES_BYTES = 1 << 16  # bytes of pages allocated without a pause
_POPULATE_WRITE = 23  # for madvise(2), since Linux 5.14
_NS = 1_000_000_000
_LEAST_NS = _NS // 4  # minimum time between two checkpoints


class FlightRecorder:
    """Writes one ring; a CaptureLog (core/capture/engine.py).

    fd: of the ring. header: of the capture. seconds: age at which a half is old. Everything except the thread's work is
    done by the engine thread.
    """

    def __init__(self, fd: int, header: Header, seconds: int) -> None:
        memory = mmap.mmap(fd, 0)
        self._half_bytes = ring_half_bytes(memory)
        self._memory: Any = memory  # accepts frames, which its type does not express
        self._header = header
        self._period_ns = seconds * _NS
        self._now_ns = self._due_ns = self._least_ns = 0  # clock values of steps; 0: before the first one
        # of the half being written: its index, its start, and the place of its numbers
        self._half, self._at, self._numbers = 0, 0, numbers_of(0)
        self._used = self._due_bytes = 0  # of that half: bytes used, and bytes at which a checkpoint is due
        self._generation = 1
        self.sequence = 0  # of the last record
        self._is_full = False  # a record did not fit
        self.wants_checkpoint = False  # the other half must be started
        self._kept: list[bytes] | None = None  # frames since the checkpoint being encoded; None: there is none
        self._num_kept_bytes = 0
        self._ready = -1  # bytes of the other half once its checkpoint is there; 0: it did not fit. Set by the thread
        self._has_said = False  # that a checkpoint did not fit
        self._begin(0, self._write_head(0, 0, b""))
        self._queue: queue.SimpleQueue[tuple[Snapshot, int, int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flight recorder", daemon=True)
        self._thread.start()

    def add(self, record: Input | Step) -> None:
        """Write the next record. Only the engine thread calls this."""
        self.sequence += 1
        self._add(pack_frame(self.sequence, TAGS[type(record)], encode_record(record)))
        if type(record) is Step:
            self._end_step(record.now_ns)

    def add_packed(self, now_ns: int, checked: bytes) -> None:
        """Write the next record, a packed step. Only the engine thread calls this.

        This runs in every step, after the step has filled the caches, so it is a single function.
        """
        self.sequence += 1
        begin, used = self._at + self._used, self._used + UNCHECKED_BYTES + len(checked)
        if self._kept is not None or used > self._half_bytes or self._is_full:
            self._add(frame_of(checked))
        else:
            put_frame(self._memory, begin, self._at + used, checked)
            self._used = used
            self._memory[self._numbers] = HALF.pack(self._generation, used)
        self._now_ns = now_ns
        if self._used > self._due_bytes or now_ns > self._due_ns:
            self._end_step(now_ns)

    def add_checkpoint(self, snapshot: Snapshot, num_steps: int, num_inputs: int) -> None:
        """Start the other half with this state; see Checkpoint. Only the engine thread calls this."""
        self._kept, self._num_kept_bytes = [], 0
        self.wants_checkpoint = False
        self._least_ns = self._now_ns + _LEAST_NS
        self._queue.put((snapshot, num_steps, num_inputs, self.sequence))

    def close(self) -> None:
        """Stop the thread. Any thread may call this, repeatedly."""
        self._queue.put(None)

    # --- the engine thread ---

    def _end_step(self, now_ns: int) -> None:
        """Record a step with this clock value, and decide whether the other half must be started."""
        self._now_ns = now_ns
        self._due_ns = due_ns = self._due_ns or now_ns + self._period_ns
        if self._used > self._due_bytes or now_ns > due_ns:
            self.wants_checkpoint = self._kept is None and now_ns >= self._least_ns

    def _add(self, frame: bytes) -> None:
        if self._kept is not None:
            self._keep(frame)
        self._write(frame)

    def _write(self, frame: bytes) -> None:
        begin, used = self._at + self._used, self._used + len(frame)
        if self._is_full or used > self._half_bytes:
            self._is_full = True  # what follows a missing record is useless
            return
        self._memory[begin : begin + len(frame)] = frame
        self._used = used
        self._memory[self._numbers] = HALF.pack(self._generation, used)

    def _keep(self, frame: bytes) -> None:
        """Keep a frame for the other half, which takes over once it has its checkpoint."""
        kept = self._kept
        assert kept is not None, "no checkpoint is being encoded"
        if (size := self._ready) < 0:
            self._num_kept_bytes += len(frame)
            if self._num_kept_bytes <= self._half_bytes:
                kept.append(frame)
            return
        self._ready, self._kept = -1, None
        if not size or size + self._num_kept_bytes > self._half_bytes:
            self._miss()
            return
        data = b"".join(kept)
        other = self._half ^ 1
        begin = HALVES_AT + other * self._half_bytes + size
        self._memory[begin : begin + len(data)] = data
        self._generation += 1
        self._begin(other, size + len(data))

    def _miss(self) -> None:
        """Continue without the other half, because its checkpoint or the records since then do not fit."""
        self._due_ns = self._least_ns = self._now_ns + self._period_ns
        if not self._has_said:
            self._has_said = True
            log.say(
                "engine-core: the engine's state does not fit in the flight recorder, whose file may end before the "
                f"engine does: raise flight_recorder_bytes={2 * self._half_bytes}"
            )

    def _begin(self, half: int, used: int) -> None:
        """Switch to a half that already has `used` bytes."""
        self._half, self._used, self._is_full = half, used, False
        self.wants_checkpoint = False
        self._at, self._numbers = HALVES_AT + half * self._half_bytes, numbers_of(half)
        self._due_ns = self._now_ns and self._now_ns + self._period_ns
        self._least_ns = self._now_ns + _LEAST_NS
        self._due_bytes = max(self._half_bytes * 3 // 4, (self._half_bytes + used) // 2)
        self._memory[self._numbers] = HALF.pack(self._generation, used)

    # --- the thread ---

    def _run(self) -> None:
        settle_s: float | None = _SETTLE_S
        while True:
            try:
                item = self._queue.get(timeout=settle_s)
            except queue.Empty:
                settle_s = None
                self.populate()
                continue
            if item is None:
                return
            snapshot, num_steps, num_inputs, sequence = item
            state = snapshot.encode(_pause)
            checkpoint = encode_record(Checkpoint(num_steps, num_inputs, state))
            item = None
            del snapshot, state
            self._ready = self._write_head(self._half ^ 1, sequence, checkpoint)

    def populate(self) -> None:
        """Allocate the ring's pages now, because a step that first writes to a page takes tens of microseconds longer.

        The recorder's thread does this. A kernel before Linux 5.14 allocates each page when it is first written to.
        """
        with contextlib.suppress(OSError):
            for at in range(0, len(self._memory), _PAGES_BYTES):
                self._memory.madvise(_POPULATE_WRITE, at, min(_PAGES_BYTES, len(self._memory) - at))
                _pause()

    def _write_head(self, half: int, sequence: int, checkpoint: bytes) -> int:
        """Write the header and a checkpoint. Return the bytes of both; 0 if they take over three quarters of the half.

        sequence: of the last record before the checkpoint, which uses the same number.
        """
        self._memory[numbers_of(half)] = HALF.pack(0, 0)
        clocks = {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        header = msgspec.structs.replace(self._header, **clocks)
        data = pack_frame(0, TAGS[Header], encode_record(header))
        size = len(data) + len(checkpoint)
        if size > min(self._half_bytes * 3 // 4, MAX_PAYLOAD_BYTES):
            return 0
        if checkpoint:
            data += pack_frame(sequence, TAGS[Checkpoint], checkpoint)
        begin = HALVES_AT + half * self._half_bytes
        for at in range(0, len(data), _COPY_BYTES):
            part = data[at : at + _COPY_BYTES]
            self._memory[begin + at : begin + at + len(part)] = part
            if checkpoint:
                _pause()
        return len(data)


def _pause() -> None:
    time.sleep(PAUSE_S)
