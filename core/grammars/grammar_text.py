"""grammar_text(): turns a request's StructuredOutputsParams into the grammar text that llguidance compiles."""

import json
from typing import TYPE_CHECKING, Any

import msgspec

from core.grammars.gbnf import lark_of_gbnf
from core.grammars.grammar_notation import quoted
from core.grammars.structural_tags import structural_tag_grammar
from ipc.errors import InvalidRequestError
from ipc.params.choices import MANY_CHOICES, pattern_of
from ipc.params.gbnf import is_gbnf, split
from ipc.params.json_schemas import close_objects, drop_annotations, spell_dependencies
from ipc.params.schema_names import check_number_of_names, keep_names
from ipc.params.schema_numbers import keep_numbers
from ipc.params.schema_texts import plain_texts
from ipc.params.structural_tags import Grammar
from ipc.params.structured_outputs import StructuredOutputsParams, read_structural_tag

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: White space between the parts of JSON, unless the request gives another pattern. It is bounded because small models
#: tend to write white space endlessly.
_WHITESPACE = r"[ \n\t]{0,20}"
_ANY_OBJECT = {"type": "object"}


def grammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar for these params, in the form for llguidance.LLMatcher. Errors: InvalidRequestError."""
    from llguidance import LLMatcher

    match params.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(params.regex or "")
        case "choice":
            return _choice(params.choice or [])
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(params.grammar or ""))
        case "structural_tag":
            return _structural_tag(params)
        case _:
            schema = _ANY_OBJECT if params.json is None else msgspec.json.decode(str(params.json))
            return _json(schema, params)


def _choice(texts: list[str]) -> str:
    from llguidance import LLMatcher

    if len(texts) > MANY_CHOICES:
        return LLMatcher.grammar_from_regex(pattern_of(texts))
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, texts)))


def _json(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    obeyed = json.dumps(_obeyed(schema, params))
    try:
        return LLMatcher.grammar_from_json_schema(obeyed, _json_options(params))
    except ValueError as error:
        raise InvalidRequestError(f"json is not a JSON schema: {error}") from None


def _obeyed(schema: dict[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    """Return the schema as llguidance should apply it. Errors: InvalidRequestError."""
    check_number_of_names(schema)
    schema = keep_numbers(drop_annotations(schema))
    if params.disable_additional_properties:
        schema = close_objects(schema)
    obeyed: dict[str, Any] = plain_texts(keep_names(spell_dependencies(schema)))
    return obeyed


def _json_options(params: StructuredOutputsParams) -> "JsonCompileOptions":
    if params.disable_any_whitespace:  # the separators of JSON without white space
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}


def _lark(text: str) -> str:
    """Return a grammar in Lark's notation, from Lark or GBNF, or a mix (ipc/params/gbnf.py)."""
    if is_gbnf(text):
        return lark_of_gbnf(text)
    parts = split(text)
    return text if parts is None else f"{parts.lark}{parts.name}: %lark {{\n{lark_of_gbnf(parts.gbnf)}\n}}"


def _structural_tag(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, StructTag

    read = read_structural_tag(str(params.structural_tag))
    if isinstance(read, Grammar):
        return LLMatcher.grammar_from_lark(_lark(read.grammar))
    if not isinstance(read, list):
        return LLMatcher.grammar_from_lark(structural_tag_grammar(read, lambda schema: _json_rule(schema, params)))
    tags = []
    for tag in read:
        grammar = {**_obeyed(tag.schema, params), "x-guidance": _json_options(params)}
        tags.append(StructTag(trigger=tag.trigger, begin=tag.begin, grammar=grammar, end=tag.end))
    return StructTag.to_grammar(tags, assume_special=False)


def _json_rule(schema: dict[str, Any] | bool, params: StructuredOutputsParams) -> str:
    """Return the Lark rule for JSON with this schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**_obeyed(schema, params), 'x-guidance': _json_options(params)}, ensure_ascii=False)}"
