"""What `make pythons` installs and skips: all that `dev` names, but for what torch brings."""

import sys
import tomllib
from pathlib import Path

import pytest

from tests.pythons.__main__ import newest, requirements
from tests.pythons.left_out import LEFT_OUT

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.checkout
ROOT = Path(__file__).resolve().parents[2]


def test_all_that_dev_names_but_what_torch_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = requirements(project)
    assert "pytest>=9" in wanted
    assert len(wanted) == len(project["optional-dependencies"]["dev"]) - len(LEFT_OUT)


def test_a_python_that_is_too_old_or_does_not_run_is_none(tmp_path: Path) -> None:
    (tmp_path / "python3.12").touch()
    pythons = [sys.executable, str(tmp_path / "python3.12")]
    assert newest(pythons, (3, 11)) == {sys.version_info[:2]: sys.executable}
    assert newest(pythons, (4, 0)) == {}


@pytest.mark.parametrize(("missing", "outcome"), [("torch", "skipped"), ("thing", "failed")])
def test_only_what_needs_torch_is_skipped(pytester: pytest.Pytester, missing: str, outcome: str) -> None:
    error = f"raise ModuleNotFoundError(\"No module named '{missing}'\")"
    pytester.makepyfile(test_file=error, test_call=f"def test_it():\n    {error}")
    seen = pytester.runpytest_inprocess("-p", "tests.pythons.without_torch", "-p", "no:cacheprovider")
    counts = seen.parseoutcomes()
    assert counts == ({"skipped": 2} if outcome == "skipped" else {"errors": 1})
