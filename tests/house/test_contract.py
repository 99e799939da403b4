"""docs/contract.md names tests for every promise, and the tests that it names exist."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout  # docs/

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"`((?:tests/[\w/]+\.py)?::test_\w+)`")


def promises() -> dict[str, list[tuple[str, str]]]:
    """Row -> (file, test) of each test that it names; "::test" is of the file named before."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for line in (ROOT / "docs" / "contract.md").read_text().splitlines():
        if line.startswith("| R"):
            number, *_, tests = (cell.strip() for cell in line.strip("|").split("|"))
            rows[number] = named(tests)
    return rows


def named(cell: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name in _NAME.findall(cell):
        file, test = name.split("::")
        found.append((file or found[-1][0], test))
    return found


def defined(file: str) -> set[str]:
    path = ROOT / file
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_promise_has_its_tests() -> None:
    rows = promises()
    assert list(rows) == [f"R{number}" for number in range(1, 28)]
    assert [number for number, tests in rows.items() if not tests] == []
    missing = [f"{file}::{test}" for tests in rows.values() for file, test in tests if test not in defined(file)]
    assert missing == []


def test_a_missing_test_is_seen() -> None:
    assert named("`tests/a.py::test_x`, `::test_y`") == [("tests/a.py", "test_x"), ("tests/a.py", "test_y")]
    assert "test_a_missing_test_is_seen" in defined("tests/house/test_contract.py")
    assert "test_that_is_not_there" not in defined("tests/house/test_contract.py")
    assert defined("tests/nowhere.py") == set()
