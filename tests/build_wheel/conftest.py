"""The wheel of this checkout, built once, and an environment with it installed."""

import fcntl
import os
from pathlib import Path

import pytest

from build_wheel.hook import WANTED
from kernels.cpu.build import is_intact, usable_variants, with_digest
from kernels.cpu.library_file import find_library
from tests.build_wheel.suite import build, install

#: Stands for the compiler of a wheel's build. The cache has what the same sources and flags give: compiling them again
#: would take 25 s of CPU time. Whatever makes neither an object nor the library goes to the compiler itself.
COMPILER = """#!/bin/sh
for output; do :; done
case " $* " in
  *" -shared "*) exec cp '{library}' "$output" ;;
  *.c" -o "*) exec touch "$output" ;;
  *) exec ${{CC_ITSELF:-cc}} "$@" ;;
esac
"""


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, with one variant of the kernels, which is not compiled again; `make test-wheel` compiles all variants.
    The processes of one run share it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if request.config.getoption("processes") > 1 else base) / "shared-dist"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(folder.glob("*.whl")):
            variant = usable_variants()[0]
            build(folder, "--wheel", **{WANTED: variant}, **compiler_of(folder, variant))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder of programs. Dependencies are those of the environment that runs the tests."""
    return install(tmp_path_factory.mktemp("venv"), str(wheel))


def compiler_of(folder: Path, variant: str) -> dict[str, str]:
    """The environment in which this variant's library is taken from the cache; where it is missing, it is built."""
    content = find_library(variant, use_prebuilt=False).path.read_bytes()
    assert is_intact(content)
    library, compiler = folder / "library.so", folder / "compiler"
    library.write_bytes(content[: len(content) - len(with_digest(b""))])
    compiler.write_text(COMPILER.format(library=library))
    compiler.chmod(0o755)
    return {"CC": str(compiler), "CC_ITSELF": os.environ.get("CC") or "cc"}
