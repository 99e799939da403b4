"""Packed steps: most steps as the flight recorder takes them, their columns copied as they are.

A step takes a few microseconds of the engine thread so; msgpack and the digest take three times as long. Whoever reads
the ring makes Steps of them (unpack_steps), and no file has any. A step with more than a plain plan and plain tokens
(a request begins, drafts, copied blocks ...) is never packed.
"""

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from core.capture.records import NO_RESULT, TAGS, Step, decode_record, encode_record
from core.execution.plan import ModelRunnerOutput, SchedulerOutput, encode_plan
from ipc.arrays import Int32s
from ipc.log_frames import Frame

#: The tag of a packed step's frame in a ring. Another layout gets another tag.
PACKED_TAG = 255
DIGEST_BYTES = 8
#: What begins a packed step: Numbers, then the bytes of its columns: rows given up, rows and ids of appended blocks,
#: the batch, the counts, the tokens. The columns follow.
_HEAD = struct.Struct("<?5q5i6I")
_TIMES = struct.Struct("<3i")
_INT32 = np.dtype("<i4")


class Numbers(NamedTuple):
    """The numbers of a packed step, as in Step."""

    has_plan: bool
    now_ns: int
    elapsed_ns: int
    plan_step: int
    result_step: int
    num_preemptions: int
    num_waiting: int
    num_free_blocks: int
    scheduling_us: int  # all three are -1 where the call ran nothing
    model_us: int
    update_us: int


_NUM_NUMBERS = len(Numbers._fields)


def is_plain(plan: SchedulerOutput | None, result: ModelRunnerOutput | None) -> bool:
    """Return whether a step can be packed. plan: of the step, result: that came in it; None: there was none."""
    if result is not None and (
        result.counts is not None
        or result.candidates is not None
        or result.pooled is not None
        or result.draft_counts is not None
        or result.token_ids.dtype is not _INT32
    ):
        return False
    return plan is None or not (
        plan.added
        or plan.added_pooling
        or plan.adapters
        or plan.features
        or plan.num_draft_tokens.size
        or plan.copied_blocks.size
        or plan.swapped_out_blocks.size
        or plan.swapped_in_blocks.size
    )


def pack_step(numbers: tuple[int, ...], columns: tuple[bytes, bytes, bytes, bytes, bytes, bytes]) -> bytes:
    """Return the payload of a packed step. numbers: those of Numbers; columns: int32, in the order of the head."""
    removed, block_rows, block_ids, rows, counts, tokens = columns
    sizes = (len(removed), len(block_rows), len(block_ids), len(rows), len(counts), len(tokens))
    return b"".join((_HEAD.pack(*numbers, *sizes), *columns))


def unpack_steps(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield the frames of a ring's half, packed steps as Steps.

    Errors: CaptureFileError for a record that cannot be read.
    """
    rows = counts = b""  # of the last plan
    for frame in frames:
        if frame.tag == PACKED_TAG:
            step = _unpack(frame.payload, rows, counts)
            rows, counts = step.rows or rows, step.counts or counts
            yield frame._replace(tag=TAGS[Step], payload=encode_record(step))
            continue
        if frame.tag == TAGS[Step] and isinstance(step_of_file := decode_record(frame.tag, frame.payload), Step):
            rows, counts = step_of_file.rows or rows, step_of_file.counts or counts
        yield frame


def digest_of(encoded_plan: bytes) -> bytes:
    """Return Step.digest of an encoded plan."""
    return blake2b(encoded_plan, digest_size=DIGEST_BYTES).digest()


def _unpack(payload: bytes, last_rows: bytes, last_counts: bytes) -> Step:
    """Return the step of a payload, behind a plan with these rows and counts."""
    head = _HEAD.unpack_from(payload)
    numbers, at = Numbers(*head[:_NUM_NUMBERS]), _HEAD.size
    columns = []
    for size in head[_NUM_NUMBERS:]:
        columns.append(payload[at : at + size])
        at += size
    removed, block_rows, block_ids, rows, counts, tokens = columns
    plan = (removed, block_rows, block_ids, rows or last_rows, counts or last_counts)
    times = numbers[-3:]
    return Step(
        now_ns=numbers.now_ns,
        elapsed_ns=numbers.elapsed_ns,
        digest=_digest(numbers.plan_step, *map(_column, plan)) if numbers.has_plan else b"",
        rows=rows,
        counts=counts,
        removed_rows=removed,
        added=[],
        num_preemptions=numbers.num_preemptions,
        num_waiting=numbers.num_waiting,
        num_free_blocks=numbers.num_free_blocks,
        result_step=numbers.result_step,
        tokens=tokens if numbers.result_step != NO_RESULT else b"",
        times=b"" if times[0] < 0 else _TIMES.pack(*times),
    )


def _digest(step: int, removed: Int32s, block_rows: Int32s, block_ids: Int32s, rows: Int32s, counts: Int32s) -> bytes:
    return digest_of(encode_plan(SchedulerOutput(step, removed, [], block_rows, block_ids, rows, counts)))


def _column(data: bytes) -> Int32s:
    return np.frombuffer(data, _INT32)
