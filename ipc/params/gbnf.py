"""GBNF, the notation of llama.cpp, as a whole grammar or as the last rule of one in Lark's notation.

The engine converts it (core/grammars/grammar_text.py), where its cost is bounded: 64 KiB may take seconds.
"""

import re
from typing import NamedTuple

#: The beginning of a GBNF grammar, after comments. Lark's rules have one colon.
_BEGIN = re.compile(r"(?:\s|#[^\n]*(?:\n|\Z))*+[A-Za-z_][\w-]*\s*::=")
#: A line of Lark's notation: the rest of the text is a grammar in GBNF, which defines the rule of this name.
_LAST_RULE = re.compile(r"^%gbnf ([a-z_]+)\n", re.MULTILINE)


class Parts(NamedTuple):
    """A grammar in Lark's notation without its last rule, and this rule's name and grammar in GBNF."""

    lark: str
    name: str
    gbnf: str


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is in GBNF."""
    return _BEGIN.match(text) is not None


def rule_of_grammar(name: str, text: str) -> str:
    """Return the lines of a rule in Lark's notation, the last one of its grammar, that represents a whole grammar."""
    return f"%gbnf {name}\n{text}" if is_gbnf(text) else f"{name}: %lark {{\n{text}\n}}"


def split(text: str) -> Parts | None:
    """Return the parts of a grammar whose last rule is in GBNF; None for any other grammar."""
    found = _LAST_RULE.search(text)
    return None if found is None else Parts(text[: found.start()], found[1], text[found.end() :])
