"""GBNF is llama.cpp's: classes, dots and escapes, and what is refused; held against xllamacpp 2026.10.11549 by hand."""

import random

import pytest
from llguidance import LLTokenizer

from core.grammars.compilation import compile_grammar
from core.grammars.gbnf import lark_of_gbnf
from core.grammars.gbnf_parser import Chars, Choice, Name, Node, Repeat, Sequence, Text, parse_gbnf
from core.grammars.gbnf_words import find_words
from core.grammars.grammars import Grammars
from ipc.errors import InvalidRequestError
from ipc.params.structured_outputs import StructuredOutputsParams
from tests.core.grammars.test_grammars import accepts
from tests.grammar_vocabulary import make_grammars


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return make_grammars()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ("root ::= .", ["\n", "a", "é", "/"], ["", "ab"]),
        ("root ::= [^&&]", ["a", "\n"], ["&", ""]),
        ("root ::= [a-z&&]", ["a", "z", "&"], ["A", "-"]),
        ("root ::= [~~]", ["~"], ["a"]),
        ("root ::= [a~~b]", ["~", "a", "b"], ["c"]),
        ("root ::= [+--]", ["+", ",", "-"], [".", "*"]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ("root ::= [-a]", ["a", "-"], ["b"]),
        ("root ::= [a-z-9]", ["b", "-", "9"], ["0", "5"]),
        (r"root ::= [a\-z]", ["a", "-", "z"], ["b"]),
        (r"root ::= [\]\[]", ["]", "["], ["a"]),
        ("root ::= [[]", ["["], ["]"]),
        ("root ::= [/.*+?^$|(){}]", list("/.*+?^$|(){}"), ["a", "\\\\"]),
        ("root ::= [^\\n]", ["a"], ["\n"]),
        ("root ::= [^]", ["a", "\n"], [""]),
        ('root ::= [] "b"', ["b"], ["", "[]b"]),
        (r'root ::= "\u00e9" [\u00e9] "\U0001F600" [\U0001F600-\U0001F602]', ["éé😀😁"], ["éé😀a"]),
        (r'root ::= "\x41" [\x42-\x43]', ["AB", "AC"], ["AD"]),
        (r'root ::= "\t\r\n\\\"\[\]\-/" ', ['\t\r\n\\"[]-/'], []),
        ('root ::= "" "x"', ["x"], [""]),
        ('root ::= "a"{2} "b"{1,2} "c"{2,}', ["aabcc", "aabbccc"], ["abcc", "aabc", "aabbbcc"]),
        ('root ::= "a"{0} ("b" | ) ( "c"\n "d" )', ["bcd", "cd"], ["abcd"]),
        ('root ::= ("a"?)* "x"', ["x", "aax"], ["a"]),
        ('root ::= ("a"*)+ "x"', ["x", "aax"], ["b"]),
        ('# c\nroot ::= a-b # d\n\na-b ::= "x" |\n "y"\nroot2 ::= "z"', ["x", "y"], ["z"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
        ('root ::= start A a 0\nstart ::= "1"\nA ::= "2"\na ::= "3"\n0 ::= "4" ', ["1234"], ["1224"]),
        ('root ::= "(" root ")" | [0-9]', ["7", "((7))"], ["((7)", "()"]),
        ('root ::= x "a" | "b"\nx ::= "c"? "d"', ["b", "cda", "da"], ["a"]),
    ],
)
def test_texts(grammars: Grammars, grammar: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(grammars, text, grammar=grammar), text
    for text in bad:
        assert not accepts(grammars, text, grammar=grammar), text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= root "a" | "a"', r"must not begin with itself \(left recursion\): root -> root"),
        ('root ::= x "a" | "b"\nx ::= root?', "left recursion"),
        ('root ::= "b"* root "a" | "c"', "left recursion"),
        ('root ::= x\nx ::= y? ("z" | x)\ny ::= "c"', "left recursion"),
        ('root ::= "a"\nB ::= b\nb ::= B? "x"?', "left recursion"),
        ("root ::= foo", "Rule 'foo' not found"),
        ('a ::= "x"', "Rule 'root' not found"),
        (r'root ::= "\q"', "an unknown escape, in line 1"),
        (r'root ::= "\x4"', "an unknown escape"),
        (r'root ::= "\ud800"', "an escape that is not a character"),
        ('root ::= "x', "it ends inside a text or a class"),
        ("root ::= [a", "it ends inside a text or a class"),
        ("root ::= [z-a]", "a range ends before its beginning"),
        ('root ::= "a"{,3}', "expected a number"),
        ('root ::= "a"{3,2}', "a maximum below its minimum"),
        ('root ::= "a"{9999999999}', "expected a number up to"),
        ('root ::= "a" ; "b"', "expected a line's end"),
        ('root ::= "a"\n | "b"', "expected a rule's name, in line 2"),
        ("root ::= <think>", "expected a line's end"),
        ("root ::= *", "expected something to repeat before it"),
        ("root ::= " + "(" * 30_000, "more than 100 nested brackets"),
    ],
)
def test_what_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"grammar is not GBNF: .*{why}"):
        lark_of_gbnf(grammar)


def test_many_rules_of_which_each_needs_the_next() -> None:
    count = 3000
    text = "root ::= r0\n" + "".join(f'r{at} ::= r{at + 1} "x"\n' for at in range(count)) + f'r{count} ::= "y"\n'
    assert len(parse_gbnf(text)) == count + 2
    assert lark_of_gbnf(text).count("\n") == count + 2


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def test_words_end_wherever_the_grammar_lets_them(grammars: Grammars) -> None:
    for text in ("x=1\n", "a+b=(c*2 )\n\n\n", "x=y \n\nb=2\n", "a/b=c\n"):
        assert accepts(grammars, text, grammar=ARITHMETIC), text
    assert accepts(grammars, "ab", grammar='root ::= x "b"\nx ::= "a" | "ab"')
    assert accepts(grammars, "abb", grammar='root ::= x "b" root?\nx ::= "a" "b"*')


def test_what_has_clear_ends_stays_a_word() -> None:
    """The mask of a word takes a hundredth of the time."""
    words, split = find_words(parse_gbnf(JSON))
    assert (words, split) == ({"string", "number", "ws"}, set())
    assert find_words(parse_gbnf(ARITHMETIC))[0] == set()


def test_a_grammar_too_large_for_the_analysis_has_no_words() -> None:
    doubled = "".join(f"r{at} ::= r{at + 1} r{at + 1}\n" for at in range(40))
    assert find_words(parse_gbnf(f'root ::= r0 "ab"\n{doubled}r40 ::= "x"\n')) == (set(), {"ab"})


@pytest.mark.parametrize("seed", range(300))
def test_any_grammar_takes_the_texts_of_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    while True:
        text = "".join(f"{name} ::= {written(rng, 3)}\n" for name in ("root", "x", "y", "z"))
        try:
            made = compile_grammar(LLTokenizer("byte"), StructuredOutputsParams(grammar=text))
        except InvalidRequestError:  # it begins with itself, or has no text
            continue
        break
    rules, waiting = parse_gbnf(text), [("", made)]
    while waiting:
        begin, matcher = waiting.pop()
        assert matcher.is_accepting() == (len(begin) in ends(rules, rules["root"], begin, 0)), (text, begin)
        for char in "ab" if len(begin) < 5 else "":
            if (after := matcher.deep_copy()).try_consume_tokens([ord(char)]) == 1:
                waiting.append((begin + char, after))
            else:
                missed = [begin + char + more for more in ("", "a", "b", "aa", "ab", "ba", "bb")]
                assert not any(len(one) in ends(rules, rules["root"], one, 0) for one in missed), (text, begin, char)


def written(rng: random.Random, depth: int) -> str:
    """A random part of a rule over the characters a and b."""
    kind = rng.randrange(7 if depth else 4)
    if kind < 2:
        return rng.choice(['"a"', '"b"', '"ab"', '"aab"', "[ab]", "[^a]", '""'])
    if kind < 4:
        return rng.choice(["x", "y", "z", '"a"', '"b"'])
    if kind == 4:
        return f"({written(rng, depth - 1)}){rng.choice(['?', '*', '+', '{2}', '{1,2}'])}"
    sign = " " if kind == 5 else " | "
    return f"({sign.join(written(rng, depth - 1) for _ in range(rng.randint(2, 3)))})"


def ends(rules: dict[str, Node], node: Node, text: str, begin: int) -> set[int]:
    """Where a part that begins in this place of the text may end, by GBNF's definition."""
    match node:
        case Text(word):
            return {begin + len(word)} if text.startswith(word, begin) else set()
        case Chars(ranges, is_negated):
            code = ord(text[begin]) if begin < len(text) else -1
            fits = any(first <= code <= last for first, last in ranges) != is_negated
            return {begin + 1} if fits and code >= 0 else set()
        case Name(name):
            return ends(rules, rules[name], text, begin)
        case Choice(nodes):
            return {end for one in nodes for end in ends(rules, one, text, begin)}
        case Sequence(nodes):
            places = {begin}
            for one in nodes:
                places = {end for place in places for end in ends(rules, one, text, place)}
            return places
        case Repeat(one, low, high):
            found, places = {begin} if low == 0 else set(), {begin}
            for count in range(1, high + 1 if high is not None else len(text) + low + 2):
                places = {end for place in places for end in ends(rules, one, text, place)}
                if count >= low:
                    places -= found  # it was found after fewer parts, and has gone on from there
                    found |= places
                if not places:
                    break
            return found
