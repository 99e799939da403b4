"""GBNF is llama.cpp's: classes, dots and escapes, and what is refused; held against xllamacpp 2026.10.11549 by hand."""

import pytest

from core.grammars.gbnf import lark_of_gbnf, parse_gbnf
from core.grammars.grammars import Grammars
from ipc.errors import InvalidRequestError
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
