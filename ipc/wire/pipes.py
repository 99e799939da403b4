"""Frames on the two pipes between an engine process and its owner: a uint32 length, little-endian, and a message."""

import os
import struct

import msgspec

from ipc.errors import MalformedMessageError
from ipc.wire.messages import DECODE_ERRORS, encode
from ipc.wire.start_messages import OwnerMessage, StartReport

MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_owner_decoder: msgspec.msgpack.Decoder[OwnerMessage] = msgspec.msgpack.Decoder(OwnerMessage)
_report_decoder: msgspec.msgpack.Decoder[StartReport] = msgspec.msgpack.Decoder(StartReport)


def write_frame(fd: int, message: msgspec.Struct) -> None:
    """Write one whole message. Errors: BrokenPipeError when the reader is gone."""
    payload = encode(message)
    assert len(payload) <= MAX_FRAME_BYTES, len(payload)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


class FrameReader:
    """A buffer for the bytes read from a pipe, which splits them into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that `data` completes.

        Errors: MalformedMessageError for a length beyond MAX_FRAME_BYTES.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise MalformedMessageError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return frames


def decode_owner_message(frame: bytes) -> OwnerMessage:
    """Return the owner's message. Errors: MalformedMessageError, or ConfigError for a config with a bad value."""
    try:
        return _owner_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a message of an engine's owner: {error}") from error


def decode_start_report(frame: bytes) -> StartReport:
    """Return the child's report. Errors: MalformedMessageError."""
    try:
        return _report_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a start report: {error}") from error
