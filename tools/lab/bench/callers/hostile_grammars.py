"""Grammars that a stranger might send: pieces of regular expressions, of grammars and of schemas, joined by chance."""

import json
import random
from typing import Any

_PIECES = (
    *(
        "start: ",
        "root ::= ",
        "a b ",
        "| ",
        "/[a-z]*/ ",
        '"x" ',
        "(",
        ")",
        "+",
        "*",
        "?",
        "{1,1000}",
        "\n",
        "a: ",
        "b: ",
    ),
    *(
        ".*",
        "[^x]",
        "\\d",
        "\\p{L}",
        "^",
        "$",
        "(?:",
        "(?i)",
        "{5000}",
        "%json {}",
        "%ignore /x/",
        "<eos>",
        "~3",
        "é",
        "\0",
    ),
    *('{"type":"object"', '"anyOf":[', '"$ref":"#"', "}", "]", ":", ",", "[lazy]", "[max_tokens=3]", "@x", "::=", "//"),
)


def hostile_grammar(rng: random.Random, schemas: list[dict[str, Any]]) -> dict[str, str]:
    """Return a field of StructuredOutputsParams: a grammar made of pieces, or one of `schemas` with mistakes in it."""
    kind = rng.choice(["regex", "grammar", "gbnf", "json"])
    if kind == "json":
        text = json.dumps(rng.choice(schemas))
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(_PIECES) + text[at + rng.randrange(3) :]
        return {"json": text}
    text = "".join(rng.choice(_PIECES) for _ in range(rng.randrange(1, 40)))
    begin = {"regex": "", "grammar": "start: ", "gbnf": "root ::= "}[kind]
    return {kind if kind == "regex" else "grammar": begin + text}
