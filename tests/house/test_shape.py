"""The shape of the product: small folders, no circles of modules, few positional arguments, no hidden argument lists.

What breaks a rule still is named here. Such a list gets shorter and never longer: what is cured leaves it.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, known_files, nodes, nodes_below, product_trees

pytestmark = pytest.mark.checkout

MAX_FILES = 30
#: Folders with more, and how many files they may have.
LARGE_FOLDERS: dict[str, int] = {}
MAX_POSITIONAL = 4
#: Constructors with more, and how many positional parameters they have.
LONG_CONSTRUCTORS = {
    "core/batch/forks.py:Forks": 5,
    "core/kv/block_pool.py:BlockPool": 5,
    "core/tiers/block_store.py:BlockStore": 5,
    "frontend/http/request.py:Request": 6,
}
Trees = Mapping[Path, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    return product_trees()


def test_a_folder_is_small() -> None:
    files = [path for path in known_files() if path.parts[0] in PACKAGES and path.name != "__init__.py"]
    counts = Counter(str(path.parent) for path in files)
    assert {folder: count for folder, count in counts.items() if count > LARGE_FOLDERS.get(folder, MAX_FILES)} == {}
    assert [folder for folder in LARGE_FOLDERS if counts[folder] <= MAX_FILES] == []


def imports_of(trees: Trees) -> dict[str, set[str]]:
    """Module -> the product's modules that it imports, those for type checking and in functions among them."""
    names = {path: ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in trees}
    known = set(names.values())
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        imported = found.setdefault(names[path], set())
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = (f"{node.module}.{alias.name}" for alias in node.names)
                imported |= {module if module in known else node.module for module in modules}
        imported &= known - {names[path]}
    return found


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in turn, the first one again at the end; empty: there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_modules_import_each_other(trees: Trees) -> None:
    assert circle_in(imports_of(trees)) == []


def long_constructors(trees: Trees) -> dict[str, int]:
    """path:class -> how many positional parameters its constructor has, of those with too many."""
    found = {}
    for path, tree in trees.items():
        for kind in nodes(tree):
            for made in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    count = len(made.args.posonlyargs) + len(made.args.args) - 1  # without self
                    if count > MAX_POSITIONAL:
                        found[f"{path}:{kind.name}"] = count  # type: ignore[union-attr]
    return found


def test_a_constructor_has_few_positional_parameters(trees: Trees) -> None:
    assert long_constructors(trees) == LONG_CONSTRUCTORS


def spreads(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls with *name, where the function has set this name to a tuple."""
    if not any(isinstance(node, ast.Starred) for node in nodes(tree)):
        return
    for function in nodes(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        inside = nodes_below(function)
        if not any(isinstance(node, ast.Starred) for node in inside):
            continue
        assigned = [node for node in inside if isinstance(node, ast.Assign)]
        tuples = [target for node in assigned if isinstance(node.value, ast.Tuple) for target in node.targets]
        names = {target.id for target in tuples if isinstance(target, ast.Name)}
        for call in inside:
            spread = (
                [one.value for one in call.args if isinstance(one, ast.Starred)] if isinstance(call, ast.Call) else []
            )
            if any(isinstance(one, ast.Name) and one.id in names for one in spread):
                yield call  # type: ignore[misc]


def test_no_call_spreads_a_tuple_of_its_own_function(trees: Trees) -> None:
    """A reader cannot see which argument is which: name them, or make them one object."""
    assert [f"{path}:{call.lineno}" for path, tree in trees.items() for call in spreads(tree)] == []


def test_the_rules_find_what_they_are_about() -> None:
    source = """
class Wide:
    def __init__(self, a, b, c, d, e, *, f): ...
def hidden(x):
    pair = x, x
    return print(*pair, x)
def seen(pair):
    return print(*pair, *[1, 2])
"""
    tree = ast.parse(source)
    assert long_constructors({Path("a.py"): tree}) == {"a.py:Wide": 5}
    assert [call.lineno for call in spreads(tree)] == [6]
    loop = {Path("a.py"): ast.parse("import b"), Path("b.py"): ast.parse("def f():\n    from a import x")}
    assert circle_in(imports_of(loop)) in (["a", "b", "a"], ["b", "a", "b"])
