"""How many values a body of JSON has, before it is decoded in one piece that holds Python's lock."""

import re

#: What begins a value or a field of JSON; a string is skipped as a whole.
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{:,]', re.DOTALL)
_LOOKED_AT = 1 << 18  # bytes, between two looks at the counts
_COMMA, _QUOTE = b',"'


def is_small(body: bytes, most_fields: int, most_values: int) -> bool:
    """Return whether a body has no more values than that; False if only has_few_values() can tell.

    It counts what begins a value, in texts too.
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
    """Return whether a body has at most so many arrays, objects and fields, and so many values in all.

    For a thread: it is made of short steps.
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
