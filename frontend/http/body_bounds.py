"""How many values a body of JSON has, before it is decoded in one piece that holds Python's lock."""

import re

#: The start of a JSON value or field; a string is skipped as a whole.
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{:,]', re.DOTALL)
_LOOKED_AT = 1 << 18  # bytes, between two checks of the counts
_COMMA, _QUOTE = b',"'


def is_small(body: bytes, most_fields: int, most_values: int) -> bool:
    """Return whether a body has at most this many values; False if only has_few_values() can tell.

    It counts starts of values, also inside strings.
    """
    num_fields = num_values = 0
    for at in range(0, len(body), _LOOKED_AT):
        end = at + _LOOKED_AT
        num_fields += sum(body.count(sign, at, end) for sign in (b"[", b"{", b":"))
        num_values += body.count(b",", at, end)
        if num_fields > most_fields or num_values > most_values:
            return False
    return True


def has_few_values(body: bytes, most_fields: int, most_values: int) -> bool:
    """Return whether a body has at most this many arrays, objects and fields, and this many values in all.

    To be run on a thread; it works in short steps.
    """
    num_fields = num_values = 0
    for found in _PARTS.finditer(body):
        sign = body[found.start()]
        if sign == _COMMA:
            num_values += 1
        elif sign != _QUOTE:
            num_fields += 1
        if num_fields > most_fields or num_values > most_values:
            return False
    return True
