"""Grammars: each kind compiles to what it says, bad ones are refused with words, and compiled ones are kept."""

import gc
import json
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from core.grammars import grammars as module
from core.grammars import token_files
from core.grammars.compilation import compile_grammar
from core.grammars.grammars import Grammars
from core.grammars.vocabulary import Divide, Vocabulary, build_vocabulary
from ipc.errors import InvalidRequestError, UnsupportedParameterError
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import AddRequest
from tests.grammar_vocabulary import (
    EOS,
    VOCAB_SIZE,
    allowed,
    make_grammars,
    schema,
    structured,
    tokenizer,
    tokenizer_files,
)


def accepts(grammars: Grammars, text: str, **fields: Any) -> bool:
    """Whether the grammar of these fields takes the text, and may end behind it."""
    matcher = grammars.matcher(structured(**fields))
    return matcher.consume_tokens(tokenizer().encode(text).ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


OBJECT = schema(a={"type": "integer"}, b={"enum": ["x", "é"]})
OPEN = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
TAG = json.dumps(
    {"structures": [{"begin": "<f=1>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]}
)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"json": OBJECT},
            ['{"a":1,"b":"x"}', '{\n  "a": -20,\n  "b": "é"\n}'],
            ["{}", '{"a":1}', '{"a":"1","b":"x"}'],
        ),
        ({"json": OBJECT, "disable_any_whitespace": True}, ['{"a":1,"b":"x"}'], ['{"a": 1,"b":"x"}']),
        ({"json": OBJECT, "whitespace_pattern": "[ ]?"}, ['{"a": 1, "b":"x"}'], ['{"a":  1, "b":"x"}']),
        ({"json": OBJECT}, ['{"a":' + 20 * " " + '1,"b":"x"}'], ['{"a":' + 21 * " " + '1,"b":"x"}']),
        ({"json": OPEN}, ['{"a":1,"c":[]}', "{}"], ["[]"]),
        ({"json": OPEN, "disable_additional_properties": True}, ['{"a":1}', "{}"], ['{"a":1,"c":[]}']),
        ({"json": schema(a={"type": "string", "format": "password"})}, ['{"a":"x"}'], ['{"a":1}']),
        (
            {"json": {"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", "c"]}]}},
            ['"a"', '"b"', '"c"'],
            ['"d"', "1"],
        ),
        ({"json_object": True}, ["{}", '{"a": {"b": [1, null]}}'], ["[]", "1"]),
        ({"regex": r"\d{3}-[a-f]+"}, ["123-ab"], ["12-ab", "123-"]),
        ({"choice": ["yes", "no", 'a "b"\n', "😀"]}, ["yes", "no", 'a "b"\n', "😀"], ["y", "yesno", "maybe"]),
        ({"grammar": 'start: "a" b+\nb: "x" | /[0-9]/'}, ["ax1"], ["a"]),
        ({"grammar": '# GBNF\nroot ::= "a" b+\nb ::= "x" | [0-9]'}, ["ax1"], ["a"]),
        ({"grammar": '// A "x" ::= y\nstart: "::="'}, ["::="], ["x"]),
        ({"structural_tag": TAG}, ["no call", "so <f=1>25</f> it is", ""], ["<f=2>", "<f=1>x</f>"]),
    ],
)
def test_what_each_kind_accepts(grammars: Grammars, fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert {text: accepts(grammars, text, **fields) for text in good} == dict.fromkeys(good, True)
    assert {text: accepts(grammars, text, **fields) for text in bad} == dict.fromkeys(bad, False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"regex": "("}, r"\(regex\) cannot be used: .*unclosed group"),
        ({"grammar": "start: foo"}, r"\(grammar\) cannot be used: .*unknown name"),
        ({"grammar": 'root ::= "a" b'}, "grammar is not GBNF: Rule 'b' not found"),
        ({"grammar": "root ::= " + "(" * 30_000}, "grammar is not GBNF: "),
        ({"json": {"type": "nothing"}}, r"\(json\) cannot be used: .*nothing"),
        ({"json": {"type": "object", "not": {"type": "string"}}}, "Unimplemented keys.*not"),
        (
            {"json": {"oneOf": [{"const": 1}, {"const": 2}]}},
            "branches of oneOf must exclude one another .*: or use anyOf",
        ),
        ({"json": {"$ref": "http://example.org/x"}}, r"\(json\) cannot be used"),
        ({"json": {"type": "string", "pattern": "^(?!x)"}}, r"\(json\) cannot be used"),
        ({"regex": "a{60000}"}, r"\(regex\) cannot be used: it forces a text of more than 16,384 characters"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_reason(
    grammars: Grammars, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"(?s){text}") as error:
        grammars.matcher(structured(**fields))
    assert len(str(error.value)) <= 600


def test_masks_are_the_library_s_own_for_its_own_reading_of_the_tokenizer(grammars: Grammars) -> None:
    """The library reads a tokenizer.json itself, too."""
    content = tokenizer_files()["tokenizer.json"].decode()
    theirs = LLTokenizer(content, n_vocab=VOCAB_SIZE, eos_token=EOS)
    for fields, text in (({"json": OBJECT}, LLMatcher.grammar_from_json_schema(OBJECT)), ({"regex": "[a-z]+é"}, "")):
        grammar = text or LLMatcher.grammar_from_regex("[a-z]+é")
        options = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]+"} if "json" in fields else {}
        ours, other = grammars.matcher(structured(**fields, **options)), LLMatcher(theirs, grammar)
        for _ in range(12):
            mask = ours.compute_bitmask()
            assert allowed(np.frombuffer(mask, np.uint32)) == allowed(np.frombuffer(other.compute_bitmask(), np.uint32))
            token = allowed(np.frombuffer(mask, np.uint32))[-1]
            assert ours.consume_token(token)
            assert other.consume_token(token)


def test_what_a_vocabulary_is_made_of_is_gone_when_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer's own files are, before llguidance makes as much again; and its list of tokens, afterwards."""

    class Tokens(list[bytes]):
        """A list that can be watched."""

    grammars, read = make_grammars(), token_files.read_vocabulary
    watched: list[weakref.ref[Any]] = []

    def read_watched(*arguments: Any) -> tuple[Vocabulary, Callable[[], Divide]]:
        vocabulary, build = read(*arguments)
        tokens = Tokens(vocabulary.tokens)
        watched.extend((weakref.ref(build), weakref.ref(tokens)))
        return Vocabulary(tokens, vocabulary.special, vocabulary.size, vocabulary.eos_token_ids), build

    def build_later(*arguments: Any) -> LLTokenizer:
        assert watched[0]() is None
        assert watched[1]() is not None
        return build_vocabulary(*arguments)

    monkeypatch.setattr(token_files, "read_vocabulary", read_watched)
    monkeypatch.setattr(module, "build_vocabulary", build_later)
    assert grammars.vocabulary().size == VOCAB_SIZE
    grammars.load()
    gc.collect()
    assert watched[1]() is None
    assert accepts(grammars, "aa", regex="a+")


def test_a_vocabulary_made_in_one_call_allows_what_one_made_in_parts_allows() -> None:
    """The process that compiles first makes it in one call: it must refuse what the engine would refuse."""
    vocabulary = make_grammars().vocabulary()
    params = structured(json='{"type": "array", "items": {"type": "string", "maxLength": 20}}')
    first, second = (
        compile_grammar(build_vocabulary(vocabulary, in_parts=in_parts), params) for in_parts in (False, True)
    )
    for _ in range(40):
        mask = first.compute_bitmask()
        assert mask == second.compute_bitmask()
        token = allowed(np.frombuffer(mask, np.uint32))[-1]
        assert first.consume_token(token)
        assert second.consume_token(token)
        if first.is_stopped():
            break
    assert first.compute_ff_tokens() == second.compute_ff_tokens()


def test_eos_is_never_text() -> None:
    """Its name is ordinary text to a grammar, but the token ends the output."""
    matcher = make_grammars().matcher(structured(regex="(.|\n)*"))
    assert EOS in allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32))
    matcher = make_grammars().matcher(structured(choice=["<eos>"]))
    assert EOS not in allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32))


def request(params: StructuredOutputsParams | None) -> AddRequest:
    return AddRequest(1, b"\1\0\0\0", SamplingParams(structured_outputs=params), 0)


def test_a_compiled_grammar_is_kept_while_a_request_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    grammars, params = make_grammars(), structured(regex="a")
    first = request(params)
    assert grammars.needs(first)
    assert not grammars.needs(request(None))
    grammars.prepare(first)
    assert not grammars.needs(first)
    assert not grammars.needs(request(structured(regex="a")))  # equal, of another request
    for text in "bcd":
        grammars.prepare(request(structured(regex=text)))
    assert not grammars.needs(first)  # it lives
    assert grammars.needs(request(structured(regex="a")))  # and the cache has forgotten it
    del first, params
    gc.collect()
    assert not grammars._held


def test_many_threads_may_ask_at_once() -> None:
    grammars, found = make_grammars(), list[bytes]()

    def ask(text: str) -> None:
        found.append(grammars.matcher(structured(regex=text)).compute_bitmask())

    threads = [threading.Thread(target=ask, args=("[a-c]+" * (1 + number % 3),)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len(set(found)) == 1


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        UnsupportedParameterError, match=r"pip install llguidance, or engine-core with its extra \[structured\]"
    ):
        make_grammars().prepare(request(structured(regex="a")))


def test_as_many_choices_as_may_be_given(grammars: Grammars) -> None:
    special = ["a.b", "a|b", "x+(y)", "[z]{2}", "^$", "\\d", "tab\tline\n", "é ñ", "name", "names", "#-&~/"]
    choices = [*special, *(f"no{index:05d}" for index in range(4096 - len(special)))]
    for text in (*special, "no00000", f"no{4095 - len(special):05d}"):
        assert accepts(grammars, text, choice=choices), text
    for text in ("aXb", "a", "xy", "d", "", "no0000", f"no{4096 - len(special):05d}"):
        assert not accepts(grammars, text, choice=choices), text


def test_a_tokenizer_that_cannot_be_made_is_tried_once() -> None:
    """Its tokens are known, and nothing divides texts as it does."""
    file = json.loads(tokenizer_files()["tokenizer.json"]) | {"pre_tokenizer": {"type": "Unknown"}}
    reads = list[int]()

    def read() -> dict[str, bytes]:
        reads.append(1)
        return {"tokenizer.json": json.dumps(file).encode()}

    unusable = Grammars(read, VOCAB_SIZE, (EOS,))
    for _ in range(2):
        with pytest.raises(UnsupportedParameterError, match="need the model's tokenizer: tokenizer\\.json is not"):
            unusable.matcher(structured(regex="a"))
    assert len(reads) == 1


def test_without_a_tokenizer_or_an_end_they_are_refused() -> None:
    with pytest.raises(UnsupportedParameterError, match="need the model's tokenizer: the model has no tokenizer"):
        Grammars(dict, VOCAB_SIZE, (EOS,)).prepare(request(structured(regex="a")))
    with pytest.raises(UnsupportedParameterError, match="need a model with an EOS token"):
        Grammars(tokenizer_files, VOCAB_SIZE, ()).prepare(request(structured(regex="a")))
