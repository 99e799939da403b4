"""Frames of a log file: what is whole is read, a torn tail is left out, damage before it is an error."""

import struct

import pytest

from ipc.errors import CaptureFileError
from ipc.records.log_frames import MAX_PAYLOAD_BYTES, frame_of, pack_frame, put_frame, read_frame, read_frames

PAYLOADS = [b"header", b"", bytes(range(256)), b"\0" * 40, b"the end"]
FRAMES = [pack_frame(number, 1 + number, payload) for number, payload in enumerate(PAYLOADS)]
LOG = b"".join(FRAMES)
FIELDS = {"length": 0, "checksum": 4, "sequence": 8, "tag": 16, "payload": 17}


def payloads(data: bytes) -> list[bytes]:
    return [frame.payload for frame in read_frames(data)]


def start_of(number: int) -> int:
    return sum(map(len, FRAMES[:number]))


def flipped(at: int, bit: int) -> bytes:
    return LOG[:at] + bytes([LOG[at] ^ (1 << bit)]) + LOG[at + 1 :]


def test_the_layout() -> None:
    """Fixed for ever: u32 length, u32 CRC-32, u64 sequence, u8 tag, little-endian."""
    assert pack_frame(7, 3, b"abc") == struct.pack("<IIQB", 3, 0xD79D18DE, 7, 3) + b"abc"
    checked = struct.pack("<QB", 7, 3) + b"abc"
    assert frame_of(checked) == pack_frame(7, 3, b"abc")
    memory = bytearray(b"-" * 30)
    put_frame(memory, 5, 25, checked)
    assert memory == b"-----" + frame_of(checked) + b"-----"


def test_a_whole_log() -> None:
    frames = list(read_frames(LOG))
    assert [frame.payload for frame in frames] == PAYLOADS
    assert [frame.sequence for frame in frames] == list(range(5))
    assert [frame.tag for frame in frames] == [1, 2, 3, 4, 5]
    assert frames[-1].end == len(LOG)
    assert payloads(b"") == []


def test_a_tail_torn_at_any_byte_costs_no_whole_frame() -> None:
    for end in range(len(LOG)):
        whole = sum(start_of(number + 1) <= end for number in range(5))
        assert payloads(LOG[:end]) == PAYLOADS[:whole], end


@pytest.mark.parametrize("tail", [b"\0" * 100_000, b"\xff" * 1000, b"\0\0\0\0\1" * 1000, FRAMES[1]])
def test_what_is_no_frame_behind_the_last_one_is_a_tail(tail: bytes) -> None:
    """Zeros after a power failure; an older frame that was there before."""
    assert payloads(LOG + b"\1" + tail) == PAYLOADS


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_bit_flipped_before_the_end_is_damage(field: str, number: int) -> None:
    at = start_of(number) + FIELDS[field]
    for bit in range(8):
        found = []
        with pytest.raises(CaptureFileError, match=f"damaged at byte {start_of(number)}"):
            found.extend(read_frames(flipped(at, bit)))


@pytest.mark.parametrize("field", FIELDS)
def test_a_bit_flipped_in_the_last_frame_is_a_torn_tail(field: str) -> None:
    for bit in range(8):
        assert payloads(flipped(start_of(4) + FIELDS[field], bit)) == PAYLOADS[:4]


@pytest.mark.parametrize("length", [0xFFFFFFFF, MAX_PAYLOAD_BYTES + 1, 1000])
def test_a_hostile_length_is_no_frame(length: int) -> None:
    assert read_frame(struct.pack("<IIQB", length, 0, 0, 1) + b"x" * 100, 0) is None
