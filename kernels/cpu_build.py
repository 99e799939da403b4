"""The C kernels' sources, the variants made of them, and the compiler. Needs the standard library only.

A variant is the same sources under other flags: what it computes is a function of the sources and these flags alone.
-ffp-contract=off: a product and a sum are rounded together only where the sources say so, so that two places in them
that look alike compute alike. No -ffast-math, for the same reason.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

SOURCE_FOLDER = Path(__file__).resolve().parent / "cpu"

_FLAGS = (
    *("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-psabi"),
)


class Variant(NamedTuple):
    """One set of instructions: compiler flags, and the words of /proc/cpuinfo that a CPU must have to run it."""

    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset(["avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])

#: By preference.
VARIANTS = {
    "avx512bf16": Variant(("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    "avx512": Variant(("-march=x86-64-v4",), _AVX512),
    "avx2": Variant(("-march=x86-64-v3",), _AVX2),
    "portable": Variant((), frozenset()),
}


class CpuLibraryError(Exception):
    """There are no C kernels here; the message says why."""


class Compiler(NamedTuple):
    command: tuple[str, ...]
    version: str  # whatever --version prints


def usable_variants() -> list[str]:
    """Variants that this CPU runs, by preference; a function of the CPU alone."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        words = set()
    return [name for name, variant in VARIANTS.items() if variant.needs <= words]


def variants_of_machine() -> list[str]:
    """Variants that CPUs of this architecture may run, by preference: those that go into a wheel."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [name for name, variant in VARIANTS.items() if is_x86 or not variant.needs]


def find_compiler() -> Compiler:
    """$CC, else cc. Errors: CpuLibraryError."""
    wanted = os.environ.get("CC") or "cc"
    try:
        command = tuple(shlex.split(wanted))
    except ValueError as error:
        raise CpuLibraryError(f"no C compiler: CC={wanted!r} is no command line ({error})") from error
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CpuLibraryError(f"no C compiler: {shlex.join(command)} does not run ({error})") from error
    return Compiler(command, done.stdout)


def source_hash(variant: str, compiler_version: str = "") -> str:
    """Hex; names what a variant is made of."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (platform.machine(), compiler_version, *_FLAGS, *VARIANTS[variant].flags):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE_FOLDER.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build(variant: str, compiler: Compiler, folder: Path) -> bytes:
    """The shared library's content; files are compiled side by side, in a folder of their own below `folder`, which is
    removed again. Errors: CpuLibraryError with what the compiler said."""
    try:
        with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as build_folder:
            command = [*compiler.command, *_FLAGS, *VARIANTS[variant].flags]
            objects = [f"{path.stem}.o" for path in sorted(SOURCE_FOLDER.glob("*.c"))]
            compiling = [
                _start([*command, "-c", str(SOURCE_FOLDER / f"{Path(name).stem}.c"), "-o", name], build_folder)
                for name in objects
            ]
            said = [process.communicate()[0] for process in compiling]
            if any(process.returncode for process in compiling):
                raise CpuLibraryError(f"{shlex.join(compiler.command)} failed: {''.join(said)[-2000:]}")
            linking = _start([*command, "-shared", *objects, "-lm", "-o", "library.so"], build_folder)
            linked = linking.communicate()[0]
            if linking.returncode:
                raise CpuLibraryError(f"{shlex.join(compiler.command)} does not link: {linked[-2000:]}")
            return Path(build_folder, "library.so").read_bytes()
    except OSError as error:
        raise CpuLibraryError(f"cannot build in {folder}: {error}") from error


def _start(command: list[str], folder: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def with_digest(content: bytes) -> bytes:
    """A shared library may have anything at its end: its digest, so that one file has both."""
    return content + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def is_intact(content: bytes) -> bool:
    return len(content) > _DIGEST_BYTES and with_digest(content[:-_DIGEST_BYTES]) == content


_DIGEST_BYTES = 32
