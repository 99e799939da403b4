"""CaptureFile: a capture opened for reading. Its frames are checked from the first to the last."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from core.capture.records import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MAGIC,
    TAGS,
    Checkpoint,
    Close,
    Gap,
    Header,
    Input,
    OtherModelError,
    Record,
    Step,
    decode_format,
    decode_record,
    scheduler_of,
)
from core.inputs import EngineInput
from ipc.errors import CaptureFileError, ModelFileError
from ipc.files.mapped_file import map_file
from ipc.options.schedulers import BUILT_IN_SCHEDULER
from ipc.records.log_frames import Frame, read_frame, read_frames


class Turn(NamedTuple):
    """One call of the step, as logged."""

    step_index: int  # counted from 0 at the engine's start
    offset: int  # of the Step's frame, in bytes
    inbox: list[tuple[int, EngineInput]]
    received_ns: list[int]  # when each message was received; 0: unknown
    step: Step

    @property
    def has_columns(self) -> bool:
        """Return whether the step's rows and counts are complete, as they are after every checkpoint, in any file."""
        return bool(self.step.rows and self.step.counts)


class Place(NamedTuple):
    """A checkpoint in a file."""

    frame: Frame
    num_steps: int  # steps before it since the engine's start


class CaptureFile:
    """A capture opened for reading. An incomplete end, left by a killed engine, is ignored and counted.

    scheduler_cls: the scheduler that may run its steps again, because a file chooses no code; None: any name, for a
    reader that runs none. Errors: OtherModelError if the capture was made with another one. CaptureFileError if the
    file cannot be opened, is damaged before its end, lacks records without a Gap, or has another major version of the
    format.
    """

    def __init__(self, path: str | os.PathLike[str], scheduler_cls: str | None = BUILT_IN_SCHEDULER) -> None:
        self.path = Path(path)
        self._data = _map(self.path)
        self.num_lost = 0  # records in gaps: the engine could not write them in time
        self.num_unknown = 0  # records of a later minor version of the format
        self.close: Close | None = None  # None: the engine was killed, is still running, or its disk was full
        self.checkpoints: list[Place] = []
        self._counts = dict.fromkeys(TAGS.values(), 0)
        self._last_step_end = 0  # in bytes; 0: there is no step
        end = 0
        try:
            for frame in read_frames(self._data):
                self._check_order(frame)
                self._check(frame)
                end = frame.end
                self._next = frame.sequence + 1
            if not end:
                raise CaptureFileError("not a capture of engine-core: it does not start with a complete record")
        except CaptureFileError as error:
            raise CaptureFileError(f"{self.path}: {error}") from None
        self.num_dropped_bytes = len(self._data) - end
        if scheduler_cls is not None and scheduler_cls != (captured := scheduler_of(self.header)):
            raise OtherModelError(
                f"{self.path}: it was captured with the scheduler {captured!r:.80}, and this is {scheduler_cls!r:.80}: "
                f"only `engine-core replay FILE --scheduler-cls {captured:.80}` runs its steps again"
            )

    @property
    def num_steps(self) -> int:
        """Return the number of steps in the file."""
        return self._counts[TAGS[Step]]

    @property
    def num_inputs(self) -> int:
        """Return the number of input messages in the file."""
        return self._counts[TAGS[Input]]

    @property
    def begins_inside(self) -> bool:
        """Return whether the file starts with a checkpoint of an engine that had already run."""
        return bool(self.checkpoints) and self.checkpoints[0].frame.sequence == 1

    @property
    def first_step(self) -> int:
        """Return the index of the file's first step, counted from the engine's start."""
        return self.checkpoints[0].num_steps if self.begins_inside else 0

    def last_checkpoint(self, step: int) -> Place | None:
        """Return the last checkpoint at or before a step, or None: then a replay starts with the engine."""
        return max((place for place in self.checkpoints if place.num_steps <= step), default=None, key=_num_steps)

    def checkpoint(self, place: Place) -> Checkpoint:
        """Return a checkpoint of this file. Errors: CaptureFileError."""
        frame = read_frame(self._data, place.frame.offset)
        assert frame is not None, place
        record = self._decode(frame)
        assert isinstance(record, Checkpoint), record
        return record

    def turns(self, start: Place | None = None) -> Iterator[Turn]:
        """Yield every step with the inputs drained before it. Inputs after the last step are left out.

        start: the checkpoint to start from; None = the beginning of the file. Errors: CaptureFileError for a record
        whose content does not match its tag.
        """
        inbox: list[tuple[int, EngineInput]] = []
        received_ns: list[int] = []
        index, offset = self.first_step, 0
        if start is not None:
            index, offset = start.num_steps, start.frame.offset
        for frame in read_frames(self._data, offset):
            if frame.tag == TAGS[Checkpoint]:
                continue
            record = self._decode(frame)
            if isinstance(record, Input):
                inbox.append((record.client, record.message))
                received_ns.append(record.received_ns)
            elif isinstance(record, Step):
                yield Turn(index, frame.offset, inbox, received_ns, record)
                inbox, received_ns, index = [], [], index + 1

    def last_inputs(self) -> list[Input]:
        """Return the messages after the last step. If the engine was killed, it was in the step with these messages.

        Errors: CaptureFileError.
        """
        records = [self._decode(frame) for frame in read_frames(self._data, self._last_step_end)]
        return [record for record in records if isinstance(record, Input)]

    def _decode(self, frame: Frame) -> Record | None:
        try:
            return decode_record(frame.tag, frame.payload)
        except CaptureFileError as error:
            text = f"{self.path}: {_place(frame)}: {error}"
            if self.header.minor > FORMAT_MINOR:
                text = (
                    f"{self.path}: a capture of format {FORMAT_MAJOR}.{self.header.minor}, but this version supports "
                    f"{FORMAT_MAJOR}.{FORMAT_MINOR}: use the release of engine-core that wrote it ({error})"
                )
            raise CaptureFileError(text) from None

    def _check_order(self, frame: Frame) -> None:
        if frame.offset == 0:
            self.header = _read_header(frame)
            self._next = 0
        elif self.close is not None:
            raise CaptureFileError(f"{_place(frame)}: there are records after the last one")
        if frame.tag == TAGS[Gap]:
            gap = decode_record(frame.tag, frame.payload)
            if isinstance(gap, Gap) and gap.first == self._next and gap.count > 0:
                self.num_lost += gap.count
                self._next += gap.count
        if frame.sequence != self._next:
            raise CaptureFileError(
                f"{_place(frame)}: records are missing: expected sequence {self._next}, and there is no gap record"
            )

    def _check(self, frame: Frame) -> None:
        if frame.tag not in self._counts:
            self.num_unknown += 1
            return
        self._counts[frame.tag] += 1
        if frame.tag == TAGS[Step]:
            self._last_step_end = frame.end
        if frame.tag == TAGS[Checkpoint]:
            record = decode_record(frame.tag, frame.payload)
            assert isinstance(record, Checkpoint), record
            self.checkpoints.append(Place(frame._replace(payload=b""), record.num_steps))
        if frame.tag == TAGS[Header] and frame.offset:
            raise CaptureFileError(f"{_place(frame)}: a second header")
        if frame.tag == TAGS[Close]:
            close = decode_record(frame.tag, frame.payload)
            assert isinstance(close, Close), close
            found = Close(self.num_inputs, self.num_steps, self.num_lost)
            if close != found:
                raise CaptureFileError(f"{_place(frame)}: the totals are {close}, the records before give {found}")
            self.close = close


def _map(path: Path) -> mmap.mmap:
    try:
        return map_file(path)
    except ModelFileError as error:  # missing, empty, or not a regular file
        raise CaptureFileError(str(error)) from None


def _read_header(frame: Frame) -> Header:
    """Return the header after checking the format, because another format may have another header."""
    head = decode_format(frame.payload)
    if frame.tag != TAGS[Header] or head.magic != MAGIC:
        raise CaptureFileError("not a capture of engine-core: it does not start with a header")
    if head.major != FORMAT_MAJOR:
        raise CaptureFileError(
            f"a capture of format {head.major}.{head.minor}; this version reads format {FORMAT_MAJOR}: "
            f"use the release of engine-core that wrote it"
        )
    header = decode_record(frame.tag, frame.payload)
    assert isinstance(header, Header), header
    return header


def _num_steps(place: Place) -> int:
    return place.num_steps


def _place(frame: Frame) -> str:
    return f"byte {frame.offset}, sequence {frame.sequence}"
