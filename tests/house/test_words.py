"""The pages and the code are written with the words that CONTRIBUTING.md names, not with those that it replaces."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.log_lines import counted
from tests.house.source import ROOT, known_files, nodes, nodes_below, product_trees
from tests.wrap_pages import pages

pytestmark = pytest.mark.checkout

#: Folders and files whose docstrings and comments still have some of the words. It only shrinks.
CODE_NOT_YET = ("build_wheel", "examples", "findings", "tests")
_WORDS = re.compile(r"\b(?:anew|alike|besides?|foretell?s?|foretold|meanwhile|nobody|somebody|to\s+be\s+had)\b", re.I)
#: The same in code.
_WORDS_OF_CODE = re.compile(r"\b(?:hence|lest|thereby|upon|whence|whoever|whom|shall|nought|for\s+ever)\b", re.I)
#: A name of the code: `beside`, host.beside, beside=None, Beside(...), "beside: what a parameter means", kv/beside.py.
_NAME = re.compile(r"`[^`\n]*`|\w*[./_]\w+|\b\w+(?=[:(=])")
#: Folders in which numbers and their nouns agree: what the command line prints, and what the engine answers.
COUNTED = (
    *("tools/commands", "tools/terminal", "core/border", "core/process", "frontend/text", "frontend/images"),
    *("frontend/call_arguments.py", "frontend/lora.py", "frontend/pooling.py", "frontend/session.py"),
)
_NOUNS = (
    "aborts|answers|blocks|choices|clients|differences|engines|events|failures|files|images|keys|lines|messages|"
    "preemptions|prompts|records|replicas|requests|rows|runs|sessions|steps|tokens"
)
_PLURAL = re.compile(rf" (?:(?:prompt|output|prefix-cache|KV) )?(?:{_NOUNS})\b")
#: Python 3.11's: a string in an f-string's braces has other quotes than the f-string.
_STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''', re.S
)
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.S)


def archaic(text: str) -> list[str]:
    """Return the words of a text that have a plainer one. Code is left out."""
    return [" ".join(word.split()) for word in _WORDS.findall(re.sub(r"`[^`\n]*`", "", text))]


def archaic_in_code(prose: str) -> list[str]:
    """Return the words of a docstring or comment that have a plainer one. Names of the code are left out."""
    words = _NAME.sub("", prose)
    return [" ".join(word.split()) for each in (_WORDS, _WORDS_OF_CODE) for word in each.findall(words)]


def prose_of_python(source: str, tree: ast.Module | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring and comment. Consecutive comments are one text. tree: None = parse it."""
    for node in nodes_below(ast.parse(source)) if tree is None else nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text
    last, lines, number, place = 0, list[str](), 1, 0
    for match in _STRING_OR_COMMENT.finditer(source):
        if source[match.start()] != "#":
            continue
        number, place = number + source.count("\n", place, match.start()), match.start()
        if lines and number != last + 1:
            yield last - len(lines) + 1, " ".join(lines)
            lines = []
        last = number
        lines.append(match.group().lstrip("#: "))
    if lines:
        yield last - len(lines) + 1, " ".join(lines)


def prose_of_c(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment."""
    for match in _COMMENT.finditer(source):
        if not match.group().startswith('"'):
            yield source.count("\n", 0, match.start()) + 1, re.sub(r"\n\s*\*", "\n", match.group().strip("/*"))


def _code_files() -> list[Path]:
    files = [path for pattern in ("*.py", "*.c", "*.h") for path in known_files(pattern)]
    return [path for path in files if not f"{path}/".startswith(tuple(f"{name}/" for name in CODE_NOT_YET))]


def test_pages_have_plain_words() -> None:
    """Tests' records and the page that names the words are left out."""
    named = [page for page in pages() if page.parts[0] != "tests" and str(page) != "CONTRIBUTING.md"]
    assert len(named) > 40
    found = {str(page): archaic((ROOT / page).read_text()) for page in named}
    assert {page: words for page, words in found.items() if words} == {}


def test_docstrings_and_comments_have_plain_words() -> None:
    files = _code_files()
    assert len(files) > 400
    found, trees = [], product_trees()
    for path in files:
        source = (ROOT / path).read_text()
        for line, text in prose_of_python(source, trees[path]) if path.suffix == ".py" else prose_of_c(source):
            found += [f"{path}:{line}: {word}" for word in archaic_in_code(text)]
    assert found == []


def test_what_is_not_yet_plain_is_there() -> None:
    assert [name for name in CODE_NOT_YET if not (ROOT / name).exists()] == []


def test_an_archaic_word_is_found() -> None:
    assert archaic("Nobody begins anew, beside\nwhat is to be\nhad.") == ["Nobody", "anew", "beside", "to be had"]
    assert archaic("The new side of a bedside table.") == []


def test_an_archaic_word_is_found_in_code() -> None:
    source = '''"""Whoever asks, meanwhile.

beside: a name. See `beside`, host.beside, Beside() and beside=None.
"""
one = 1  # for
# ever
two = "nobody"
'''
    found = [(line, archaic_in_code(text)) for line, text in prose_of_python(source)]
    assert found == [(1, ["meanwhile", "Whoever"]), (5, ["for ever"])]
    assert [archaic_in_code(text) for _, text in prose_of_c('/* lies\n * beside */ char *x = "anew"; // hence')] == [
        ["beside"],
        ["hence"],
    ]


def test_no_text_sends_users_to_an_index_that_has_no_package() -> None:
    """The package is not on the public index, where anybody could take its name."""
    files = [*_code_files(), *pages()]
    assert [str(path) for path in files if "pip install 'llm-engine-core[" in (ROOT / path).read_text()] == []


def uncounted(source: str) -> list[int]:
    """Return the lines of texts such as f"{number} requests", which would say "1 requests".

    Constants in capitals, numbers with a format, also by a function, and broken invariants may do so.
    """
    tree = ast.parse(source)
    inside = nodes_below(tree)
    asserted = {id(node) for one in inside if isinstance(one, ast.Assert) for node in nodes_below(one)}
    found = []
    for node in inside:
        if not isinstance(node, ast.JoinedStr) or id(node) in asserted:
            continue
        for value, text in itertools.pairwise(node.values):
            if not isinstance(value, ast.FormattedValue) or value.format_spec or not isinstance(text, ast.Constant):
                continue
            name = ast.unparse(value.value)
            is_text = isinstance(value.value, ast.Call) and not name.startswith(("len(", "int(", "max("))
            if _PLURAL.match(str(text.value)) and not is_text and not name.rpartition(".")[2].isupper():
                found.append(value.lineno)
    return found


def test_a_number_and_its_noun_agree() -> None:
    """ipc/log_lines.py has counted() for this."""
    files = [file for folder in COUNTED for file in known_files(folder) if file.suffix == ".py"]
    assert len(files) > 50
    wrong = [f"{file}:{line}" for file in files for line in uncounted((ROOT / file).read_text())]
    assert wrong == []


def test_a_number_that_does_not_agree_is_found() -> None:
    lines = ['f"{n} requests"', 'f"{a.n} prompt tokens"', 'f"{n:,} requests"', 'f"{MOST} keys"', 'f"{n} of them"']
    assert uncounted("\n".join(lines)) == [1, 2]
    assert uncounted('assert n, f"{n} requests"') == []
    assert [counted(number, "reply", "replies") for number in (0, 1, 2)] == ["0 replies", "1 reply", "2 replies"]
    assert counted(1, "step") + counted(3, "step") == "1 step3 steps"
