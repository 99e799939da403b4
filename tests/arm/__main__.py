"""The wheel for ARM64, the demo model and the kernels' tests, emulated: `make arm`.

usage: python -m tests.arm [PYTEST ARGUMENT ...] [--part PART ...] [--cpu CPU ...] [--dtype DTYPE ...]
       [--quantization QUANTIZATION ...] [--way WAY ...] [--tokens TOKENS] [--folder FOLDER]

Parts: `wheel` builds the wheel, installs it and loads its kernels. `demo` runs that wheel: the demo model must say the
same by every variant for ARM64, embedded and over a socket, with exact products and with those in 8 bits, and by the
variant portable the tokens of this machine.
`tests` runs the kernels' tests on each CPU, whose best variant must be the expected one, each variant's on one of them;
PYTEST ARGUMENTS are run instead. QEMU shows results and not speed.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.arm import wheel
from tests.arm.system import ROOT, add_test_packages, build_kernels, environment, prepared_system

#: CPUs of QEMU's, and the variants whose tests run on each: the best one that it runs is the first.
CPUS = {"max": ("neon_bf16",), "neoverse-n1": ("neon_dot",), "cortex-a72": ("neon", "portable")}
DTYPES = ("float32", "bfloat16")
QUANTIZATIONS = ("auto", "int8")
WAYS = ("embedded", "socket")
_TESTS = ("tests/kernels/cpu", "tests/kernels/test_dequantize.py", "tests/core/runner/test_cpu_variants.py")
#: QEMU 7.2 ends a forked process that starts a thread: an assertion of its own fails.
_NOT_RUN = "tests/kernels/cpu/test_pool.py::test_a_forked_child_runs_jobs_alone_and_may_start_its_own"
_PYTEST = ("-q", "--timeout=1800", "-p", "no:cacheprovider", "-p", "tests.arm.by_file", f"--deselect={_NOT_RUN}")
_BEST = "from kernels.cpu.build import usable_variants; print(usable_variants()[0])"
_DEMO = Path(__file__).with_name("demo.py")
_PATIENCE_S = 4 * 3600
_LAST_BITS = 1e-6


def run(command: list[str], folder: Path, settings: dict[str, str] | None) -> str:
    """Return what a command prints. Errors: CalledProcessError."""
    done = subprocess.run(command, cwd=folder, env=settings, stdout=subprocess.PIPE, check=True, timeout=_PATIENCE_S)
    return done.stdout.decode()


def cpu_seconds() -> float:
    """Return the CPU time of this process's children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(python: Path, folder: Path, cpu: str, case: tuple[str, ...]) -> dict[str, Any]:
    """Return what tests/arm/demo.py finds with the installed wheel: case is its arguments.

    A run takes up to an hour on a busy machine, so what a wheel said is kept. Its folder for sockets is its own, since
    engines that start remove addresses on which nothing has listened for ten minutes.
    """
    kept = folder / "said" / f"{wheel.installed_digest(folder)}-{cpu}-{'-'.join(case)}.json"
    if not kept.exists():
        before = cpu_seconds()
        with tempfile.TemporaryDirectory(prefix="arm-") as own:
            settings = {**wheel.settings(folder, cpu), "TMPDIR": own}
            printed = run([str(python), "-P", str(_DEMO), *case], folder, settings)
        print(f"{cpu}: {' '.join(case)}: {cpu_seconds() - before:.0f} s of CPU time", flush=True)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(printed.splitlines()[-1])
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def agree(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two machines say the same.

    NumPy's float32 exp(), by which log probabilities are made, has other last bits on another architecture.
    """
    pairs = zip(left["logprobs"], right["logprobs"], strict=True)
    return left["tokens"] == right["tokens"] and all(
        abs(float.fromhex(one) - float.fromhex(other)) <= _LAST_BITS for one, other in pairs
    )


def compare(python: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return what differs between variants that promise the same."""
    wrong = []
    for dtype, quantization in itertools.product(options.dtype, options.quantization):
        tokens, kind = str(options.tokens), f"{dtype}, {quantization}"
        command = [sys.executable, str(_DEMO), "portable", dtype, "embedded", tokens, quantization]
        here = json.loads(run(command, ROOT, None).splitlines()[-1])
        wrong += [
            f"portable, {kind}, {way}: not as on this machine"
            for way in options.way
            if not agree(say(python, folder, "max", ("portable", dtype, way, tokens, quantization)), here)
        ]
        found = {
            (cpu, way): say(python, folder, cpu, (CPUS[cpu][0], dtype, way, tokens, quantization))
            for cpu in options.cpu
            for way in options.way
        }
        first = next(iter(found.values()))
        wrong += [f"{CPUS[cpu][0]}, {kind}, {way}: differs" for (cpu, way), value in found.items() if value != first]
        same = sum(left == right for left, right in zip(first["tokens"], here["tokens"], strict=True))
        print(f"{kind}: {same} of {options.tokens} tokens as by portable, which rounds products by themselves")
    return wrong


def test(python: Path, folder: Path, cpus: list[str], arguments: list[str]) -> list[str]:
    """Return the CPUs on which a test fails, or whose best variant is another one."""
    add_test_packages(folder)
    build_kernels(folder)
    failed = []
    for cpu in cpus:
        before, settings = cpu_seconds(), environment(folder, cpu)
        best = run([str(python), "-c", _BEST], ROOT, settings).strip()
        tests = [str(python), "-m", "pytest", *_PYTEST, "--variants", *CPUS[cpu], "--", *arguments]
        status = subprocess.run(tests, cwd=ROOT, env=settings, check=False).returncode
        used = cpu_seconds() - before
        print(f"{cpu}: best variant {best}, tests ended with {status}: {used:.0f} s of CPU time", flush=True)
        if best != CPUS[cpu][0] or status:
            failed.append(cpu)
    return failed


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 = all tests pass, and nothing differs."""
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n\n")[0])
    parser.add_argument("--part", nargs="+", choices=("wheel", "demo", "tests"), default=["wheel", "demo", "tests"])
    parser.add_argument("--cpu", nargs="+", choices=CPUS, default=list(CPUS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=ROOT / ".arm")
    options, pytest_arguments = parser.parse_known_args(arguments)
    folder, python = prepared_system(options.folder)
    failed = []
    if "wheel" in options.part:
        wheel.build_and_load(folder)
    if "demo" in options.part:
        failed += compare(python, folder, options)
    if "tests" in options.part:
        failed += test(python, folder, options.cpu, pytest_arguments or list(_TESTS))
    print("\n".join(failed) or "all pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
