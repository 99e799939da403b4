"""Every public function, class and method of these folders has a docstring."""

import ast
from collections.abc import Iterator

import pytest

from tests.house.source import product_trees

pytestmark = pytest.mark.checkout


def without_docstring(tree: ast.Module) -> Iterator[str]:
    """Yield the public functions, classes and methods of a file that have none."""
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield node.name
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            is_public = isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and not inner.name.startswith("_")
            is_overload = is_public and any(ast.unparse(one) == "overload" for one in inner.decorator_list)
            if is_public and not is_overload and ast.get_docstring(inner) is None:
                yield f"{node.name}.{inner.name}"


def test_what_is_public_has_a_docstring() -> None:
    trees = product_trees()
    assert len(trees) > 150
    assert [f"{path}:{name}" for path, tree in trees.items() for name in without_docstring(tree)] == []


def test_a_missing_docstring_is_found() -> None:
    source = """
def named(): ...
def _private(): ...
class Thing:
    def method(self): ...
    def _private(self): ...
    def __len__(self): ...
class Said:
    "A thing that is explained."
    def method(self):
        "Do it."
"""
    assert list(without_docstring(ast.parse(source))) == ["named", "Thing", "Thing.method"]
