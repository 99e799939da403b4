"""The C kernels' sources, the variants built from them, and the compiler. Needs only the standard library.

All variants have the same sources but their own flags. Results depend only on the sources and these flags. With
-ffp-contract=off a product and a sum are only rounded together if the sources say so. Then equal expressions give equal
bits everywhere. -ffast-math is not used, for the same reason.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE_FOLDER = Path(__file__).resolve().parent / "c"
BUILD_S = 120.0  # time limit of a build that something waits for; two free cores need 7 s
#: For a build that nothing waits for, such as a wheel's: CPU time of each compiler process, which does not depend on
#: the machine's load, and a time limit in case one hangs.
WHEEL_CPU_S, WHEEL_BUILD_S = 600, 7200.0
BUILD_FOLDER_PREFIX = "build-"

FLAGS = (
    *("-O2", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wno-psabi"),
)


class Variant(NamedTuple):
    """One instruction set: its compiler flags, and the kernel's words for what a CPU needs to run it."""

    flags: tuple[str, ...]
    needs: frozenset[str]  # none = any CPU of any architecture
    probe: str = ""  # C code that only compiles if compiler and assembler support the instructions; "" = all do


_AVX2 = frozenset(["avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
#: Of all CPUs with the bfloat16 instructions only Cooper Lake lacks one of the others, avx512_vbmi.
_AVX512BF16 = _AVX512 | frozenset(["avx512_bf16", "avx512_vnni", "avx512vbmi"])

ARM = "aarch64"  # platform.machine() of ARM with 64 bits
#: The same words for it, with the bits of getauxval() that say so (asm/hwcap.h).
_HWCAP, _HWCAP2 = 16, 26
_ARM_BITS = {"asimd": (_HWCAP, 1), "asimddp": (_HWCAP, 20), "i8mm": (_HWCAP2, 13), "bf16": (_HWCAP2, 14)}
_NEON = frozenset(["asimd"])
_NEON_DOT = _NEON | frozenset(["asimddp"])
_NEON_BF16 = _NEON_DOT | frozenset(["bf16", "i8mm"])

_CPU_INFO = Path("/proc/cpuinfo")
_INTEL = "GenuineIntel"  # its vendor_id

#: What a CPU with AMX has, and what its attention rounds weights with. Without them the amx variant is emulated.
AMX = frozenset(["amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"])
_AMX_PRODUCTS = "tdpbf16ps %tmm2, %tmm1, %tmm0\\n\\ttdpbssd %tmm2, %tmm1, %tmm0"
_AMX_PROBE = f'void probe(void) {{ __asm__ volatile("{_AMX_PRODUCTS}\\n\\ttilerelease"); }}'

#: Best first, before usable_variants() removes some.
VARIANTS = {
    "amx": Variant(("-march=x86-64-v4", "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _AVX512, _AMX_PROBE),
    "avx512bf16": Variant(("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"), _AVX512BF16),
    "avx512": Variant(("-march=x86-64-v4",), _AVX512),
    "avx2": Variant(("-march=x86-64-v3",), _AVX2),
    "neon_bf16": Variant(("-march=armv8.2-a+dotprod+bf16+i8mm", "-DWITH_NEON"), _NEON_BF16),
    "neon_dot": Variant(("-march=armv8.2-a+dotprod", "-DWITH_NEON"), _NEON_DOT),
    "neon": Variant(("-march=armv8-a", "-DWITH_NEON"), _NEON),
    "portable": Variant((), frozenset()),
}


class CpuLibraryError(Exception):
    """The C kernels cannot be built or loaded; the message gives the reason."""


class CannotCompileError(CpuLibraryError):
    """There is no compiler, or none that supports the variant's instructions."""


class Compiler(NamedTuple):
    """A C compiler that runs on this machine."""

    command: tuple[str, ...]
    version: str  # output of --version


def usable_variants() -> list[str]:
    """Return the variants that run at full speed on this CPU, best first. The result only depends on CPU and kernel."""
    words = _cpu_words()
    usable = [name for name in runnable_variants() if name != "amx" or has_amx()]
    if _INTEL in words and {"avx512bf16", "avx512"} <= set(usable):
        # Intel's vdpbf16ps has half the rate of AMD's: from 8 rows on a product takes longer than in float32.
        usable.remove("avx512bf16")
        usable.insert(usable.index("avx512") + 1, "avx512bf16")
    return usable


def runnable_variants() -> list[str]:
    """Return all variants that this CPU can run: the usable ones, and amx if it is emulated."""
    words = _cpu_words()
    return [name for name, variant in VARIANTS.items() if variant.needs <= words]


def has_amx() -> bool:
    """Return whether this process may use AMX: the CPU has it and the kernel has granted it."""
    return _cpu_words() >= AMX and request_amx() == 0


def _cpu_words() -> set[str]:
    if platform.machine() == ARM:
        return {word for word, (kind, bit) in _ARM_BITS.items() if _auxiliary_value(kind) >> bit & 1}
    try:
        return set(_CPU_INFO.read_text().split())
    except OSError:
        return set()


def _auxiliary_value(kind: int) -> int:
    """Return what the kernel told this process at its start (getauxval); 0 = nothing."""
    libc = ctypes.CDLL(None)
    libc.getauxval.argtypes, libc.getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(libc.getauxval(kind))


@functools.cache
def request_amx() -> int:
    """Request AMX's tiles from the kernel, for all threads of this process. Return 0 or the error number.

    It is refused by kernels before Linux 5.16, under a seccomp filter, by gVisor, and while a thread has an alternate
    signal stack that is too small for the tiles. The first answer is cached, because the choice of a variant must not
    change within a process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return 0
    return ctypes.get_errno() or -1


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of x86-64: asm/prctl.h, XFEATURE_XTILE_DATA


def variant_of(choice: str) -> str | None:
    """Return the variant for the option cpu_kernels; None = the best one."""
    return choice if choice in VARIANTS else None


def variants_of(machine: str | None = None) -> list[str]:
    """Return the variants for CPUs of an architecture, best first. They go into a wheel. None = this machine's."""
    machine = machine or platform.machine()
    is_x86 = machine.lower() in ("x86_64", "amd64")
    return [
        name
        for name, variant in VARIANTS.items()
        if not variant.needs or (machine == ARM if variant.needs <= _ARM_BITS.keys() else is_x86)
    ]


def find_compiler() -> Compiler:
    """Return the compiler $CC, or cc by default. Errors: CannotCompileError if it does not run."""
    wanted = os.environ.get("CC") or "cc"
    try:
        command = tuple(shlex.split(wanted))
    except ValueError as error:
        raise CannotCompileError(f"no C compiler: CC={wanted!r} is no command line ({error})") from error
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", check=True, timeout=30
        )
    except OSError as error:
        raise CannotCompileError(f"no C compiler: {shlex.join(command)} does not run ({error})") from error
    except subprocess.SubprocessError as error:
        raise CpuLibraryError(f"the C compiler {shlex.join(command)} fails ({error})") from error
    return Compiler(command, done.stdout)


def check_instructions(variant: str, compiler: Compiler, seconds: float = BUILD_S) -> None:
    """Raise CannotCompileError if the compiler or its assembler does not support the variant's instructions.

    Errors: CpuLibraryError if it does not say so within `seconds`.
    """
    flags, _, probe = VARIANTS[variant]
    if not probe:
        return
    name = shlex.join(compiler.command)
    try:
        with tempfile.TemporaryDirectory(prefix=BUILD_FOLDER_PREFIX) as folder:
            Path(folder, "probe.c").write_text(probe)
            command = [*compiler.command, *flags, "-c", "probe.c", "-o", os.devnull]
            _run("fails", [command], folder, time.monotonic() + seconds)
    except subprocess.TimeoutExpired:
        raise CpuLibraryError(f"{name} did not finish within {seconds:.0f} s") from None
    except (OSError, _CompilerFailedError) as error:
        raise CannotCompileError(
            f"{name} does not support the instructions of the variant {variant} ({error})"
        ) from error


def source_hash(variant: str, compiler_version: str = "", machine: str | None = None) -> str:
    """Return a hex digest of everything that a variant depends on: machine, compiler version, flags and sources.

    machine: as of platform.machine(); None = this one.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (machine or platform.machine(), compiler_version, *FLAGS, *VARIANTS[variant].flags):
        digest.update(part.encode() + b"\0")
    for name in _source_names():
        with open(SOURCE_FOLDER / name, "rb") as file:
            digest.update(name.encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()


def _source_names() -> list[str]:
    """Return the C files and headers, relative to SOURCE_FOLDER, in the order of their paths' parts.

    Path.rglob() takes as long as reading and hashing them.
    """
    root = os.fspath(SOURCE_FOLDER)
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    found = [path[len(root) + 1 :] for path in paths if path.endswith((".c", ".h"))]
    return sorted(found, key=lambda name: name.split(os.sep))


def build(
    variant: str, compiler: Compiler, folder: Path, seconds: float = BUILD_S, cpu_seconds: int | None = None
) -> bytes:
    """Build a variant and return the content of the shared library.

    The files are compiled in parallel, in a temporary folder below `folder`. cpu_seconds: CPU time limit of each
    compiler process; None = no limit. Errors: CpuLibraryError with the compiler's output, or if the build takes longer
    than `seconds`.
    """
    end = time.monotonic() + seconds
    try:
        with tempfile.TemporaryDirectory(
            prefix=BUILD_FOLDER_PREFIX, dir=folder, ignore_cleanup_errors=True
        ) as build_folder:
            limit = [] if cpu_seconds is None else ["sh", "-c", 'ulimit -t "$0"; exec "$@"', str(cpu_seconds)]
            command = [*limit, *compiler.command, *FLAGS, "-I", str(SOURCE_FOLDER), *VARIANTS[variant].flags]
            sources = sorted(SOURCE_FOLDER.rglob("*.c"))
            _make_common_header(command, build_folder, end, is_compiled=len(sources) >= MANY_FILES)
            each = [*command, "-include", _COMMON_HEADER, "-c"]
            compiling = [[*each, str(path), "-o", f"{path.stem}.o"] for path in sources]
            _run("failed", compiling, build_folder, end)
            linking = [*command, "-shared", *(f"{path.stem}.o" for path in sources), "-lm", "-o", "library.so"]
            _run("does not link", [linking], build_folder, end)
            return Path(build_folder, "library.so").read_bytes()
    except subprocess.TimeoutExpired:
        raise CpuLibraryError(f"{shlex.join(compiler.command)} did not finish within {seconds:.0f} s") from None
    except _CompilerFailedError as error:
        raise CpuLibraryError(f"{shlex.join(compiler.command)} {error}") from None
    except OSError as error:
        raise CpuLibraryError(f"cannot build in {folder}: {error}") from error


_COMMON_HEADER = "common.h"
MANY_FILES = 8  # from this many files on, precompiling the header saves more time than it takes


def _make_common_header(command: list[str], folder: str, end: float, *, is_compiled: bool) -> None:
    """Write the header that all files include. Parsing its text would take a third of each file's compilation.

    If the compiler cannot precompile it, the text is used.
    """
    Path(folder, _COMMON_HEADER).write_text(
        "#if defined(__x86_64__)\n#include <immintrin.h>\n#elif defined(WITH_NEON)\n#include <arm_neon.h>\n#endif\n"
    )
    if is_compiled:
        with contextlib.suppress(_CompilerFailedError):
            _run("failed", [[*command, "-x", "c-header", _COMMON_HEADER, "-o", f"{_COMMON_HEADER}.gch"]], folder, end)


class _CompilerFailedError(Exception):
    """The compiler failed; the message has its output."""


def _run(failure: str, commands: list[list[str]], folder: str, end: float) -> None:
    """Run the commands in parallel, each in a process group of its own.

    Errors: subprocess.TimeoutExpired if they had not finished at `end` on the monotonic clock and were killed;
    _CompilerFailedError if one failed.
    """
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_started(command, folder)) for command in commands]
        said = [process.communicate(timeout=max(0.0, end - time.monotonic()))[0] for process in running]
    if statuses := [process.returncode for process in running if process.returncode]:
        raise _CompilerFailedError(f"{failure}: {''.join(said)[-2000:] or f'its status is {statuses[0]}'}")


@contextlib.contextmanager
def _started(command: list[str], folder: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            if process.returncode is None:  # not reaped yet, so its process id is still valid
                os.killpg(process.pid, signal.SIGKILL)


def with_digest(content: bytes) -> bytes:
    """Append the content's digest. A shared library may have arbitrary bytes at its end, so one file holds both."""
    return content + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def is_intact(content: bytes) -> bool:
    """Return whether the content ends with the digest appended by with_digest()."""
    return len(content) > _DIGEST_BYTES and with_digest(content[:-_DIGEST_BYTES]) == content


_DIGEST_BYTES = 32
