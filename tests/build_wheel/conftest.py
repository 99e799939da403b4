"""The wheel of this checkout, built once, and an environment with it installed."""

import fcntl
import os
from pathlib import Path

import pytest

from build_wheel.hook import WANTED
from kernels.cpu.build import usable_variants
from tests.build_wheel.suite import build, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, with one variant of the kernels; `make test-wheel` builds all. Workers of one run share it: compiling
    is most of a build.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared-dist"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(folder.glob("*.whl")):
            build(folder, "--wheel", **{WANTED: usable_variants()[0]})
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder of programs. Dependencies are those of the environment that runs the tests."""
    return install(tmp_path_factory.mktemp("venv"), str(wheel))
