"""The wire of each released protocol version, as stored bytes: a later version reads them all.

A change of these bytes is a change of the protocol. To add a version: write its samples with
`python -m tests.ipc.test_golden_frames`, and keep the older files.
"""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from core.engine import HANDLERS
from ipc.wire.messages import (
    CALLS,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    decode_client_message,
    decode_server_message,
    encode,
)
from tests.ipc.wire.test_messages import CLIENT_MESSAGES, SERVER_MESSAGES

FOLDER = Path(__file__).resolve().parent.parent / "data"
NAME = f"frames_{PROTOCOL_MAJOR}_{PROTOCOL_MINOR}.json"


def stored(path: Path) -> dict[str, list[list[str]]]:
    """direction -> [message name, hex of the frame]."""
    frames: dict[str, list[list[str]]] = json.loads(path.read_text())
    return frames


def samples() -> dict[str, list[list[str]]]:
    return {
        direction: [[type(message).__name__, encode(message).hex()] for message in messages]
        for direction, messages in (("client", CLIENT_MESSAGES), ("server", SERVER_MESSAGES))
    }


def test_this_versions_frames_are_the_stored_ones() -> None:
    assert samples() == stored(FOLDER / NAME)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("frames_*.json")), ids=lambda path: path.stem)
def test_stored_frames_are_understood(path: Path) -> None:
    frames = stored(path)
    for direction, decode in (("client", decode_client_message), ("server", decode_server_message)):
        assert len(frames[direction]) >= 7
        for name, text in frames[direction]:
            assert type(decode(bytes.fromhex(text))).__name__ == name


@pytest.mark.parametrize("direction", ["client", "server"])
def test_a_later_minors_fields_are_ignored(direction: str) -> None:
    decode: Callable[[bytes], object] = decode_client_message if direction == "client" else decode_server_message
    for name, text in stored(FOLDER / NAME)[direction]:
        fields = msgspec.msgpack.decode(bytes.fromhex(text))
        later = msgspec.msgpack.encode([*fields, "of a later minor", {"x": [1]}])
        assert type(decode(later)).__name__ == name


def test_the_table_of_calls_is_whole() -> None:
    client = {type(message) for message in CLIENT_MESSAGES if "call" in type(message).__struct_fields__}
    assert client == CALLS.keys()
    assert {rule.answer for rule in CALLS.values()} <= {type(message) for message in SERVER_MESSAGES}
    assert {kind for kind, rule in CALLS.items() if not rule.is_at_border} == HANDLERS.keys()


@pytest.mark.checkout  # docs/
def test_the_document_names_every_message_and_field() -> None:
    """docs/protocol.md is what a client in another language is written from."""
    text = (FOLDER.parents[1] / "docs" / "protocol.md").read_text()
    for message in (*CLIENT_MESSAGES, *SERVER_MESSAGES):
        kind = type(message)
        assert f"**{kind.__name__}** `{kind.__struct_config__.tag}`" in text, kind
        missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in text]
        assert not missing, (kind, missing)
    assert f"version {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}" in text


if __name__ == "__main__":
    (FOLDER / NAME).write_text(json.dumps(samples(), indent=1) + "\n")
