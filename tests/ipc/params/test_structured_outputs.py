"""StructuredOutputsParams: what is accepted, what is refused and with what words, and the wire."""

import json
import time
from typing import Any

import pytest

from ipc.errors import InvalidRequestError
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    StructuredOutputsParams,
    read_structural_tag,
)
from ipc.wire.messages import AddRequest, decode_client_message, encode

TAG = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object"}},
        {"json": '{"type": "string"}', "whitespace_pattern": "[ ]?"},
        {"regex": "a+"},
        {"choice": ["ja", "nein"]},
        {"grammar": 'start: "a"'},
        {"json_object": True, "disable_any_whitespace": True, "disable_additional_properties": True},
        {"structural_tag": json.dumps(TAG)},
    ],
)
def test_each_kind_passes_the_wire(fields: dict[str, Any]) -> None:
    given = StructuredOutputsParams(**fields)
    assert given.kind == next(iter(fields))
    message = AddRequest(1, b"\1\0\0\0", SamplingParams(structured_outputs=given), 0)
    assert decode_client_message(encode(message)) == message


def test_a_schema_is_kept_as_its_text_in_the_order_of_its_keys() -> None:
    assert StructuredOutputsParams(json={"b": 1, "a": {"é": None}}).json == '{"b":1,"a":{"é":null}}'
    assert StructuredOutputsParams(json='{ "b": 1 }').json == '{ "b": 1 }'


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "exactly one of json, regex, .*; got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex, choice"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[1]"}, r"json must be a JSON object, got '\[1\]'"),
        ({"json": {"a": {1, 2}}}, "json is not JSON: .*set"),
        ({"json": {"a": float("nan")}}, "json is not JSON"),
        ({"json": 5}, "json must be a JSON schema, a dict or its text, got 5"),
        ({"json": '{"a": "' + "x" * MAX_SCHEMA_BYTES + '"}'}, f"at most {MAX_SCHEMA_BYTES} are allowed"),
        ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, f"more than {MAX_SCHEMA_DEPTH} deep"),
        ({"json": "[" * 100_000}, f"more than {MAX_SCHEMA_DEPTH} deep"),
        ({"regex": ""}, "regex must be a str of at least one character"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, f"regex has {MAX_REGEX_BYTES + 1} bytes"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "grammar has"),
        ({"choice": []}, f"1 to {MAX_CHOICES} strings"),
        ({"choice": [""]}, "an element of choice"),
        ({"choice": ["a" * MAX_GRAMMAR_BYTES, "b"]}, "choice has"),
        ({"json_object": 1}, "json_object must be True or False"),
        ({"regex": "a", "whitespace_pattern": "[ ]"}, "whitespace_pattern applies to JSON and has no effect on regex"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": "x"}, "contradict each other"),
        ({"structural_tag": {"structures": [{1}]}}, "structural_tag is not JSON: .*set"),
        ({"structural_tag": '{"type": "structural_tag"}'}, "needs `structures`"),
        ({"structural_tag": json.dumps(TAG | {"triggers": ["<g"]})}, "no trigger is a prefix"),
        ({"structural_tag": json.dumps(TAG | {"structures": [{"begin": "<f"}]})}, "a structure has begin"),
    ],
)
def test_refusals(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        StructuredOutputsParams(**fields)


def test_structural_tags() -> None:
    read = read_structural_tag(json.dumps(TAG))
    assert isinstance(read, list)
    (tag,) = read
    given = StructuredOutputsParams(structural_tag=TAG)
    assert given == StructuredOutputsParams(structural_tag=json.dumps(TAG, separators=(",", ":")))
    assert (tag.trigger, tag.begin, tag.schema, tag.end) == ("<f", "<f>", {"type": "object"}, "</f>")


def test_the_deepest_schema_that_is_allowed() -> None:
    assert StructuredOutputsParams(json=nested(MAX_SCHEMA_DEPTH)).json == nested(MAX_SCHEMA_DEPTH)
    assert StructuredOutputsParams(json=json.dumps({"a": "[" * 1000}))


def test_hostile_text_is_read_in_linear_time() -> None:
    """A string that never ends, with a quote at every second place."""
    begin = time.perf_counter()
    with pytest.raises(InvalidRequestError, match="not JSON"):
        StructuredOutputsParams(json='{"' + '\\"' * (MAX_SCHEMA_BYTES // 2 - 2))
    assert time.perf_counter() - begin < 5


def test_they_are_an_option_of_sampling_params() -> None:
    given = StructuredOutputsParams(choice=["a"])
    params = SamplingParams(structured_outputs=given)
    assert params.clone() == params
    assert params.clone().structured_outputs is not given
    with pytest.raises(InvalidRequestError, match="ignore_eos and structured_outputs contradict"):
        SamplingParams(structured_outputs=given, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match=r"must be StructuredOutputsParams, got \{'choice'"):
        SamplingParams(structured_outputs={"choice": ["a"]})  # type: ignore[arg-type]
