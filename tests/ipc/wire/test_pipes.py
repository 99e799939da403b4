"""Frames on a pipe: however the bytes are cut, whole messages come out; foreign bytes are refused."""

import os

import pytest

from ipc.errors import MalformedMessageError
from ipc.options.config import EngineConfig
from ipc.wire.messages import encode
from ipc.wire.pipes import FrameReader, decode_owner_message, decode_start_report, write_frame
from ipc.wire.start_messages import Drain, Ready, Start, StartPhase


def test_messages_come_out_whole_however_they_are_cut() -> None:
    messages = [Start(EngineConfig(executor="fake", threads=3), "ipc:///x", 2), Drain()]
    reader, writer = os.pipe()
    for message in messages:
        write_frame(writer, message)
    os.close(writer)
    with open(reader, "rb") as file:
        data = file.read()
    for size in (1, 3, 5, len(data)):
        frames = FrameReader()
        parts = [frames.feed(data[at : at + size]) for at in range(0, len(data), size)]
        assert [decode_owner_message(frame) for part in parts for frame in part] == messages


def test_reports() -> None:
    for report in (StartPhase("listen", 0.5), Ready("tcp://127.0.0.1:5", 1.5)):
        assert decode_start_report(encode(report)) == report


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(MalformedMessageError, match="a frame of 1953853284 bytes"):
        FrameReader().feed((1953853284).to_bytes(4, "little"))
    for data in (b"", b"\xc1", encode(Drain()), b"\x91" * 10_000):
        with pytest.raises(MalformedMessageError, match="not a start report"):
            decode_start_report(data)
    with pytest.raises(MalformedMessageError, match="not a message of an engine's owner"):
        decode_owner_message(encode(Ready("x", 1.0)))
