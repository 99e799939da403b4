"""Frames of a log file. A checksum and a sequence number in each frame distinguish a torn tail from damage.

Frame, little-endian: u32 payload length, u32 CRC-32 of all that follows it, u64 sequence, u8 tag (1 to 255), payload.
"""

import mmap
import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from ipc.errors import CaptureFileError

MAX_PAYLOAD_BYTES = 64 << 20
_HEAD = struct.Struct("<IIQB")
_CHECKED = struct.Struct("<QB")  # the part of the head that the checksum covers
_UNCHECKED = struct.Struct("<II")  # the part before it
_CHECKED_AT = _HEAD.size - _CHECKED.size
UNCHECKED_BYTES = _UNCHECKED.size  # of a frame, before what its checksum covers
#: The end of a frame's head with a sequence below 2**32: the sequence's upper half and the tag.
_HEAD_END = re.compile(rb"\0\0\0\0[^\0]")

Data: TypeAlias = bytes | mmap.mmap


class Frame(NamedTuple):
    """One frame and its place in the file."""

    offset: int  # bytes from the beginning of the file
    sequence: int
    tag: int
    payload: bytes

    @property
    def end(self) -> int:
        """Return the offset in bytes just after the frame."""
        return self.offset + _HEAD.size + len(self.payload)


def pack_frame(sequence: int, tag: int, payload: bytes) -> bytes:
    """Return the bytes of a frame."""
    assert len(payload) <= MAX_PAYLOAD_BYTES, len(payload)
    checked = _CHECKED.pack(sequence, tag)
    checksum = zlib.crc32(payload, zlib.crc32(checked))
    return _HEAD.pack(len(payload), checksum, sequence, tag) + payload


def frame_of(checked: bytes) -> bytes:
    """Return the frame with these bytes as sequence, tag and payload (the part that its checksum covers)."""
    return _UNCHECKED.pack(len(checked) - _CHECKED.size, zlib.crc32(checked)) + checked


def put_frame(memory: Any, begin: int, end: int, checked: bytes) -> None:
    """Write frame_of(checked) into [begin, end) of writable memory, which are its bytes."""
    memory[begin + UNCHECKED_BYTES : end] = checked
    _UNCHECKED.pack_into(memory, begin, end - begin - _HEAD.size, zlib.crc32(checked))


def read_frame(data: Data, offset: int) -> Frame | None:
    """Return the frame at this offset; None if there is no complete and valid one."""
    begin = offset + _HEAD.size
    if begin > len(data):
        return None
    length, checksum, sequence, tag = _HEAD.unpack(data[offset:begin])
    if length > min(MAX_PAYLOAD_BYTES, len(data) - begin) or tag == 0:
        return None
    payload = data[begin : begin + length]
    if zlib.crc32(payload, zlib.crc32(data[offset + _CHECKED_AT : begin])) != checksum:
        return None
    return Frame(offset, sequence, tag, payload)


def read_frames(data: Data, offset: int = 0) -> Iterator[Frame]:
    """Yield the frames from `offset`, up to a torn tail: a rest of the data without a valid frame.

    Errors: CaptureFileError if a valid frame follows an invalid one: damage in the middle.
    """
    sequence = -1
    while (frame := read_frame(data, offset)) is not None:
        yield frame
        offset, sequence = frame.end, frame.sequence
    if (later := _find_frame(data, offset, sequence)) is not None:
        raise CaptureFileError(
            f"damaged at byte {offset}: the record after sequence {sequence} is not complete, and valid records "
            f"follow from byte {later.offset} (sequence {later.sequence})"
        )


def _find_frame(data: Data, offset: int, sequence: int) -> Frame | None:
    """Return the first valid frame after `offset` with a greater sequence."""
    for match in _HEAD_END.finditer(data, offset):
        begin = match.end() - _HEAD.size
        if begin > offset and (frame := read_frame(data, begin)) is not None and frame.sequence > sequence:
            return frame
    return None
