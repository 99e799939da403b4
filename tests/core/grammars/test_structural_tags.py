"""Structural tags of the newer form: what each kind accepts, forced text in them, and what is refused.

The table was checked against XGrammar 0.2.8. An acceptor of its own, without grammars, judges random tags.
"""

import json
from collections import Counter
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from core.grammars.compilation import compile_grammar
from core.grammars.grammars import Grammars
from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.params.structural_tags import read_format
from ipc.params.structured_outputs import StructuredOutputsParams
from tests.core.grammars.random_tags import RandomTags
from tests.core.grammars.tag_acceptor import accepts
from tests.grammar_vocabulary import EOS, make_grammars, structured, tokenizer

Json = dict[str, Any]

OBJECT: Json = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ANY: Json = {"type": "any_text"}
NO: Json = {"type": "const_string", "value": "no"}


def holding(schema: Any) -> Json:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: Json, end: Any) -> Json:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: Json, **fields: Any) -> Json:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": list(tags), **fields}


F = tag("<f=x>", holding(OBJECT), "</f>")
G = tag("<f=y>", holding({"type": "integer"}), ["</f>", "</g>"])
THINK = tag("<t>", ANY, "</t>")
PAIRS: Json = {"type": "tags_with_separator", "tags": [F, G], "separator": ", "}
TABLE: list[tuple[Json, list[str], list[str]]] = [
    (NO, ["no"], ["", "n", "no ", "yes"]),
    (holding(OBJECT), ['{"a":1}', '{ "a": -2 }'], ["{}", ' {"a":1}', '{"a":1} ']),
    (holding(True), ["1", "[null]", '"x"'], ["", "x"]),
    (ANY, ["", "a\nb <f=", "é😀"], []),
    ({**ANY, "excludes": ["aa", "b"]}, ["", "a", "a a"], ["aa", "cb", "caad"]),
    ({**ANY, "max_chars": 2}, ["", "é😀"], ["abc"]),
    ({"type": "regex", "pattern": "a.c|/+"}, ["abc", "a\nc", "a/c", "//"], ["ac", "abbc", ""]),
    ({"type": "grammar", "grammar": 'root ::= "a" b+\nb ::= "x" | [0-9]'}, ["ax1"], ["a"]),
    ({"type": "sequence", "elements": [NO, holding(OBJECT), NO]}, ['no{"a":1}no'], ["nono", 'no{"a":1}']),
    ({"type": "or", "elements": [NO, F, THINK]}, ["no", '<f=x>{"a":1}</f>', "<t>no</t>"], ["", "nono"]),
    ({"type": "optional", "content": F}, ["", '<f=x>{"a":1}</f>'], ['<f=x>{"a":1}</f><f=x>{"a":1}</f>']),
    ({"type": "plus", "content": F}, ['<f=x>{"a":1}</f>', '<f=x>{"a":1}</f><f=x>{"a":1}</f>'], [""]),
    ({"type": "star", "content": NO}, ["", "no", "nonono"], ["n", "nox"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": F}, ['<f=x>{"a":1}</f>'], ["", '<f=x>{"a":1}</f>' * 3]),
    ({"type": "repeat", "min": 2, "max": -1, "content": NO}, ["nono", "nonono"], ["", "no"]),
    (THINK, ["<t></t>", "<t>a</t b</t>"], ["<t>", "<t></t></t>", "<t>a</t>b"]),
    (tag("", ANY, "aa"), ["aa", "baa", "aaa"], ["a", "aab", "aaaa"]),
    (tag("", ANY, ["x", "yy"]), ["x", "ayy", "ayx"], ["xx", "y", "yyx"]),
    (tag("[", {"type": "sequence", "elements": [ANY, NO]}, "]"), ["[no]", "[nono]", "[a no]"], ["[]no]", "[no]]"]),
    (triggered(F, G), ["", "a <f", 'a<f=x>{"a":1}</f> b<f=y>12</g>'], ["<f=", "<f=z>", "<f=y>1</f><f=", "<f=x>1</f>"]),
    (triggered(F, at_least_one=True), ['<f=x>{"a":1}</f> b'], ["", 'a<f=x>{"a":1}</f>']),
    (triggered(F, stop_after_first=True), ["a", 'a<f=x>{"a":1}</f>'], ['<f=x>{"a":1}</f> b', '<f=x>{"a":1}</f>' * 2]),
    (triggered(F, at_least_one=True, stop_after_first=True), ['<f=x>{"a":1}</f>'], ["", "a"]),
    (triggered(F, excludes=["!"]), ["a", '<f=x>{"a":1}</f> b'], ["a!", '<f=x>{"a":1}</f>!']),
    (tag("[", triggered(tag("<f=x>", ANY, "!")), "]"), ["[]", "[a<f=x>]!b]"], ["[a]b]", "[<f=x>]"]),
    (PAIRS, ["", "<f=y>1</f>", '<f=y>1</g>, <f=x>{"a":1}</f>'], [", ", "<f=y>1</f>, ", "<f=y>1</f> <f=y>1</f>"]),
    ({**PAIRS, "at_least_one": True, "stop_after_first": True}, ["<f=y>1</f>"], ["", "<f=y>1</f>, <f=y>1</f>"]),
    (
        {"type": "dispatch", "rules": [["<", NO], ["[", holding(OBJECT)]], "excludes": ["!"]},
        ["", "a<no", 'a[{"a":1}b<no'],
        ["a<", "<nope!", "<yes"],
    ),
    ({"type": "dispatch", "rules": [["<", NO]], "loop": False}, ["a", "a<no"], ["<no<no", "<no "]),
    (
        {"type": "sequence", "elements": [THINK, triggered(F)]},
        ["<t><f=</t>", '<t></t>so <f=x>{"a":1}</f>'],
        ["", "<t>", "<t></t><f=x>1</f>"],
    ),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


def given(node: Json, **options: Any) -> StructuredOutputsParams:
    return structured(structural_tag={"type": "structural_tag", "format": node}, **options)


def takes(start: LLMatcher, text: str) -> bool:
    """Whether the text is whole. start: a matcher of bytes at the beginning."""
    matcher = start.deep_copy()
    return (not text or matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


@pytest.mark.parametrize(("node", "good", "bad"), TABLE)
def test_what_each_kind_accepts(node: Json, good: list[str], bad: list[str]) -> None:
    start = compile_grammar(LLTokenizer("byte"), given(node))
    assert {text: takes(start, text) for text in good} == dict.fromkeys(good, True)
    assert {text: takes(start, text) for text in bad} == dict.fromkeys(bad, False)
    if node["type"] != "grammar":
        judged = read_format({"format": node})
        assert {text: accepts(judged, text) for text in (*good, *bad)} == {
            **dict.fromkeys(good, True),
            **dict.fromkeys(bad, False),
        }


@pytest.mark.parametrize("seed", range(4))
def test_random_tags_accept_what_their_readings_are(seed: int) -> None:
    made, counts, byte_tokens = RandomTags(seed), Counter[Any](), LLTokenizer("byte")
    for _ in range(120):
        node = made.format(made.rng.randint(0, 3))
        try:
            start = compile_grammar(byte_tokens, given(node))
        except (InvalidRequestError, UnsupportedParameterError) as error:
            counts["ambiguous" if "ambiguous" in str(error) else "refused"] += 1
            continue
        judged = read_format({"format": node})
        texts = {made.text(node) for _ in range(6)}
        for text in sorted(texts | {made.changed(text) for text in texts}):
            is_accepted = accepts(judged, text)
            assert takes(start, text) == is_accepted, (json.dumps(node), text)
            counts[is_accepted] += 1
    assert min(counts[True], counts[False]) > 200, counts
    assert 0 < counts["ambiguous"] < 40, counts


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"type": "sequence", "elements": [ANY, holding(OBJECT)]}, "JSON, and a text in its place"),
        (
            {"type": "or", "elements": [tag("<", holding(OBJECT), ""), {"type": "regex", "pattern": "<.*"}]},
            "free text or a",
        ),
        ({"type": "sequence", "elements": [holding(OBJECT), holding(OBJECT)]}, "JSON and what follows it"),
        (tag("<", holding({"type": "number"}), "5>"), "JSON and what follows it"),
        ({"type": "or", "elements": [holding(OBJECT), ANY]}, "JSON, and a text in its place"),
        ({"type": "or", "elements": [tag("a", holding(OBJECT), ""), tag("a[", holding(OBJECT), "")]}, "the text 'a'"),
        ({"type": "sequence", "elements": [NO, {"type": "grammar", "grammar": 'root ::= "a"'}]}, "must be the only"),
    ],
)
def test_what_is_ambiguous_is_refused(grammars: Grammars, node: Json, text: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=text):
        grammars.matcher(given(node))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (holding(False), "cannot be used"),
        (holding({"type": "object", "not": {"type": "string"}}), "Unimplemented keys.*not"),
        ({"type": "regex", "pattern": "("}, "cannot be used: .*unclosed group"),
        ({"type": "const_string", "value": "a" * 100_000}, "more than 16,384 characters"),
    ],
)
def test_what_cannot_be_compiled_is_refused(grammars: Grammars, node: Json, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"(?s){text}"):
        grammars.matcher(given(node))


def test_json_follows_the_options(grammars: Grammars) -> None:
    node = tag("<", holding({"type": "object", "properties": {"a": {"type": "integer"}}}), ">")
    wide, closed = (
        grammars.matcher(given(node)),
        grammars.matcher(given(node, disable_any_whitespace=True, disable_additional_properties=True)),
    )
    for text, is_wide, is_closed in (
        ('<{"a":1}>', True, True),
        ('<{"a": 1}>', True, False),
        ('<{"b":1}>', True, False),
    ):
        ids = tokenizer().encode(text).ids
        assert wide.deep_copy().validate_tokens(ids) == len(ids) or not is_wide
        assert (closed.deep_copy().validate_tokens(ids) == len(ids)) == is_closed


def test_tokens_within_a_tag_are_forced(grammars: Grammars) -> None:
    """Behind a trigger of one tag nothing is left to choose until the value; nor behind the value's bracket."""
    matcher = grammars.matcher(given(triggered(F), disable_any_whitespace=True))
    assert matcher.consume_tokens(tokenizer().encode("so <f=").ids)
    assert matcher.compute_ff_bytes() == b'x>{"a":'
    assert matcher.consume_tokens(tokenizer().encode('x>{"a":1}').ids)
    assert matcher.compute_ff_bytes() == b"</f>"
    assert matcher.consume_tokens(tokenizer().encode("</f>").ids)
    assert matcher.compute_ff_bytes() == b""
    assert matcher.consume_token(EOS)
