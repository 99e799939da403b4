"""Packed steps: the form in which the flight recorder stores most steps, with their columns copied unchanged.

Storing a step like this takes the engine thread a few microseconds; msgpack and the digest take three times as long.
Readers of the ring turn them into Steps (unpack_steps); no file contains packed steps. A step with more than a plain
plan and plain tokens (a request starts, drafts, copied blocks ...) is never packed.
"""

import struct
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from core.capture.records import NO_RESULT, TAGS, Step, decode_record, encode_record
from core.execution.plan import ModelRunnerOutput, SchedulerOutput, encode_plan
from ipc.records.log_frames import Frame
from ipc.tables.arrays import Int32s

#: The tag of a packed step's frame in a ring. Any other layout must get another tag.
PACKED_TAG = 255
DIGEST_BYTES = 8
#: The start of a packed step: Numbers, then the bytes of each column. The columns (int32) follow: removed rows, rows
#: and ids of appended blocks, the batch, the counts and the tokens.
_HEAD = struct.Struct("<8q2i6I")
_FRAME_HEAD = struct.Struct("<QB8q2i6I")  # preceded by the frame's sequence and tag
_TIMES = struct.Struct("<3i")
_INT32 = np.dtype("<i4")


class Numbers(NamedTuple):
    """The numbers of a packed step. Those in ns are on the monotonic clock, except now_ns."""

    now_ns: int  # the step's clock value
    begin_ns: int
    planned_ns: int  # when the plan was made; 0: there was none
    result_ns: int  # when a result was available; 0: there was none
    end_ns: int
    plan_step: int  # NO_RESULT: there is no plan
    result_step: int
    num_preemptions: int
    num_waiting: int
    num_free_blocks: int


_NUM_NUMBERS = len(Numbers._fields)


def is_plain(plan: SchedulerOutput | None, result: ModelRunnerOutput | None) -> bool:
    """Return whether a step can be packed. plan, result: the step's; None: there was none."""
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
        or plan.copied_states.size
        or plan.swapped_out_blocks.size
        or plan.swapped_in_blocks.size
        or plan.others
        or plan.saved_rows.size
        or plan.scheduled_encoder_inputs
        or plan.freed_encoder_inputs
        or plan.image_parts
    )


#: Returns the bytes before the columns: the frame's sequence, PACKED_TAG, Numbers, and the bytes of each column. A
#: frame's checksum covers these and the columns, joined.
pack_head = _FRAME_HEAD.pack


def unpack_steps(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Yield the frames of one half of a ring, with packed steps turned into Steps.

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


def step_times(begin_ns: int, planned_ns: int, result_ns: int, end_ns: int) -> bytes:
    """Return Step.times of a call. planned_ns, result_ns: as in Numbers."""
    if not (planned_ns or result_ns):
        return b""
    planned = planned_ns or begin_ns  # there was a result, and nothing new to run
    result = result_ns or end_ns  # the result comes with a later call
    return _TIMES.pack((planned - begin_ns) // 1000, (result - planned) // 1000, (end_ns - result) // 1000)


def digest_of(encoded_plan: bytes) -> bytes:
    """Return Step.digest of an encoded plan."""
    return blake2b(encoded_plan, digest_size=DIGEST_BYTES).digest()


def _unpack(payload: bytes, last_rows: bytes, last_counts: bytes) -> Step:
    """Return the step in a payload that follows a plan with these rows and counts."""
    head = _HEAD.unpack_from(payload)
    numbers, at = Numbers(*head[:_NUM_NUMBERS]), _HEAD.size
    columns = []
    for size in head[_NUM_NUMBERS:]:
        columns.append(payload[at : at + size])
        at += size
    removed, block_rows, block_ids, rows, counts, tokens = columns
    plan = (removed, block_rows, block_ids, rows or last_rows, counts or last_counts)
    return Step(
        now_ns=numbers.now_ns,
        elapsed_ns=numbers.end_ns - numbers.begin_ns,
        digest=_digest(numbers.plan_step, *map(_column, plan)) if numbers.plan_step != NO_RESULT else b"",
        rows=rows,
        counts=counts,
        removed_rows=removed,
        added=[],
        num_preemptions=numbers.num_preemptions,
        num_waiting=numbers.num_waiting,
        num_free_blocks=numbers.num_free_blocks,
        result_step=numbers.result_step,
        tokens=tokens,
        times=step_times(numbers.begin_ns, numbers.planned_ns, numbers.result_ns, numbers.end_ns),
    )


def _digest(step: int, removed: Int32s, block_rows: Int32s, block_ids: Int32s, rows: Int32s, counts: Int32s) -> bytes:
    return digest_of(encode_plan(SchedulerOutput(step, removed, [], block_rows, block_ids, rows, counts)))


def _column(data: bytes) -> Int32s:
    return np.frombuffer(data, _INT32)
