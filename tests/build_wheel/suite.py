"""The suite against an installed wheel: `make test-wheel`, `python -m tests.build_wheel.suite [PYTEST ARGUMENT ...]`.

The wheel is built and installed into an environment of its own, and the tests run in a folder where the checkout is out
of reach: tests/, with its imports moved as the wheel's are, build_wheel/ and pyproject.toml. Dependencies are those of
the environment that runs this.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from functools import cache
from pathlib import Path

from build_wheel.imports import copy_moved, move_imports

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """This process's, without what would put the checkout on the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def build(folder: Path, *options: str, **variables: str) -> str:
    """Build distributions of the checkout into `folder`; returns what the build printed."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), *options, str(ROOT)]
    built = subprocess.run(
        command,
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    return built.stdout


def install(folder: Path, *what: str) -> Path:
    """Make an environment with these pip arguments installed, and without pip; returns its folder of programs."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    # A path line is taken as it stands: the .pth files over there, our own editable install's too, are not read.
    Path(site_packages(python.parent), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    arguments = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--no-build-isolation", *what]
    command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
    subprocess.run(command, check=True, cwd=folder, env=environment())
    return python.parent


def site_packages(programs: Path) -> Path:
    command = [str(programs / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


@cache
def moved(path: Path) -> str:
    """A file of the checkout with its imports moved. All files take 4 s of CPU time."""
    return move_imports(path.read_bytes().decode())


def write_suite(folder: Path, *files: str) -> None:
    """Write the tests for an installed wheel into an existing folder.

    files: those with tests that are to run, relative to the checkout; none = all. What they share is written, too.
    """
    copy_moved(ROOT / "tests", folder / "tests", *(["test_*.py"] if files else []))
    for name in files:
        (folder / name).write_text(moved(ROOT / name))
    shutil.copytree(ROOT / "build_wheel", folder / "build_wheel", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")


def suite_command(programs: Path, *arguments: str) -> list[str]:
    """pytest, to be run in write_suite()'s folder."""
    return [str(programs / "python"), "-m", "pytest", "-q", "-m", "not soak and not checkout", *arguments]


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="engine-core-suite-") as name:
        folder = Path(name)
        build(folder / "dist", "--wheel")
        programs = install(folder / "venv", *map(str, (folder / "dist").glob("*.whl")))
        write_suite(folder)
        command = suite_command(programs, *arguments)
        return subprocess.run(command, cwd=folder, env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
