"""docs/contract.md and docs/origins.md name tests for every promise and mechanism, and what they name exists."""

import argparse
import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, known_files
from tools.command_table import COMMANDS
from tools.commands.completion import declared_parser

pytestmark = pytest.mark.checkout  # docs/

ROOT = Path(__file__).resolve().parents[2]
_NAME = re.compile(r"`((?:tests/[\w/]+\.py)?::test_\w+)`")
_COMMAND = re.compile(r"`((?:engine-core|make) [^`]+)`")
_STATE = re.compile(r"works|better: .+|replaced: .+")


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


@cache
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


def rows_of_origins() -> list[list[str]]:
    """All rows of docs/origins.md: (mechanism, here, state, shown by), and (name, here)."""
    lines = [line for line in (ROOT / "docs" / "origins.md").read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def words_of_the_product() -> frozenset[str]:
    files = [ROOT / file for file in known_files("*.py", "*.h") if file.parts[0] in (*PACKAGES, "engine_core")]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


def unknown_names(cell: str) -> list[str]:
    """Return the names in backquotes that the code does not have. Commands and paths are checked by others."""
    quoted = [text for text in re.findall(r"`([^`]+)`", cell) if " " not in text and "/" not in text]
    names = {name for text in quoted for name in re.findall(r"[A-Za-z_]\w+", text)}
    return sorted(names - words_of_the_product())


def wrong_command(command: str) -> str:
    """Say what of a command does not exist; "" for nothing."""
    program, name, *words = shlex.split(command)
    if program == "make":
        targets = re.findall(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text())[0].split()
        return "" if name in targets and not words else command
    if name not in COMMANDS:
        return command
    parser = declared_parser(name)
    parser.exit_on_error = False
    try:
        unknown = argparse.ArgumentParser.parse_known_args(parser, words)[1]
    except argparse.ArgumentError:
        return command
    return command if unknown else ""


def test_every_mechanism_is_there_and_something_shows_it() -> None:
    everything = rows_of_origins()
    assert [(row[0], names) for row in everything if (names := unknown_names(row[1]))] == []
    rows = [row for row in everything if len(row) != 2 and row[0] != "mechanism"]
    assert len(rows) >= 142
    assert [row for row in rows if len(row) != 4 or not all(row)] == []
    assert [row[0] for row in rows if not _STATE.fullmatch(row[2])] == []
    assert [row[0] for row in rows if not named(row[3]) and not _COMMAND.findall(row[3])] == []
    tests = {test for row in rows for test in named(row[3])}
    assert sorted(f"{file}::{test}" for file, test in tests if test not in defined(file)) == []
    assert [text for row in rows for text in _COMMAND.findall(row[3]) if wrong_command(text)] == []


def test_a_wrong_command_is_seen() -> None:
    for command in ("make test", "engine-core bench scheduler", "engine-core prove --prompts 8"):
        assert wrong_command(command) == ""
    for command in ("make tests", "engine-core benchmark", "engine-core bench nothing", "engine-core prove --promts 8"):
        assert wrong_command(command) == command


def test_a_missing_test_is_seen() -> None:
    assert unknown_names("`BlockPool.hold`, `beam_serch()`, `a b`, `core/nothing.py`, word") == ["beam_serch"]
    assert named("`tests/a.py::test_x`, `::test_y`") == [("tests/a.py", "test_x"), ("tests/a.py", "test_y")]
    assert "test_a_missing_test_is_seen" in defined("tests/house/test_contract.py")
    assert "test_that_is_not_there" not in defined("tests/house/test_contract.py")
    assert defined("tests/nowhere.py") == set()
