"""Tests use what users use: they read few private names of other objects."""

import ast
from pathlib import Path

import pytest

from tests.house.source import ROOT, known_files

pytestmark = pytest.mark.checkout

#: Places in tests that read or set a private name of another object, at most. It only gets smaller.
MOST = 158
#: Names of the standard library that begin with an underscore and are public.
PUBLIC = {"_replace", "_fields", "_asdict", "_make", "_field_defaults", "_exit"}


def private_names(tree: ast.Module) -> list[ast.Attribute]:
    """The attributes of a file such as `other._name`: not those of self, cls and super(), nor PUBLIC ones."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
    ]


def test_what_counts() -> None:
    counted = "a._b, c.d._e, f()._g, h[0]._i"
    others = "self._a, cls._b, super()._c, d.__dict__, e._replace(f=1), _g, h.i_"
    assert [one.attr for one in private_names(ast.parse(counted))] == ["_b", "_e", "_g", "_i"]
    assert private_names(ast.parse(others)) == []


def test_private_names_in_tests_get_fewer() -> None:
    found = [
        f"{path}:{one.lineno} {ast.unparse(one)}"
        for path in known_files("tests/*.py")
        for one in private_names(ast.parse((ROOT / Path(path)).read_text()))
    ]
    assert len(found) <= MOST, "\n".join(found)
