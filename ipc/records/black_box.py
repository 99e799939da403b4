"""The black box: a page of shared memory with the engine's current step, which survives the engine's death.

The engine process writes (core/process/black_box.py); its supervisor, health checks and `top` read it without asking
the engine, also while it hangs and after it has died. The engine's owner makes the page, which survives restarts. All
numbers are little-endian int64 unless stated otherwise; times are ns of the machine's monotonic clock.
"""

import contextlib
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ipc.machine.memory_files import find_memory_files, make_memory_file
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.wire.feature_messages import FeatureUse, without_ids

DIGEST_BYTES = 16
NUM_SIZES = 32  # classes of steps by their tokens: 1, 2-3, 4-7, ...
NAME = "engine-core-black-box"  # of the memory file, as shown in /proc/PID/fd

_encoder = msgspec.msgpack.Encoder()


def request_digest(
    prompt_token_ids: bytes, params: SamplingParams | PoolingParams, features: Sequence[FeatureUse] = ()
) -> bytes:
    """Return the digest that identifies requests that kill an engine: of the prompt (int32) and its options.

    Requests that differ only in their seeds count as one, unless the caller gave the seeds. features: they count by
    their content; the ids in their place in the prompt do not matter.
    """
    if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:  # of the first choice only
        params = params.changed(prompt_logprobs=None)
    if features:
        prompt_token_ids = without_ids(prompt_token_ids, features) + b"".join(use.digest for use in features)
    return blake2b(prompt_token_ids + _encoder.encode(params), digest_size=DIGEST_BYTES).digest()


class Reading(NamedTuple):
    """The page's content at one time. Each number is right by itself, but they may be from two different times."""

    epoch: int  # -1 = no engine has written yet
    pid: int
    num_begun: int  # steps
    begun_ns: int  # of the last step that began
    expected_ns: int  # the slowest recent step of its size; 0 = none is known
    num_running: int  # requests in it
    num_tokens: int  # of it
    num_running_before: int  # in the step before it
    num_tokens_before: int
    stored: int  # position and age of the step's columns: 2 * (steps since they were written) + slot
    stored_before: int  # of the step before it
    num_ended: int  # steps
    num_turns: int  # of the engine's loop, which turns at least every 5 s
    turned_ns: int  # end of the last turn
    num_waiting: int  # requests

    @property
    def is_in_step(self) -> bool:
        """Return whether a step has begun that has not ended."""
        return self.num_begun > self.num_ended


NO_READING = Reading(-1, *(0,) * 14)

#: The header: a Reading. Its writer copies each of its three parts from bytes that are ready, the first part last. The
#: epoch is stored + 1.
HEADER = struct.Struct("<15q")
PROCESS, BEGUN, TURNED = (struct.Struct(f"<{size}q") for size in (2, 9, 4))
BEGUN_AT = PROCESS.size
TURNED_AT = BEGUN_AT + BEGUN.size


class Suspect(NamedTuple):
    """A row of a step: its request, and the positions that the step computed."""

    digest: bytes
    start: int
    end: int


class Page:
    """The page's parts as arrays, over a memory file of size_of(num_rows) bytes."""

    def __init__(self, memory: mmap.mmap, num_rows: int) -> None:
        self.memory = memory
        self.offsets: list[int] = []  # of the parts below, in bytes
        at = HEADER.size

        def take(dtype: str, *shape: int) -> NDArray[np.generic]:
            nonlocal at
            self.offsets.append(at)
            part = np.frombuffer(memory, dtype, int(np.prod(shape)), at).reshape(shape)
            at += part.nbytes
            return part

        self.slowest_ns = take("<i8", 2, NUM_SIZES)  # by size of steps: in this window of steps, and in the last one
        #: Two slots for the columns of the last two plans. A plan with the same rows as the one before, and one token
        #: of each row in both, stores nothing: its columns are the earlier ones, with one token more for each row.
        #: By row: tokens computed after the plan has run.
        self.ends = take("<i8", 2, num_rows)
        self.rows = take("<i4", 2, num_rows)  # of the plan
        self.counts = take(
            "<i4", 2, num_rows
        )  # of the plan: tokens that it computes of each row; not set if it is one for each
        self.digests = take("u1", num_rows, DIGEST_BYTES)  # by row


_ROW_BYTES = 16 + 8 + 8 + DIGEST_BYTES


def size_of(num_rows: int) -> int:
    """Return the bytes of a page with this many rows."""
    return HEADER.size + 16 * NUM_SIZES + num_rows * _ROW_BYTES


def rows_of(fd: int) -> int:
    """Return the rows of the page in a memory file; 0 if the file has no page's size, like one of another version."""
    num_rows, rest = divmod(os.fstat(fd).st_size - size_of(0), _ROW_BYTES)
    return 0 if rest else max(0, num_rows)


class BlackBoxReader:
    """Read an engine's black box. fd: of the memory file (not closed here).

    Reading costs a few microseconds and never waits for the engine. Errors: ValueError if the file has no page's size.
    """

    def __init__(self, fd: int) -> None:
        num_rows = rows_of(fd)
        if not num_rows:
            raise ValueError(f"a file of {os.fstat(fd).st_size} bytes is no black box of this version")
        self._page = Page(mmap.mmap(fd, size_of(num_rows), prot=mmap.PROT_READ), num_rows)

    def read(self) -> Reading:
        """Return the present numbers."""
        epoch, *numbers = HEADER.unpack(self._page.memory[: HEADER.size])
        return Reading(epoch - 1, *numbers) if epoch else NO_READING

    def suspects(self) -> list[Suspect]:
        """Return the rows of the steps that have begun and not ended; each request once, with its widest range."""
        return self._rows(is_in_flight=True)

    def last_rows(self) -> list[Suspect]:
        """Return the rows of the last step that has begun."""
        return self._rows(is_in_flight=False)

    def _rows(self, *, is_in_flight: bool) -> list[Suspect]:
        reading = self.read()
        before = (reading.num_begun - 1, reading.num_running_before, reading.num_tokens_before, reading.stored_before)
        steps = [before, (reading.num_begun, reading.num_running, reading.num_tokens, reading.stored)]
        first = reading.num_ended + 1 if is_in_flight else max(1, reading.num_begun)
        found = dict[bytes, Suspect]()
        for step, size, num_tokens, stored in steps:
            if step < first:
                continue
            age, slot = divmod(stored, 2)
            rows = self._page.rows[slot, :size].tolist()
            counts = [1] * size if num_tokens == size else self._page.counts[slot, :size].tolist()
            for row, count in zip(rows, counts, strict=True):
                digest, end = self._page.digests[row].tobytes(), int(self._page.ends[slot, row]) + age
                known = found.get(digest, Suspect(digest, end - count, end))
                found[digest] = Suspect(digest, min(known.start, end - count), max(known.end, end))
        return list(found.values())


def find_black_box(pid: int) -> BlackBoxReader | None:
    """Return a reader of the black box of an engine on this machine; None if this user may not read it.

    pid: the engine process's, as Welcome has it.
    """
    for fd in find_memory_files(pid, NAME):
        with contextlib.suppress(OSError, ValueError):
            reader = BlackBoxReader(fd)
            if reader.read().pid == pid:
                return reader
    return None


class BlackBoxFile:
    """A new page in memory, for the owner of an engine. It is freed once this object and all mappings are gone.

    num_rows: at least those of the engine.
    """

    def __init__(self, num_rows: int) -> None:
        self.fd = make_memory_file(NAME, size_of(num_rows))
        weakref.finalize(self, os.close, self.fd)
        self.reader = BlackBoxReader(self.fd)
