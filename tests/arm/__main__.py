"""The kernels for ARM64, emulated: `make arm`.

usage: python -m tests.arm [--cpu CPU ...] [--folder FOLDER] [PYTEST ARGUMENT ...]

The kernels' tests run under QEMU once for each CPU, whose best variant must be the expected one; PYTEST ARGUMENTS
replace them. Then the demo model must say the same by every variant for ARM64, embedded and over a socket, and by the
variant portable the same as on this machine. QEMU shows results and not speed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.arm.system import ROOT, environment, prepared_system

#: CPUs of QEMU's, and the best variant for each.
CPUS = {"cortex-a72": "neon", "neoverse-n1": "neon_dot", "max": "neon_bf16"}
_TESTS = ("tests/kernels/cpu", "tests/kernels/test_dequantize.py", "tests/core/runner/test_cpu_variants.py")
_BEST = "from kernels.cpu.build import usable_variants; print(usable_variants()[0])"
_PATIENCE_S = 3600


def run(python: Path | str, arguments: list[str], settings: dict[str, str] | None) -> str:
    """Return what a command of a Python prints. Errors: CalledProcessError."""
    command = [str(python), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, check=True, timeout=_PATIENCE_S)
    return done.stdout.decode()


def demo(python: Path | str, variant: str, settings: dict[str, str] | None) -> dict[str, Any]:
    """Return what tests/arm/demo.py finds: by dtype and way."""
    found: dict[str, Any] = json.loads(run(python, ["-m", "tests.arm.demo", variant], settings).splitlines()[-1])
    return found


def compare(python: Path, folder: Path) -> list[str]:
    """Return what differs between variants that promise the same."""
    here = demo(sys.executable, "portable", None)
    there = {name: demo(python, name, environment(folder, "max")) for name in ("portable", *CPUS.values())}
    wrong = [
        f"portable, {each}: not as on this machine" for each, value in here.items() if there["portable"][each] != value
    ]
    for name in CPUS.values():
        wrong += [f"{name}, {each}: not as neon" for each, value in there["neon"].items() if there[name][each] != value]
        for each, value in here.items():
            if there[name][each]["tokens"] != value["tokens"]:
                print(f"{name}, {each}: other tokens than portable, which rounds products by themselves")
    for name, found in there.items():
        for each in ("float32", "bfloat16"):
            if found[f"{each} embedded"] != found[f"{each} socket"]:
                wrong.append(f"{name}, {each}: the socket differs")
    return wrong


def main(arguments: list[str]) -> int:
    """Return the exit status: 0 = all tests pass, and nothing differs."""
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].splitlines()[0])
    parser.add_argument("--cpu", nargs="+", choices=CPUS, default=list(CPUS))
    parser.add_argument("--folder", type=Path, default=ROOT / ".arm")
    options, pytest_arguments = parser.parse_known_args(arguments)
    folder, python = prepared_system(options.folder)
    failed = []
    for cpu in options.cpu:
        settings = environment(folder, cpu)
        best = run(python, ["-c", _BEST], settings).strip()
        print(f"{cpu}: best variant {best}", flush=True)
        tests = [
            str(python),
            "-m",
            "pytest",
            "-q",
            "--timeout=1800",
            "-p",
            "no:cacheprovider",
            *(pytest_arguments or _TESTS),
        ]
        if best != CPUS[cpu] or subprocess.run(tests, cwd=ROOT, env=settings, check=False).returncode:
            failed.append(cpu)
    failed += compare(python, folder)
    print("\n".join(failed) or "all pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
