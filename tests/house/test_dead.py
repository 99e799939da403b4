"""No dead declarations: what a file of the product declares, the product uses."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.house.source import ROOT, nodes, product_trees

pytestmark = pytest.mark.checkout

#: The module whose names are for users, who also use what the product itself does not.
PUBLIC = Path("engine_core/names.py")
#: The class of `LLM.client` and `AsyncLLM.client`, which is for users too.
PUBLIC_CLIENT = "EngineClient"

#: Seams: what has a test and no user in the product yet, with the feature that will use it. This list may only shrink.
SEAMS: dict[str, str] = {}


def declared(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | None, ast.stmt]]:
    """Yield (name, class or None, statement) of every function, class, constant and method of a file."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, None, node
        for name in _assigned(node):
            yield name, None, node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield inner.name, node, inner


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def used_names(tree: ast.Module) -> dict[str, list[int]]:
    """Return the lines in which names are read: as variables, as attributes, or as strings that are one identifier.
    Imports do not count."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for node in nodes(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            found[node.id].append(node.lineno)
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
            found[node.attr].append(node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found[node.value].append(node.lineno)  # getattr, entries of tables, forward references
    return found


def lines_of(node: ast.stmt) -> range:
    """Return the lines of a statement, its decorators among them."""
    decorators = getattr(node, "decorator_list", [])
    return range(min([node.lineno, *(one.lineno for one in decorators)]), (node.end_lineno or node.lineno) + 1)


def base_names(node: ast.ClassDef) -> set[str]:
    """Return the last part of each base's name, B of class A(x.B[int]); all of it where it is asyncio's."""
    parts = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    names = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in parts}
    return {f"asyncio.{name}" if f"asyncio.{name}" in map(ast.unparse, parts) else name for name in names}


def dead(trees: Mapping[Path, ast.Module], public: set[str]) -> list[str]:
    """Return "file:name" of each declaration that nothing but itself uses.

    Left out: public classes with their public methods, special names, and methods of a class with a base from a library
    or from Python, which may call them.
    """
    of_files = {path: used_names(tree) for path, tree in trees.items()}
    uses: Counter[str] = Counter()
    for of_file in of_files.values():
        uses.update({name: len(lines) for name, lines in of_file.items()})
    ours = {node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)}
    found = []
    for path, tree in trees.items():
        for name, owner, node in declared(tree):
            own = lines_of(node)
            within = sum(line in own for line in of_files[path].get(name, ()))
            if name.startswith("__") or name in public or uses[name] > within:
                continue
            if owner is not None and not name.startswith("_") and owner.name in public:
                continue
            if owner is not None and base_names(owner) - ours - {"Protocol", "Struct", "NamedTuple", "Generic"}:
                continue
            found.append(f"{path}:{owner.name + '.' if owner else ''}{name}")
    return found


def public_names(trees: Mapping[Path, ast.Module]) -> set[str]:
    """Return the names of engine_core/names.py, the client's class, and the classes that those inherit."""
    imports = [node for node in trees[PUBLIC].body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names} | {PUBLIC_CLIENT, "__all__"}
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                names |= base_names(node)
    return names


def entry_files() -> set[Path]:
    """Return the files that pyproject.toml names, whose classes and functions the build calls."""
    text = (ROOT / "pyproject.toml").read_text()
    return {path for path in product_trees() if f'"{path}"' in text}


def test_everything_declared_is_used() -> None:
    trees = product_trees()
    assert len(trees) > 150
    entries = {name for path in entry_files() for name, _, _ in declared(trees[path])}
    found = dead(trees, public_names(trees) | entries)
    seams = [one for one in found if re.split(r"[:.]", one)[-1] in SEAMS]
    assert {re.split(r"[:.]", one)[-1] for one in seams} == set(SEAMS), "a seam has a user: take it out of the list"
    assert sorted(set(found) - set(seams)) == []


def test_a_dead_declaration_is_found() -> None:
    source = """
LIMIT = 3
UNUSED: int = 4

def used():
    return LIMIT

def recursive(n):
    return recursive(n - 1)

class Thing:
    def called(self):
        return used()

    def never(self):
        return Thing().called()

class Parser(argparse.ArgumentParser):
    def error(self):
        return Parser
"""
    tree = {Path("a.py"): ast.parse(source)}
    assert dead(tree, set()) == ["a.py:UNUSED", "a.py:recursive", "a.py:Thing", "a.py:Thing.never", "a.py:Parser"]
    assert dead(tree, {"Thing", "UNUSED", "recursive", "Parser"}) == []
