"""The wheel for ARM64: the cross compiler builds it, pip takes it for that platform, and an emulated process loads it.

usage: python -m tests.arm.wheel [--folder FOLDER] [WHEEL]

Without WHEEL it builds one with all variants, or those that ENGINE_CORE_WHEEL_VARIANTS names.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from build_wheel.hook import MACHINE
from kernels.cpu.build import ARM
from tests.arm.system import COMPILER, ROOT, environment, install, make_system, prepared_system

#: Loads what the wheel brings; CC fails, so nothing is compiled.
_LOAD = """
import numpy as np
from engine_core.kernels.cpu.build import usable_variants
from engine_core.kernels.cpu.gemm import PackedMatrix
from engine_core.kernels.cpu.library import load_cpu_library
from engine_core.kernels.cpu.library_file import PREBUILT_FOLDER
names = [name for name in usable_variants() if list(PREBUILT_FOLDER.glob(f"{name}-*.so"))]
assert names, PREBUILT_FOLDER
weight, x = np.eye(64, dtype=np.float32), np.arange(128, dtype=np.float32).reshape(2, 64)
for name in names:
    library = load_cpu_library(name)
    assert np.array_equal(PackedMatrix(library, weight)(x), x), name
    library.stop_threads()
print(*names)
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel below `folder` and return its path."""
    settings = {**os.environ, MACHINE: ARM, "CC": COMPILER}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheels")]
    subprocess.run(command, cwd=ROOT, env=settings, check=True)
    return max((folder / "wheels").glob(f"*_{ARM}.whl"), key=lambda path: path.stat().st_mtime)


def installed_digest(folder: Path) -> str:
    """Return a digest of the installed wheel's list of files, which has theirs."""
    record = next((folder / "installed").glob("*.dist-info/RECORD"))
    return hashlib.blake2b(record.read_bytes(), digest_size=8).hexdigest()


def settings(folder: Path, cpu: str) -> dict[str, str]:
    """Return the environment of a process of QEMU's that has the installed wheel, and no compiler."""
    return {**environment(folder, cpu), "CC": "false", "PYTHONPATH": str(folder / "installed")}


def load(folder: Path, wheel: Path) -> list[str]:
    """Install the wheel below `folder`, load its kernels in an emulated process, and return their variants."""
    install(folder / "installed", "--no-deps", "--upgrade", str(wheel))
    command = [str(make_system(folder)), "-P", "-c", _LOAD]
    done = subprocess.run(
        command, cwd=folder, env=settings(folder, "max"), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.split()


def build_and_load(folder: Path, wheel: Path | None = None) -> None:
    """Load a wheel's kernels, and say which; None = a new one."""
    begin = time.monotonic()
    wheel = wheel or build_wheel(folder)
    loaded = load(folder, wheel)
    print(f"{wheel.name}: loaded {' '.join(loaded)}: {time.monotonic() - begin:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".arm")
    parser.add_argument("wheel", type=Path, nargs="?")
    options = parser.parse_args(arguments)
    folder, _ = prepared_system(options.folder)
    build_and_load(folder, options.wheel and options.wheel.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
