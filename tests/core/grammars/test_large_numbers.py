"""Large numbers of JSON schemas: what is allowed obeys them as they are written, and what cannot be is refused."""

import json
from typing import Any

import jsonschema
import pytest

from core.grammars.grammars import Grammars
from ipc.errors import InvalidRequestError
from tests.grammar_vocabulary import accepts, make_grammars, structured

LEAST, MOST, EXACT = -(2**63), 2**63 - 1, 2**53


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


@pytest.mark.parametrize(
    ("bounds", "allowed"),
    [
        ({"minimum": LEAST, "maximum": MOST}, [0, MOST, LEAST + 1024, -(10**18)]),
        ({"minimum": LEAST}, [0, LEAST + 1024, MOST]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, MOST]),
        ({"exclusiveMinimum": LEAST, "exclusiveMaximum": MOST}, [0, MOST - 5000]),
        ({"minimum": EXACT + 1}, [EXACT + 2, MOST]),
        ({"minimum": -EXACT - 1, "maximum": EXACT + 1}, [EXACT, -EXACT]),
        ({"minimum": 1 - EXACT, "maximum": EXACT - 1}, [EXACT - 1, 1 - EXACT]),
        ({"minimum": 1 - 10**18, "maximum": -5}, [-5, 1000 - 10**18]),
        ({"minimum": LEAST, "multipleOf": 5}, [0, -(10**18)]),
    ],
)
def test_bounds(grammars: Grammars, bounds: dict[str, Any], allowed: list[int]) -> None:
    rule = {"type": "integer", **bounds}
    given = structured(json=json.dumps(rule))
    assert [number for number in allowed if not accepts(grammars, given, str(number))] == []
    edges = {edge + step for edge in (0, LEAST, MOST, EXACT, -EXACT, -(10**18)) for step in (-2, -1, 0, 1, 2)}
    for number in sorted(edges):
        if accepts(grammars, given, str(number)):
            jsonschema.validate(number, rule)


@pytest.mark.parametrize("value", [EXACT, -EXACT, 2**60, MOST, LEAST + 1024, 123456789012345680])
def test_values(grammars: Grammars, value: int) -> None:
    for rule in ({"const": value}, {"enum": ["x", {"a": [value]}]}):
        text = json.dumps(value if "const" in rule else {"a": [value]})
        assert accepts(grammars, structured(json=json.dumps(rule)), text)
        assert not accepts(grammars, structured(json=json.dumps(rule)), text.replace("0", "9"))


@pytest.mark.parametrize(
    "rule",
    [
        {"const": 123456789012345678},
        {"enum": [1, EXACT + 1]},
        {"enum": [{"a": [LEAST]}]},
        {"const": 1e20},
        {"const": 2**63},
        {"type": "integer", "minimum": 10**40, "maximum": 10**40 + 3},
        {"type": ["integer", "null"], "exclusiveMinimum": 1e25},
        {"type": "integer", "minimum": LEAST, "maximum": LEAST},
    ],
)
def test_what_cannot_be_obeyed_is_refused(grammars: Grammars, rule: dict[str, Any]) -> None:
    for schema in (rule, {"type": "array", "items": rule}):
        with pytest.raises(InvalidRequestError, match="is not supported: "):
            grammars.matcher(structured(json=json.dumps(schema)))
