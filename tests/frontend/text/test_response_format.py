"""The constraint of a response_format, by what its grammar accepts."""

from typing import Any

import pytest

from core.grammars.grammars import Grammars
from frontend.text.response_format import constraint_of_response_format
from ipc.errors import InvalidRequestError
from tests.grammar_vocabulary import accepts, make_grammars


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


def test_response_formats(grammars: Grammars) -> None:
    assert constraint_of_response_format(None) is None
    assert constraint_of_response_format({"type": "text"}) is None
    assert accepts(grammars, constraint_of_response_format({"type": "json_object"}), '{"a": 1}')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": [1, 2]}}}
    assert accepts(grammars, constraint_of_response_format(schema), "2")
    assert not accepts(grammars, constraint_of_response_format(schema), "3")
    for kind in ("json_schema", "json_object"):  # as clients of llama.cpp send it
        beside = constraint_of_response_format({"type": kind, "schema": {"enum": [1, 2]}})
        assert accepts(grammars, beside, "2")
        assert not accepts(grammars, beside, "3")
    named = {"type": "object", "properties": {"a": {"enum": [1]}}}
    for response_format, is_open in (
        ({"type": "json_schema", "json_schema": {"schema": named}}, True),
        ({"type": "json_object", "schema": named}, False),  # llama.cpp's form: no names but those of the schema
        ({"type": "json_object", "schema": {**named, "additionalProperties": True}}, True),
    ):
        found = constraint_of_response_format(response_format)
        assert accepts(grammars, found, '{"a": 1}')
        assert accepts(grammars, found, '{"a": 1, "b": 2}') == is_open
    tags = {"structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}], "triggers": ["<f"]}
    assert accepts(grammars, constraint_of_response_format({"type": "structural_tag", **tags}), "so <f>1</f>")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "xml"}, "got 'xml'"),
        ({}, "got None"),
        ({"type": "json_schema"}, "needs json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "needs json_schema.schema"),
        ({"type": "json_object", "schema": []}, "needs its schema"),
    ],
)
def test_bad_response_formats(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        constraint_of_response_format(given)
