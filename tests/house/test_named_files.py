"""A page, a docstring or a comment names no file that is not there."""

import re

import pytest

from tests.house.source import PACKAGES, ROOT, known_files

pytestmark = pytest.mark.checkout

_FOLDERS = "|".join((*PACKAGES, "tests", "docs", "examples", "findings"))
#: A path from the root, or from a folder of a package: core/kv/block_pool.py or docs/map.md.
_PATH = re.compile(rf"(?<![\w/.\-])(?:{_FOLDERS})/[\w*{{}},./\-]*\.(?:py|c|h|md|json|jsonl|csv|svg|toml)\b")
_SOURCES = ("*.py", "*.md", "*.c", "*.h", "Makefile", "pyproject.toml")


def named_files(text: str) -> set[str]:
    """Return the paths in a text that look like files of this repository."""
    return set(_PATH.findall(text))


def missing(name: str) -> bool:
    """Whether no file has this path; braces and stars stand for several."""
    parts = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    if parts:
        return any(missing(parts[1] + each + parts[3]) for each in parts[2].split(","))
    return not any(ROOT.glob(name))


def test_every_file_that_is_named_exists() -> None:
    texts = {path: (ROOT / path).read_text() for path in known_files(*_SOURCES) if path.parts[:2] != ("tests", "house")}
    named = {(str(path), name) for path, text in texts.items() for name in named_files(text)}
    assert len(named) > 100
    assert sorted(f"{path} names {name}" for path, name in named if missing(name)) == []


def test_a_name_of_no_file_is_found() -> None:
    text = "See core/engine.py, `kernels/cpu/build*.py`, docs/nothing.md (core/x/y.py) and https://host/tests/a.py."
    found = sorted(named_files(text))
    assert found == ["core/engine.py", "core/x/y.py", "docs/nothing.md", "kernels/cpu/build*.py"]
    assert [name for name in found if missing(name)] == ["core/x/y.py", "docs/nothing.md"]
    assert not missing("kernels/cpu/{build,library}.py")
    assert missing("kernels/cpu/{build,nothing}.py")
