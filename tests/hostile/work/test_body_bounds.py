"""The values of a body are counted before it is decoded; what stands in a text is none."""

import json
import random
from typing import Any

import pytest

from frontend.http.service import has_few_values, is_small

MOST = 1000


def numbers_of(value: Any) -> tuple[int, int]:
    """(arrays, objects and fields; commas) of a value, by walking it."""
    if isinstance(value, (list, dict)):
        inner = list(value.values()) if isinstance(value, dict) else value
        found = [numbers_of(one) for one in inner]
        fields = 1 + (len(value) if isinstance(value, dict) else 0)
        return fields + sum(one[0] for one in found), max(0, len(inner) - 1) + sum(one[1] for one in found)
    return 0, 0


def random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(6 if depth < 4 else 4)
    if kind == 4:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(8))]
    if kind == 5:
        return {f'a"{index}\\,:[': random_value(draw, depth + 1) for index in range(draw.randrange(8))}
    return draw.choice([1, -2.5, None, True, 'x,[{":', "\\", '\\"', "a\\\\", "\N{SNOWMAN}\n"])


@pytest.mark.parametrize("seed", range(50))
def test_the_count_is_exact(seed: int) -> None:
    value = random_value(random.Random(seed))
    body = json.dumps(value).encode()
    fields, values = numbers_of(value)
    assert has_few_values(body, fields, values)
    assert not (fields and has_few_values(body, fields - 1, values))
    assert not (values and has_few_values(body, fields, values - 1))


@pytest.mark.parametrize("body", [b"[" * 2000, b"{" * 2000, b"1," * 2000, b'"a":' * 2000, b"[[1]" + b",[1]" * 2000])
def test_many_values_are_found_in_either_way(body: bytes) -> None:
    assert not is_small(body, MOST, MOST)
    assert not has_few_values(body, MOST, MOST)


def test_a_text_with_many_signs_is_one_value() -> None:
    body = json.dumps({"prompt": '{"a": [1, 2]},\\"' * 200_000}).encode()
    assert not is_small(body, MOST, MOST)
    assert has_few_values(body, 2, 0)
    assert is_small(json.dumps({"prompt": "word " * 500_000}).encode(), MOST, MOST)


@pytest.mark.parametrize("body", [b'"' + b"\\" * 1001, b'"abc', b"", b'"\\u00', b'"a\nb", [', b"\xff,[\x00"])
def test_what_is_no_json_is_counted_too(body: bytes) -> None:
    assert has_few_values(body, 1, 1)
