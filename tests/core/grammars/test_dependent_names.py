"""Names that other properties depend on: what a grammar accepts is what a validator does."""

import itertools
import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from ipc.params.structured_outputs import StructuredOutputsParams
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, make_grammars, tokenizer_files

OBJECTS = [{name: 1 for name in "abcd" if name in some} for n in range(5) for some in itertools.combinations("abcd", n)]


@pytest.mark.parametrize("keyword", ["dependencies", "dependentRequired"])
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        {"a": ["b"]},
        {"a": ["b", "d"], "c": ["a"]},
        {"a": ["b"], "b": ["c"], "c": ["a"]},
        {"a": ["unknown"]},
        {"a": [], "b": ["b"]},
        {"a": ["b"], "b": ["a"], "c": ["d"], "d": ["a", "c"]},
    ],
)
def test_objects_have_what_their_properties_depend_on(
    keyword: str, is_closed: bool, names: dict[str, list[str]]
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": "integer"} for name in "abcd"}}
    schema |= {keyword: names}
    if is_closed:
        schema["additionalProperties"] = False
    validator = jsonschema.validators.validator_for({"$schema": "http://json-schema.org/draft-07/schema#"})
    kind = jsonschema.Draft202012Validator if keyword == "dependentRequired" else validator
    tokens = LLTokenizer(tokenizer_files()["tokenizer.json"].decode(), n_vocab=VOCAB_SIZE, eos_token=EOS)
    grammars, params = make_grammars(), StructuredOutputsParams(json=schema)
    for one in OBJECTS:
        matcher, ids = grammars.matcher(params), tokens.tokenize_str(json.dumps(one))
        taken = matcher.try_consume_tokens(ids)
        assert (taken == len(ids) and matcher.is_accepting()) == kind(schema).is_valid(one), one
