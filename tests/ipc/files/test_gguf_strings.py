"""Strings of a GGUF header that are found without decoding them: the same as those that are decoded one by one."""

import random
import struct
from typing import Any

import pytest

from ipc.files.gguf_strings import CutStringError, GgufStrings, find_strings, first_not_utf8


def packed(strings: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(one)) + one for one in strings)


def found(data: bytes, begin: int, count: int) -> GgufStrings:
    starts, end = find_strings(data, begin, count, len(data))
    return GgufStrings(data[begin:end], starts - begin)


@pytest.mark.parametrize(
    "make",
    [
        lambda draw, at: b"token %d" % at,
        lambda draw, at: b"x" * (at % 256),  # no, and the most bytes of a length of one byte
        lambda draw, at: b"y" * (300 if at % 97 == 0 else 3),
        lambda draw, at: bytes(draw.choices((0, 1, 97), k=draw.randrange(40))),  # what looks like lengths
        lambda draw, at: bytes(at % 23),
        lambda draw, at: b"",
        lambda draw, at: b"z" * 400,
    ],
)
def test_all_strings_are_found_where_they_are(make: object) -> None:
    assert callable(make)
    draw = random.Random(1)
    strings = [make(draw, at) for at in range(3000)]
    data = b"before" + packed(strings) + b"\x01" + bytes(40)
    starts, end = find_strings(data, 6, len(strings), len(data))
    assert end == 6 + sum(8 + len(one) for one in strings)
    assert [data[at + 8 : at + 8 + len(one)] for at, one in zip(starts.tolist(), strings, strict=True)] == strings
    assert list(found(data, 6, len(strings))) == [one.decode() for one in strings]


def test_more_than_one_window() -> None:
    strings = [b"%07d" % at * 30 for at in range(12_000)]
    assert list(found(packed(strings), 0, len(strings))) == [one.decode() for one in strings]


def test_one_string_and_some_of_them() -> None:
    strings = found(packed([b"a", b"", "ä".encode(), b"d"]), 0, 4)
    assert (len(strings), strings[2], strings[-1], strings[1:3]) == (4, "ä", "d", ["", "ä"])
    assert "d" in strings
    assert list(found(b"", 0, 0)) == []


@pytest.mark.parametrize("size", [255, 256, 70_000])
def test_a_string_that_is_cut_is_named(size: int) -> None:
    whole = packed([b"first", b"x" * size])
    for end in (len(whole) - 1, 13 + 8, 13 + 4, 13):
        with pytest.raises(CutStringError) as caught:
            find_strings(whole[:end], 0, 2, end)
        assert (caught.value.index, caught.value.position) == (1, 13)


@pytest.mark.parametrize("string", [b"", bytes(16), b"x" * 300])
def test_strings_that_look_like_others_cost_few_looks(string: bytes) -> None:
    looks = list[slice]()

    class Looked(bytes):
        def __getitem__(self, key: Any) -> Any:
            looks.extend([key] if isinstance(key, slice) else [])
            return super().__getitem__(key)

    data = Looked(packed([string] * 20_000))
    assert len(find_strings(data, 0, 20_000, len(data))[0]) == 20_000
    assert len(looks) <= 65


@pytest.mark.parametrize("bad", [b"\xff", b"ab\xc3", b"\xa4x"])
def test_strings_that_are_not_utf8_are_found(bad: bytes) -> None:
    strings = [b"good", "\xe4".encode(), bad, b"\xa4", b"last"]  # what begins in one string does not go on in the next
    data = packed(strings)
    starts, _ = find_strings(data, 0, len(strings), len(data))
    assert first_not_utf8(data, starts) == 2
    assert first_not_utf8(data[: starts[2]], starts[:2]) is None
